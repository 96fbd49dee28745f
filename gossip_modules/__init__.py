"""Decentralised (gossip) data-parallel training in PyTorch: the names of daily use.

All graphs are in `gossip_modules.graph_manager`, weights in `.mixing_manager`, compressors in `.compression`, base
classes for your own methods in `.extend`, dpwa in `.dpwa`, and the MPI backend in `.mpi`.
"""

import warnings
from typing import TYPE_CHECKING, Any

from . import compression as compression
from . import extend as extend
from . import extras as _extras
from . import graph_manager as graph_manager
from . import mixing_manager as mixing_manager
from . import simple_distributed as simple_distributed
from .algorithms.choco import Choco
from .algorithms.d2 import D2
from .algorithms.d_psgd import DPSGD
from .algorithms.decentlam import DecentLaM
from .algorithms.deep_squeeze import DeepSqueeze
from .algorithms.diloco import DiLoCo
from .algorithms.eager_diloco import EagerDiLoCo
from .algorithms.exact_diffusion import ExactDiffusion
from .algorithms.gasloc import GASLoC
from .algorithms.gradient_tracking import GradientTracking
from .algorithms.isoloco import IsoLoCo
from .algorithms.local_sgd import LocalSGD
from .algorithms.moniqua import Moniqua
from .algorithms.muloco import MuLoCo
from .algorithms.noloco import NoLoCo
from .algorithms.power_gossip import PowerGossip
from .algorithms.qg_dsgdm import QGDSGDm
from .algorithms.relay_sgd import RelaySGD
from .algorithms.slowmo import SlowMo
from .algorithms.sparse_loco import SparseLoCo
from .algorithms.sparta import Sparta
from .algorithms.streaming_diloco import StreamingDiLoCo
from .compression.quantizer import QSGD, SignNorm
from .compression.sparsifier import RandomK, TopK
from .graph_manager import RingGraph
from .membership.membership import Membership
from .metrics import MetricsLogger
from .old_calls import REMOVED
from .optim.delayed_nesterov import DelayedNesterov
from .optim.gossip_adamw import GossipAdamW
from .optim.muon import MuonAdamW
from .schedule import Schedule
from .transport.connect import connect
from .transport.stores import Progress, job_store
from .version import __version__ as __version__
from .wrappers.all_reduce import AllReduceDataParallel
from .wrappers.composable import gossip
from .wrappers.gossip import GossipDataParallel

if TYPE_CHECKING:  # extras, which are imported where a program asks for them
    from . import dpwa as dpwa
    from . import matcha as matcha
    from . import methods as methods
    from . import mpi as mpi
    from .ad_psgd.wrapper import BilatGossipDataParallel
    from .dpwa.wrapper import PairwiseDataParallel
    from .matcha.graph import MatchaGraph
    from .wagma.wrapper import GroupAverageDataParallel

__all__ = [
    "D2",
    "DPSGD",
    "QSGD",
    "AllReduceDataParallel",
    "BilatGossipDataParallel",
    "Choco",
    "DecentLaM",
    "DeepSqueeze",
    "DelayedNesterov",
    "DiLoCo",
    "EagerDiLoCo",
    "ExactDiffusion",
    "GASLoC",
    "GossipAdamW",
    "GossipDataParallel",
    "GradientTracking",
    "GroupAverageDataParallel",
    "IsoLoCo",
    "LocalSGD",
    "MatchaGraph",
    "Membership",
    "MetricsLogger",
    "Moniqua",
    "MuLoCo",
    "MuonAdamW",
    "NoLoCo",
    "PairwiseDataParallel",
    "PowerGossip",
    "Progress",
    "QGDSGDm",
    "RandomK",
    "RelaySGD",
    "RingGraph",
    "Schedule",
    "SignNorm",
    "SlowMo",
    "SparseLoCo",
    "Sparta",
    "StreamingDiLoCo",
    "TopK",
    "connect",
    "gossip",
    "job_store",
]

_MOVED = {
    "Algorithm": "extend",
    "BaseGraph": "graph_manager",
    "ButterflyGroups": "graph_manager",
    "Cast": "compression",
    "ChainGraph": "graph_manager",
    "ChunkTopK": "compression",
    "ClockInterpolation": "dpwa",
    "CompleteGraph": "graph_manager",
    "Compressor": "compression",
    "ConstantInterpolation": "dpwa",
    "DoubleBinaryTreeGraph": "graph_manager",
    "DynamicBipartiteCompleteGraph": "graph_manager",
    "DynamicBipartiteExponentialGraph": "graph_manager",
    "DynamicBipartiteLinearGraph": "graph_manager",
    "DynamicDirectedExponentialGraph": "graph_manager",
    "DynamicDirectedLinearGraph": "graph_manager",
    "Engine": "extend",
    "EquiDynGraph": "graph_manager",
    "EquiStaticGraph": "graph_manager",
    "FlatBuffer": "extend",
    "FlatVector": "extend",
    "GlobalAverage": "extend",
    "GossipModule": "extend",
    "GossipWrapper": "extend",
    "GraphManager": "graph_manager",
    "GraphMixing": "mixing_manager",
    "HypercubeGraph": "graph_manager",
    "Interpolation": "dpwa",
    "LaplacianMixing": "mixing_manager",
    "LockstepEngine": "extend",
    "LossInterpolation": "dpwa",
    "MatrixMixing": "mixing_manager",
    "Memory": "extend",
    "MetropolisHastingsMixing": "mixing_manager",
    "Mix": "extend",
    "Mixer": "extend",
    "MixingManager": "mixing_manager",
    "MixingWeights": "mixing_manager",
    "NPeerDynamicDirectedExponentialGraph": "graph_manager",
    "NetworkXGraph": "graph_manager",
    "OuterMethod": "extend",
    "OverlapEngine": "extend",
    "PairwiseAverager": "dpwa",
    "PairwiseConfig": "dpwa",
    "ProcessGroupTransport": "extend",
    "PushPull": "extend",
    "PushSum": "extend",
    "RandomGraph": "graph_manager",
    "RandomMatchingGraph": "graph_manager",
    "RandomPushGraph": "graph_manager",
    "SGDStep": "extend",
    "Selection": "extend",
    "SimpleGossipDataParallel": "simple_distributed",
    "StaticExponentialGraph": "graph_manager",
    "SyncEngine": "extend",
    "TorusGraph": "graph_manager",
    "Transport": "extend",
    "TwoBit": "compression",
    "UniformMixing": "mixing_manager",
    "Vectors": "extend",
    "WeightedGraph": "graph_manager",
    "init_mpi_process_group": "mpi",
    "measure_link_times": "matcha.link_times",
    "mpi_store": "mpi",
    "register_mpi_backend": "mpi",
    "select_graph": "graph_manager",
}
"""Names that have moved from here, with their modules."""


def __getattr__(name: str) -> Any:
    if name in REMOVED:
        raise ImportError(f"got {__name__}.{name}, which is gone: {REMOVED[name]}", name=__name__)
    if name in _extras.NAMES or name in _extras.EXTRAS:
        found = globals()[name] = _extras.load(_extras.place_of(name))
        return found
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_MOVED[name]}"
    warnings.warn(f"{__name__}.{name} is now {module}.{name}; the old name will go", DeprecationWarning, stacklevel=2)
    return _extras.load(f"{_MOVED[name]}:{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_extras.NAMES, *_extras.EXTRAS})

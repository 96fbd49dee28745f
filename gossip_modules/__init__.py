"""Decentralised (gossip) data-parallel training in PyTorch: the names of daily use.

All graphs are in `gossip_modules.graph_manager`, weights in `.mixing_manager`, compressors in `.compression`, base
classes for your own methods in `.extend`, partitions of data in `.partitions`, dpwa in `.dpwa`, and the MPI backend in
`.mpi`.
"""

from typing import TYPE_CHECKING, Any

from . import compression as compression
from . import extend as extend
from . import extras as _extras
from . import graph_manager as graph_manager
from . import mixing_manager as mixing_manager
from . import old_names as _old_names
from . import partitions as partitions
from .algorithms.choco import Choco
from .algorithms.clipped_gossip import ClippedGossip
from .algorithms.d2 import D2
from .algorithms.d_psgd import DPSGD
from .algorithms.decentlam import DecentLaM
from .algorithms.deep_squeeze import DeepSqueeze
from .algorithms.diloco import DiLoCo
from .algorithms.eager_diloco import EagerDiLoCo
from .algorithms.exact_diffusion import ExactDiffusion
from .algorithms.extra import EXTRA
from .algorithms.gasloc import GASLoC
from .algorithms.gradient_tracking import GradientTracking
from .algorithms.isoloco import IsoLoCo
from .algorithms.kgt import KGT
from .algorithms.local_sgd import LocalSGD
from .algorithms.moniqua import Moniqua
from .algorithms.muloco import MuLoCo
from .algorithms.noloco import NoLoCo
from .algorithms.power_gossip import PowerGossip
from .algorithms.prox_skip import ProxSkip
from .algorithms.pulse_loco import PULSELoCo
from .algorithms.qg_dsgdm import QGDSGDm
from .algorithms.rda import RDA
from .algorithms.relay_sgd import RelaySGD
from .algorithms.running_sums import RunningSums
from .algorithms.slowmo import SlowMo
from .algorithms.sparse_loco import SparseLoCo
from .algorithms.sparta import Sparta
from .algorithms.streaming_diloco import StreamingDiLoCo
from .algorithms.trimmed_mean import TrimmedMean
from .compression.quantizer import QSGD, SignNorm
from .compression.sparsifier import RandomK, TopK
from .graph_manager import RingGraph
from .membership.membership import Membership
from .metrics import MetricsLogger
from .optim.delayed_nesterov import DelayedNesterov
from .optim.gossip_adamw import GossipAdamW
from .optim.mixed_momentum import MixedMomentum
from .optim.muon import MuonAdamW
from .optim.outer_optimizer import OuterOptimizer
from .schedule import Schedule
from .transport.connect import connect
from .transport.stores import Progress, job_store
from .version import __version__ as __version__
from .wrappers.all_reduce import AllReduceDataParallel
from .wrappers.composable import gossip
from .wrappers.gossip import GossipDataParallel

if TYPE_CHECKING:  # extras, which are imported where a program asks for them
    from . import ad_psgd as ad_psgd
    from . import compat as compat
    from . import dpwa as dpwa
    from . import integrations as integrations
    from . import lab as lab
    from . import matcha as matcha
    from . import methods as methods
    from . import mpi as mpi
    from . import testing as testing
    from . import wagma as wagma
    from .ad_psgd.wrapper import BilatGossipDataParallel
    from .dpwa.wrapper import PairwiseDataParallel
    from .matcha.graph import MatchaGraph
    from .wagma.wrapper import GroupAverageDataParallel

__all__ = [
    "D2",
    "DPSGD",
    "EXTRA",
    "KGT",
    "QSGD",
    "RDA",
    "AllReduceDataParallel",
    "BilatGossipDataParallel",
    "Choco",
    "ClippedGossip",
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
    "MixedMomentum",
    "Moniqua",
    "MuLoCo",
    "MuonAdamW",
    "NoLoCo",
    "OuterOptimizer",
    "PULSELoCo",
    "PairwiseDataParallel",
    "PowerGossip",
    "Progress",
    "ProxSkip",
    "QGDSGDm",
    "RandomK",
    "RelaySGD",
    "RingGraph",
    "RunningSums",
    "Schedule",
    "SignNorm",
    "SlowMo",
    "SparseLoCo",
    "Sparta",
    "StreamingDiLoCo",
    "TopK",
    "TrimmedMean",
    "connect",
    "gossip",
    "job_store",
]


if not TYPE_CHECKING:  # a type checker would take any name, with Any as its type

    def __getattr__(name: str) -> Any:
        if name in _extras.NAMES or name in _extras.EXTRAS:
            found = globals()[name] = _extras.load(_extras.place_of(name))
            return found
        return _old_names.module_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_extras.NAMES, *_extras.EXTRAS})

"""Decentralised (gossip) data-parallel training in PyTorch: the public names."""

import warnings
from typing import Any

from . import methods as methods
from .ad_psgd.wrapper import BilatGossipDataParallel
from .algorithms.choco import Choco
from .algorithms.d2 import D2
from .algorithms.decentlam import DecentLaM
from .algorithms.deep_squeeze import DeepSqueeze
from .algorithms.diloco import DiLoCo
from .algorithms.eager_diloco import EagerDiLoCo
from .algorithms.exact_diffusion import ExactDiffusion
from .algorithms.gasloc import GASLoC
from .algorithms.gradient_tracking import GradientTracking
from .algorithms.local_sgd import LocalSGD
from .algorithms.moniqua import Moniqua
from .algorithms.noloco import NoLoCo
from .algorithms.outer_method import OuterMethod
from .algorithms.power_gossip import PowerGossip
from .algorithms.qg_dsgdm import QGDSGDm
from .algorithms.relay_sgd import RelaySGD
from .algorithms.slowmo import SlowMo
from .algorithms.sparse_loco import SparseLoCo
from .algorithms.sparta import Sparta
from .algorithms.streaming_diloco import StreamingDiLoCo
from .compression.chunk_top_k import ChunkTopK
from .compression.compressor import Cast, Compressor
from .compression.quantizer import QSGD, SignNorm
from .compression.sparsifier import RandomK, TopK
from .compression.two_bit import TwoBit
from .consensus_control import ConsensusControl
from .dpwa.averager import PairwiseAverager
from .dpwa.config import PairwiseConfig
from .dpwa.interpolation import ClockInterpolation, ConstantInterpolation, Interpolation, LossInterpolation
from .dpwa.wrapper import PairwiseDataParallel
from .engine.engine import Engine, LockstepEngine, SyncEngine
from .engine.overlap import OverlapEngine
from .flat.buffer import FlatBuffer
from .flat.selection import Selection
from .flat.vector import FlatVector
from .gossiper.gossiper import Gossiper
from .gossiper.mixer import GlobalAverage, Mixer
from .gossiper.push_pull import PushPull
from .gossiper.push_sum import PushSum
from .graph_manager.base import GraphManager
from .graph_manager.base_graph import BaseGraph
from .graph_manager.butterfly_groups import ButterflyGroups
from .graph_manager.dynamic_graphs import (
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    NPeerDynamicDirectedExponentialGraph,
)
from .graph_manager.equi_dyn_graph import EquiDynGraph
from .graph_manager.equi_static_graph import EquiStaticGraph
from .graph_manager.predefined_graphs import select_graph
from .graph_manager.random_graph import RandomGraph
from .graph_manager.random_matching_graph import RandomMatchingGraph
from .graph_manager.random_push_graph import RandomPushGraph
from .graph_manager.static_exponential_graph import StaticExponentialGraph
from .graph_manager.static_graphs import (
    ChainGraph,
    CompleteGraph,
    DoubleBinaryTreeGraph,
    HypercubeGraph,
    NetworkXGraph,
    RingGraph,
    TorusGraph,
)
from .graph_manager.weighted_graph import WeightedGraph
from .matcha.graph import MatchaGraph
from .matcha.link_times import measure_link_times
from .membership.membership import Membership
from .mixing_manager.base import (
    MetropolisHastingsMixing,
    MixingManager,
    MixingWeights,
    UniformMixing,
)
from .mixing_manager.graph_weights import GraphMixing
from .mixing_manager.laplacian import LaplacianMixing
from .mixing_manager.matrix import MatrixMixing
from .mpi.backend import init_mpi_process_group, mpi_store, register_mpi_backend
from .optim.accum_adam import AccumAdam
from .rounds.algorithm import Algorithm
from .rounds.memory import Memory
from .rounds.requests import Mix
from .rounds.vectors import SGDStep, Vectors
from .schedule import Schedule
from .transport.base import Transport
from .transport.connect import connect
from .transport.process_group import ProcessGroupTransport
from .transport.progress import Progress, job_store
from .version import __version__ as __version__
from .wagma.wrapper import GroupAverageDataParallel
from .wrappers.all_reduce import AllReduceDataParallel
from .wrappers.base import GossipWrapper
from .wrappers.composable import GossipModule, SimpleGossipDataParallel, gossip
from .wrappers.gossip import GossipDataParallel

__all__ = [
    "D2",
    "QSGD",
    "AccumAdam",
    "Algorithm",
    "AllReduceDataParallel",
    "BaseGraph",
    "BilatGossipDataParallel",
    "ButterflyGroups",
    "Cast",
    "ChainGraph",
    "Choco",
    "ChunkTopK",
    "ClockInterpolation",
    "CompleteGraph",
    "Compressor",
    "ConsensusControl",
    "ConstantInterpolation",
    "DecentLaM",
    "DeepSqueeze",
    "DiLoCo",
    "DoubleBinaryTreeGraph",
    "DynamicBipartiteCompleteGraph",
    "DynamicBipartiteExponentialGraph",
    "DynamicBipartiteLinearGraph",
    "DynamicDirectedExponentialGraph",
    "DynamicDirectedLinearGraph",
    "EagerDiLoCo",
    "Engine",
    "EquiDynGraph",
    "EquiStaticGraph",
    "ExactDiffusion",
    "FlatBuffer",
    "FlatVector",
    "GASLoC",
    "GlobalAverage",
    "GossipDataParallel",
    "GossipModule",
    "GossipWrapper",
    "Gossiper",
    "GradientTracking",
    "GraphManager",
    "GraphMixing",
    "GroupAverageDataParallel",
    "HypercubeGraph",
    "Interpolation",
    "LaplacianMixing",
    "LocalSGD",
    "LockstepEngine",
    "LossInterpolation",
    "MatchaGraph",
    "MatrixMixing",
    "Membership",
    "Memory",
    "MetropolisHastingsMixing",
    "Mix",
    "Mixer",
    "MixingManager",
    "MixingWeights",
    "Moniqua",
    "NPeerDynamicDirectedExponentialGraph",
    "NetworkXGraph",
    "NoLoCo",
    "OuterMethod",
    "OverlapEngine",
    "PairwiseAverager",
    "PairwiseConfig",
    "PairwiseDataParallel",
    "PowerGossip",
    "ProcessGroupTransport",
    "Progress",
    "PushPull",
    "PushSum",
    "QGDSGDm",
    "RandomGraph",
    "RandomK",
    "RandomMatchingGraph",
    "RandomPushGraph",
    "RelaySGD",
    "RingGraph",
    "SGDStep",
    "Schedule",
    "Selection",
    "SignNorm",
    "SimpleGossipDataParallel",
    "SlowMo",
    "SparseLoCo",
    "Sparta",
    "StaticExponentialGraph",
    "StreamingDiLoCo",
    "SyncEngine",
    "TopK",
    "TorusGraph",
    "Transport",
    "TwoBit",
    "UniformMixing",
    "Vectors",
    "WeightedGraph",
    "connect",
    "gossip",
    "init_mpi_process_group",
    "job_store",
    "measure_link_times",
    "mpi_store",
    "register_mpi_backend",
    "select_graph",
]

_RENAMED = {"LockstepWrapper": "GossipDataParallel"}
"""Old public names, with those that replace them."""


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"gossip_modules.{name} is now gossip_modules.{_RENAMED[name]}; the old name will go",
        DeprecationWarning,
        stacklevel=2,
    )
    return globals()[_RENAMED[name]]

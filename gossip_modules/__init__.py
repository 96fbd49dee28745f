"""Decentralised (gossip) data-parallel training in PyTorch: the public names."""

from .ad_psgd import BilatGossipDataParallel
from .ar_distributed import AllReduceDataParallel
from .base_graphs import select_graph
from .butterfly_groups import ButterflyGroups
from .choco import Choco
from .compressor import Cast, Compressor
from .connect import connect
from .curve_keys import CurveKeys
from .deep_squeeze import DeepSqueeze
from .distributed import GossipDataParallel
from .dynamic_graphs import (
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    NPeerDynamicDirectedExponentialGraph,
)
from .engine import Engine, LockstepEngine, SyncEngine
from .flat_buffer import FlatBuffer
from .flat_vector import FlatVector
from .gossiper import GlobalAverage, Gossiper, Mixer
from .graph_manager import GraphManager
from .interpolation import ClockInterpolation, ConstantInterpolation, Interpolation, LossInterpolation
from .laplacian_mixing import LaplacianMixing
from .link_times import measure_link_times
from .lockstep_wrapper import LockstepWrapper
from .matcha_graph import MatchaGraph
from .matrix_mixing import MatrixMixing
from .mixing_manager import (
    MetropolisHastingsMixing,
    MixingManager,
    MixingWeights,
    UniformMixing,
)
from .moniqua import Moniqua
from .mpi import init_mpi_process_group, mpi_store, register_mpi_backend
from .overlap_engine import OverlapEngine
from .pairwise import PairwiseDataParallel
from .pairwise_averager import PairwiseAverager
from .pairwise_config import PairwiseConfig
from .power_gossip import PowerGossip
from .progress import Progress, job_store
from .push_sum import PushPull, PushSum
from .quantizer import QSGD, SignNorm
from .schedule import Schedule
from .simple_distributed import SimpleGossipDataParallel
from .sparsifier import RandomK, TopK
from .static_graphs import CompleteGraph, HypercubeGraph, NetworkXGraph, RingGraph, TorusGraph
from .transport import ProcessGroupTransport, Transport
from .wagma import GroupAverageDataParallel
from .wrapper import GossipWrapper

__all__ = [
    "QSGD",
    "AllReduceDataParallel",
    "BilatGossipDataParallel",
    "ButterflyGroups",
    "Cast",
    "Choco",
    "ClockInterpolation",
    "CompleteGraph",
    "Compressor",
    "ConstantInterpolation",
    "CurveKeys",
    "DeepSqueeze",
    "DynamicBipartiteCompleteGraph",
    "DynamicBipartiteExponentialGraph",
    "DynamicBipartiteLinearGraph",
    "DynamicDirectedExponentialGraph",
    "DynamicDirectedLinearGraph",
    "Engine",
    "FlatBuffer",
    "FlatVector",
    "GlobalAverage",
    "GossipDataParallel",
    "GossipWrapper",
    "Gossiper",
    "GraphManager",
    "GroupAverageDataParallel",
    "HypercubeGraph",
    "Interpolation",
    "LaplacianMixing",
    "LockstepEngine",
    "LockstepWrapper",
    "LossInterpolation",
    "MatchaGraph",
    "MatrixMixing",
    "MetropolisHastingsMixing",
    "Mixer",
    "MixingManager",
    "MixingWeights",
    "Moniqua",
    "NPeerDynamicDirectedExponentialGraph",
    "NetworkXGraph",
    "OverlapEngine",
    "PairwiseAverager",
    "PairwiseConfig",
    "PairwiseDataParallel",
    "PowerGossip",
    "ProcessGroupTransport",
    "Progress",
    "PushPull",
    "PushSum",
    "RandomK",
    "RingGraph",
    "Schedule",
    "SignNorm",
    "SimpleGossipDataParallel",
    "SyncEngine",
    "TopK",
    "TorusGraph",
    "Transport",
    "UniformMixing",
    "connect",
    "init_mpi_process_group",
    "job_store",
    "measure_link_times",
    "mpi_store",
    "register_mpi_backend",
    "select_graph",
]

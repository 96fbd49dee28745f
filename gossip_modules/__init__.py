"""Decentralised (gossip) data-parallel training in PyTorch: the public names."""

from .ad_psgd import BilatGossipDataParallel
from .ar_distributed import AllReduceDataParallel
from .base_graphs import select_graph
from .choco import Choco
from .compressor import Cast, Compressor
from .connect import connect
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
from .engine import Engine, LockstepEngine, OverlapEngine, SyncEngine
from .flat_buffer import FlatBuffer
from .flat_vector import FlatVector
from .gossiper import GlobalAverage, Gossiper, Mixer, PushPull, PushSum
from .graph_manager import GraphManager
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
from .power_gossip import PowerGossip
from .quantizer import QSGD, SignNorm
from .schedule import Schedule
from .simple_distributed import SimpleGossipDataParallel
from .sparsifier import RandomK, TopK
from .static_graphs import CompleteGraph, HypercubeGraph, NetworkXGraph, RingGraph, TorusGraph
from .transport import ProcessGroupTransport, Transport
from .wrapper import GossipWrapper

__all__ = [
    "QSGD",
    "AllReduceDataParallel",
    "BilatGossipDataParallel",
    "Cast",
    "Choco",
    "CompleteGraph",
    "Compressor",
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
    "HypercubeGraph",
    "LaplacianMixing",
    "LockstepEngine",
    "LockstepWrapper",
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
    "PowerGossip",
    "ProcessGroupTransport",
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
    "measure_link_times",
    "select_graph",
]

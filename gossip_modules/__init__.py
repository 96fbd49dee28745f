"""Decentralised (gossip) data-parallel training in PyTorch: the public names."""

from .ar_distributed import AllReduceDataParallel
from .connect import connect
from .distributed import GossipDataParallel
from .dynamic_graphs import (
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    NPeerDynamicDirectedExponentialGraph,
)
from .engine import Engine, OverlapEngine, SyncEngine
from .flat_buffer import FlatBuffer
from .flat_vector import FlatVector
from .gossiper import GlobalAverage, Gossiper, Mixer, PushPull, PushSum
from .graph_manager import GraphManager
from .matrix_mixing import MatrixMixing
from .mixing_manager import (
    MetropolisHastingsMixing,
    MixingManager,
    MixingWeights,
    UniformMixing,
)
from .schedule import Schedule
from .simple_distributed import SimpleGossipDataParallel
from .static_graphs import CompleteGraph, HypercubeGraph, NetworkXGraph, RingGraph, TorusGraph
from .transport import ProcessGroupTransport, Transport
from .wrapper import GossipWrapper

__all__ = [
    "AllReduceDataParallel",
    "CompleteGraph",
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
    "MatrixMixing",
    "MetropolisHastingsMixing",
    "Mixer",
    "MixingManager",
    "MixingWeights",
    "NPeerDynamicDirectedExponentialGraph",
    "NetworkXGraph",
    "OverlapEngine",
    "ProcessGroupTransport",
    "PushPull",
    "PushSum",
    "RingGraph",
    "Schedule",
    "SimpleGossipDataParallel",
    "SyncEngine",
    "TorusGraph",
    "Transport",
    "UniformMixing",
    "connect",
]

"""Who talks to whom in each round: every graph, and how to make one by its name."""

from .base import GraphManager
from .butterfly_groups import ButterflyGroups
from .dynamic_graphs import (
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    NPeerDynamicDirectedExponentialGraph,
)
from .named_graphs import named_graph
from .predefined_graphs import select_graph
from .shift_graph import MirroredGraph, ShiftGraph
from .static_graphs import CompleteGraph, HypercubeGraph, NetworkXGraph, RingGraph, TorusGraph

__all__ = [
    "ButterflyGroups",
    "CompleteGraph",
    "DynamicBipartiteCompleteGraph",
    "DynamicBipartiteExponentialGraph",
    "DynamicBipartiteLinearGraph",
    "DynamicDirectedExponentialGraph",
    "DynamicDirectedLinearGraph",
    "GraphManager",
    "HypercubeGraph",
    "MirroredGraph",
    "NPeerDynamicDirectedExponentialGraph",
    "NetworkXGraph",
    "RingGraph",
    "ShiftGraph",
    "TorusGraph",
    "named_graph",
    "select_graph",
]

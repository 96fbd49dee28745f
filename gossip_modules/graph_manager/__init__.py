"""Communication graphs: the peers of each rank in each round, and how to make a graph by its name.

The random graph of MATCHA, which is planned from one of these, is `gossip_modules.MatchaGraph` in the package `matcha`.
"""

from typing import TYPE_CHECKING, Any

from ..old_names import module_attribute
from .base import GraphManager, WeightedGraph
from .base_graph import BaseGraph
from .butterfly_groups import ButterflyGroups
from .matchings import select_graph
from .named_graphs import default_graph, named_graph
from .networkx_graphs import ChainGraph, DoubleBinaryTreeGraph, NetworkXGraph, networkx_graph
from .random_graphs import (
    EquiDynGraph,
    EquiStaticGraph,
    RandomGraph,
    RandomMatchingGraph,
    RandomPushGraph,
)
from .shift_graphs import (
    CompleteGraph,
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    HypercubeGraph,
    MirroredGraph,
    NPeerDynamicDirectedExponentialGraph,
    RingGraph,
    ShiftGraph,
    StaticExponentialGraph,
    TorusGraph,
)

__all__ = [
    "BaseGraph",
    "ButterflyGroups",
    "ChainGraph",
    "CompleteGraph",
    "DoubleBinaryTreeGraph",
    "DynamicBipartiteCompleteGraph",
    "DynamicBipartiteExponentialGraph",
    "DynamicBipartiteLinearGraph",
    "DynamicDirectedExponentialGraph",
    "DynamicDirectedLinearGraph",
    "EquiDynGraph",
    "EquiStaticGraph",
    "GraphManager",
    "HypercubeGraph",
    "MirroredGraph",
    "NPeerDynamicDirectedExponentialGraph",
    "NetworkXGraph",
    "RandomGraph",
    "RandomMatchingGraph",
    "RandomPushGraph",
    "RingGraph",
    "ShiftGraph",
    "StaticExponentialGraph",
    "TorusGraph",
    "WeightedGraph",
    "default_graph",
    "named_graph",
    "networkx_graph",
    "select_graph",
]


if not TYPE_CHECKING:  # a type checker would take any name, with Any as its type

    def __getattr__(name: str) -> Any:
        return module_attribute(__name__, name)

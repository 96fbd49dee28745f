"""The one table of communication graphs by name: for command lines, pictures and the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .base import GraphManager
from .dynamic_graphs import (
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    NPeerDynamicDirectedExponentialGraph,
)
from .predefined_graphs import select_graph
from .static_graphs import CompleteGraph, HypercubeGraph, NetworkXGraph, RingGraph, TorusGraph

GRAPHS: Mapping[str, Callable[..., GraphManager]] = {
    "exponential": DynamicDirectedExponentialGraph,
    "npeer-exponential": NPeerDynamicDirectedExponentialGraph,
    "bipartite-exponential": DynamicBipartiteExponentialGraph,
    "linear": DynamicDirectedLinearGraph,
    "bipartite-linear": DynamicBipartiteLinearGraph,
    "bipartite-complete": DynamicBipartiteCompleteGraph,
    "ring": RingGraph,
    "torus": TorusGraph,
    "hypercube": HypercubeGraph,
    "complete": CompleteGraph,
}
"""Graphs of any number of ranks; all but bipartite-complete, which makes pairs, take `peers_per_itr`."""

STATIC_GRAPHS: Mapping[str, Callable[..., GraphManager]] = {
    name: GRAPHS[name] for name in ("ring", "torus", "hypercube", "complete")
}
"""Those of GRAPHS that are undirected and never change when a round takes all neighbours."""

PREDEFINED_GRAPHS: Mapping[str, int] = {f"matcha{index}": index for index in range(6)}
"""The base graphs of the MATCHA experiments by their index, see `select_graph`: undirected, of 8 or 16 ranks."""


def named_graph(name: str, world_size: int, peers_per_itr: int | Mapping[int, int] | None = None) -> GraphManager:
    """The graph of that name.

    Args:
        name: key of GRAPHS or PREDEFINED_GRAPHS.
        world_size: ranks of the graph; a predefined one has its own number.
        peers_per_itr: peers per round, or a schedule of it; None: all neighbours on a graph of STATIC_GRAPHS or
            PREDEFINED_GRAPHS, which then never changes, and one peer on others.

    Raises:
        ValueError: there is no such graph, none of that size, or it has fewer peers.

    >>> named_graph("hypercube", 8).out_peers(rank=0, t=5)
    (1, 2, 4)
    >>> named_graph("exponential", 8).out_peers(rank=0, t=1)
    (7,)
    """
    if name in PREDEFINED_GRAPHS:
        graph = NetworkXGraph(select_graph(PREDEFINED_GRAPHS[name]), peers_per_itr=peers_per_itr)
        if graph.world_size != world_size:
            raise ValueError(
                f"got graph={name!r} for {world_size} nodes, expected the {graph.world_size} nodes that it has; start "
                f"as many, or take the graph ring"
            )
        return graph
    if name not in GRAPHS:
        raise ValueError(
            f"got graph={name!r}, expected one of {', '.join([*GRAPHS, *PREDEFINED_GRAPHS])}; choose one of them"
        )
    if peers_per_itr is None:
        peers_per_itr = num_neighbours(name, world_size) if name in STATIC_GRAPHS else 1
    return GRAPHS[name](world_size, peers_per_itr=peers_per_itr)


def num_neighbours(name: str, world_size: int) -> int:
    """How many distinct peers a rank has on a graph of STATIC_GRAPHS; 1 in a world of one."""
    return max(1, len(STATIC_GRAPHS[name](world_size).phone_book(0)))

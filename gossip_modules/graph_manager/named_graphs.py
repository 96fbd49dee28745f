"""Communication graphs by name, for command lines, pictures and the Lab; and the graphs used by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from .base import GraphManager, as_peer_schedule
from .base_graph import BaseGraph
from .matchings import select_graph
from .networkx_graphs import ChainGraph, DoubleBinaryTreeGraph, NetworkXGraph, dyck_graph, petersen_graph
from .random_graphs import EquiDynGraph, EquiStaticGraph, RandomMatchingGraph, RandomPushGraph
from .shift_graphs import (
    CompleteGraph,
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    HypercubeGraph,
    NPeerDynamicDirectedExponentialGraph,
    RingGraph,
    StaticExponentialGraph,
    TorusGraph,
)

if TYPE_CHECKING:
    import networkx as nx

GRAPHS: Mapping[str, Callable[..., GraphManager]] = {
    "exponential": DynamicDirectedExponentialGraph,
    "npeer-exponential": NPeerDynamicDirectedExponentialGraph,
    "bipartite-exponential": DynamicBipartiteExponentialGraph,
    "linear": DynamicDirectedLinearGraph,
    "bipartite-linear": DynamicBipartiteLinearGraph,
    "bipartite-complete": DynamicBipartiteCompleteGraph,
    "base": BaseGraph,
    "static-exponential": StaticExponentialGraph,
    "equi-static": EquiStaticGraph,
    "equi-static-undirected": partial(EquiStaticGraph, directed=False),
    "equi-dyn": EquiDynGraph,
    "equi-dyn-undirected": partial(EquiDynGraph, directed=False),
    "random-matching": RandomMatchingGraph,
    "random-push": RandomPushGraph,
    "ring": RingGraph,
    "torus": TorusGraph,
    "hypercube": HypercubeGraph,
    "complete": CompleteGraph,
}
"""Graphs for any number of ranks. All take `peers_per_itr`, though not every number: bipartite-complete,
random-matching and equi-dyn-undirected make pairs and accept only 1; equi-static-undirected has at least 2 neighbours.
Random graphs have the seed 0."""

STATIC_GRAPHS: Mapping[str, Callable[..., GraphManager]] = {
    name: GRAPHS[name] for name in ("ring", "torus", "hypercube", "complete", "equi-static-undirected")
}
"""The graphs of GRAPHS that are undirected, and that never change when a round uses all neighbours."""

DIRECTED_STATIC_GRAPHS: Mapping[str, Callable[..., GraphManager]] = {
    name: GRAPHS[name] for name in ("static-exponential", "equi-static")
}
"""The graphs of GRAPHS that are directed, and that never change when a round uses all peers."""

PREDEFINED_GRAPHS: Mapping[str, Callable[[], nx.Graph]] = {
    **{f"matcha{index}": partial(select_graph, index) for index in range(6)},
    "petersen": petersen_graph,
    "dyck": dyck_graph,
}
"""Undirected graphs of one size: the base graphs of the MATCHA experiments, of 8 or 16 ranks, and the graphs of
Petersen (10 ranks) and Dyck (32 ranks), in which each rank has three neighbours."""

TREES: Mapping[str, Callable[[int], GraphManager]] = {
    "chain": ChainGraph,
    "double-binary-tree": DoubleBinaryTreeGraph,
}
"""Graphs made of the links of one tree or two, for any number of ranks: undirected, with all neighbours in every
round, so that they never change. Made for RelaySGD."""

SMALLEST_WITHOUT_RING = 9
"""The smallest odd number of ranks whose default undirected graph is no ring."""

NAMES: tuple[str, ...] = (*GRAPHS, *PREDEFINED_GRAPHS, *TREES)
"""The names of all graphs."""


def named_graph(name: str, world_size: int, peers_per_itr: int | Mapping[int, int] | None = None) -> GraphManager:
    """The graph of that name.

    Args:
        name: one of NAMES.
        world_size: the number of ranks; a predefined graph has its own number and refuses others.
        peers_per_itr: the number of peers per round, or a schedule of it. None: all neighbours on a graph of
            STATIC_GRAPHS, DIRECTED_STATIC_GRAPHS or PREDEFINED_GRAPHS, which then never changes, and one peer on
            others. A graph of TREES has all neighbours whatever it says.

    Raises:
        ValueError: there is no such graph, none of that size, or it has fewer peers.

    >>> named_graph("hypercube", 8).out_peers(rank=0, t=5)
    (1, 2, 4)
    >>> named_graph("exponential", 8).out_peers(rank=0, t=1)
    (7,)
    """
    if name in PREDEFINED_GRAPHS:
        graph = NetworkXGraph(PREDEFINED_GRAPHS[name](), peers_per_itr=peers_per_itr)
        if graph.world_size != world_size:
            raise ValueError(
                f"got graph={name!r} for {world_size} ranks, expected the {graph.world_size} ranks that it has; start "
                f"as many, or take the graph ring"
            )
        return graph
    if name in TREES:
        return TREES[name](world_size)
    if name not in GRAPHS:
        raise ValueError(f"got graph={name!r}, expected one of {', '.join(NAMES)}; choose one of them")
    if peers_per_itr is None:
        is_static = name in STATIC_GRAPHS or name in DIRECTED_STATIC_GRAPHS
        peers_per_itr = num_neighbours(name, world_size) if is_static else 1
    return GRAPHS[name](world_size, peers_per_itr=peers_per_itr)


def default_graph(world_size: int, *, push_sum: bool, peers_per_itr: int | Mapping[int, int] = 1) -> GraphManager:
    """The graph that is used where the user names none: see `default_graph_name`.

    Args:
        world_size: the number of ranks.
        push_sum: whether the graph may be directed.
        peers_per_itr: the number of peers per round, or a schedule of it, which is the same as 1 where it says 1 for
            all rounds. On the ring 1 means both neighbours, but one of them in a schedule that has other numbers too,
            so that those rounds are directed.

    Raises:
        ValueError: the graph has fewer peers, or `peers_per_itr` is neither.

    >>> default_graph(5, push_sum=False).out_peers(rank=0, t=0)
    (1, 4)
    """
    name = default_graph_name(world_size, push_sum=push_sum, peers_per_itr=peers_per_itr)
    return named_graph(name, world_size, None if _is_always_one(peers_per_itr) else peers_per_itr)


def default_graph_name(world_size: int, *, push_sum: bool, peers_per_itr: int | Mapping[int, int] = 1) -> str:
    """The name in GRAPHS of the graph that is used where the user names none.

    With push-sum it is the exponential graph. Without, the graph has to be undirected: pairs at exponential distances
    for an even number of ranks, else a ring of up to 7 ranks. On a ring of more ranks models stay further apart than
    where each active rank meets each passive one in turn, or, with more peers, than on `BaseGraph`
    (docs/benchmarks/default_graphs.md). A schedule that says 1 for all rounds is one peer, any other is more.

    Raises:
        ValueError: `peers_per_itr` is no number of peers and no schedule of it.
    """
    is_one = _is_always_one(peers_per_itr)
    if push_sum:
        return "npeer-exponential"
    if world_size % 2 == 0:
        return "bipartite-exponential"
    if world_size < SMALLEST_WITHOUT_RING:
        return "ring"
    return "bipartite-complete" if is_one else "base"


def _is_always_one(peers_per_itr: int | Mapping[int, int]) -> bool:
    return set(as_peer_schedule(peers_per_itr).values()) == {1}


def undirected_ring(world_size: int) -> RingGraph:
    """The ring with both neighbours in every round; in a world of two they are one rank."""
    return RingGraph(world_size, peers_per_itr=2 if world_size > 2 else 1)


def num_neighbours(name: str, world_size: int) -> int:
    """The number of distinct peers of a rank on a static graph, directed or not; 1 in a world of one."""
    return max(1, len(GRAPHS[name](world_size).phone_book(0)))

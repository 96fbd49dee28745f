"""The six base graphs of the MATCHA experiments, and the matchings that a plan for them uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .edge_coloring import Edge, Matching, decompose, graph_edges

if TYPE_CHECKING:
    import networkx as nx

_MATCHINGS = {
    0: (
        "0-4 1-5 2-3 6-7",
        "1-7 3-6",
        "0-1 3-7 5-6",
        "0-7 1-2",
        "1-3",
    ),
    1: (
        "0-12 1-9 2-3 4-8 5-14 6-11 7-13 10-15",
        "2-14 3-15 5-6 9-10 11-13",
        "0-10 2-5 3-14 4-13 8-11",
        "5-11 8-13 14-15",
        "2-11",
    ),
    2: (
        "0-8 1-10 2-7 3-13 4-9 5-6 11-14 12-15",
        "0-11 1-9 2-3 4-5 6-8 14-15",
        "0-6 1-4 2-11 3-8 12-14",
        "0-5 3-6 8-11",
        "0-3 2-8 6-7 11-12",
        "0-2 4-6 5-8 7-11",
        "0-4 2-6 3-7 8-15",
        "0-9 3-5 6-11 8-14",
        "0-1 2-5 3-4 6-13 7-8 11-15",
        "8-12",
    ),
    3: (
        "0-2 1-13 3-12 4-8 5-7 6-15 9-10 11-14",
        "0-11 1-15 2-6 3-9 4-12 5-13 7-14 8-10",
        "0-5 1-8 2-7 3-15 4-14 6-11 9-13 10-12",
        "0-7 1-12 2-11 4-9 5-14 8-13",
        "1-5 4-10 6-7 8-14 12-13",
        "1-14 2-8 3-13 5-9 7-11",
        "0-8 1-9 5-12 13-14",
        "1-3 2-5 8-9 10-14 13-15",
        "1-4 5-8 10-13 12-14",
        "1-10 2-14 3-5 4-13 9-12",
        "0-14 1-2 5-6 8-12",
        "5-15 9-14",
        "5-11",
    ),
    4: (
        "0-10 1-5 2-7 3-15 4-11 6-12 8-9 13-14",
        "1-14 2-15 5-6 8-13 9-10 11-12",
        "1-8 2-10 3-9 5-12 6-11",
        "0-6 1-7 5-15 9-11 12-14",
        "1-6 2-5 8-12 11-14",
        "3-14 5-10 11-13 12-15",
        "9-12",
        "0-12",
    ),
    5: (
        "0-1 2-3 4-5 6-7",
        "0-7 1-2 3-4 5-6",
    ),
}


def predefined_matchings(index: int) -> tuple[Matching, ...]:
    """The links of a predefined graph, in as many matchings as its max degree, which is the fewest possible.

    The graphs are those of Wang, Sahu, Yang, Joshi, Kar, "MATCHA: Speeding Up Decentralized SGD via Matching
    Decomposition Sampling", ICC 2019, arXiv:1905.09435.

    Args:
        index: the number of the graph. 0: Erdos-Renyi, 8 ranks, max degree 5 (its Fig. 1); 1, 2, 3: geometric, 16
            ranks, max degree 5, 10, 13 (Fig. A.3 a, b, c); 4: Erdos-Renyi, 16 ranks, max degree 8 (Fig. 3 b); 5: a ring
            of 8.

    Raises:
        ValueError: there is no such graph.

    >>> predefined_matchings(5)[1]
    ((0, 7), (1, 2), (3, 4), (5, 6))
    """
    if index not in _MATCHINGS:
        raise ValueError(f"got graph {index!r}, expected 0 to {len(_MATCHINGS) - 1}: the predefined base graphs.")
    return tuple(tuple(_edge(text) for text in matching.split()) for matching in _MATCHINGS[index])


def select_graph(index: int) -> nx.Graph:
    """The predefined graph `index`, see `predefined_matchings`; nodes in ascending order.

    >>> select_graph(5).number_of_edges()
    8
    """
    import networkx as nx

    edges = sorted(edge for matching in predefined_matchings(index) for edge in matching)
    graph = nx.Graph()
    graph.add_nodes_from(range(1 + max(v for _, v in edges)))
    graph.add_edges_from(edges)
    return graph


def matchings_of(graph: nx.Graph, *, costs: Mapping[Edge, float] | None = None) -> tuple[Matching, ...]:
    """The matchings that a plan for `graph` uses: the published ones for a predefined graph, else those of `decompose`.

    A graph with the links of a predefined one is that graph, however it was made. Its other decompositions into as few
    matchings have other probabilities and another, often worse, rho. With `costs` links of similar cost belong
    together, so `decompose` serves every graph.

    Args and Raises: as `decompose`.

    >>> matchings_of(select_graph(0)) == predefined_matchings(0)
    True
    """
    edges = graph_edges(graph)
    if costs is None:
        for index in _MATCHINGS:
            matchings = predefined_matchings(index)
            if edges == sorted(edge for matching in matchings for edge in matching):
                return matchings
    return tuple(decompose(graph, costs=costs))


def _edge(text: str) -> tuple[int, int]:
    u, v = text.split("-")
    return int(u), int(v)

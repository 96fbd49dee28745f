"""Matchings: every graph becomes at most max degree + 1 of them, always the same, and nothing else passes for them."""

from __future__ import annotations

import doctest
import random
from collections.abc import Iterator

import networkx as nx
import numpy as np
import pytest

from gossip_modules import RingGraph
from gossip_modules.graph_manager import matchings as module
from gossip_modules.graph_manager import select_graph
from gossip_modules.graph_manager.matchings import (
    Edge,
    Matching,
    as_matchings,
    decompose,
    graph_edges,
    link_costs,
    predefined_matchings,
    world_size,
)
from gossip_modules.mixing_manager.laplacians import dpsgd_weight


def graphs() -> Iterator[nx.Graph]:
    for n in range(1, 10):
        yield nx.complete_graph(n)  # an odd one needs max degree + 1
    yield nx.petersen_graph()
    yield nx.random_regular_graph(3, 20, seed=0)
    for seed in range(60):
        graph = nx.gnp_random_graph(2 + seed % 17, 0.2 + 0.7 * (seed % 7) / 7, seed=seed)
        largest = max(nx.connected_components(graph), key=len)
        yield nx.convert_node_labels_to_integers(graph.subgraph(largest))


def max_degree(graph: nx.Graph) -> int:
    return max(degree for _, degree in graph.degree)


def total(matchings: list[Matching], costs: dict[Edge, float]) -> float:
    return sum(max(costs[edge] for edge in matching) for matching in matchings)


def sites(n: int) -> tuple[nx.Graph, dict[Edge, float]]:
    """Two sites of n / 2 ranks; links between them are ten times slower."""
    graph = nx.gnp_random_graph(n, 0.6, seed=3)
    return graph, {(u, v): 0.01 if (u < n // 2) == (v < n // 2) else 0.1 for u, v in graph_edges(graph)}


def test_matchings_hold_every_link_once_and_are_few() -> None:
    sizes = set()
    for graph in graphs():
        matchings = decompose(graph)
        assert sorted(edge for matching in matchings for edge in matching) == graph_edges(graph)
        assert not matchings or as_matchings(matchings) == tuple(matchings)
        assert len(matchings) <= max_degree(graph) + 1
        sizes.add(len(matchings) - max_degree(graph))
    assert sizes == {0, 1}  # both the swaps along paths and the fans have been at work


def test_complete_and_petersen_graphs_have_their_chromatic_index() -> None:
    assert [len(decompose(nx.complete_graph(n))) for n in range(2, 9)] == [1, 3, 3, 5, 5, 7, 7]
    assert len(decompose(nx.petersen_graph())) == 4


@pytest.mark.parametrize(
    "graph", [nx.cycle_graph(8), nx.hypercube_graph(4), nx.grid_2d_graph(5, 6), nx.complete_bipartite_graph(4, 7)]
)
def test_bipartite_graphs_need_only_max_degree(graph: nx.Graph) -> None:
    assert len(decompose(nx.convert_node_labels_to_integers(graph))) == max_degree(graph)


def test_the_graph_is_left_alone_and_its_order_does_not_matter() -> None:
    graph = nx.gnp_random_graph(12, 0.5, seed=1)
    edges = list(graph.edges)
    matchings = decompose(graph)
    assert list(graph.edges) == edges
    for seed in range(5):
        shuffled = edges.copy()
        random.Random(seed).shuffle(shuffled)
        other = nx.Graph()
        other.add_nodes_from(reversed(range(12)))
        other.add_edges_from((v, u) for u, v in shuffled)
        assert decompose(other) == matchings


def test_links_of_similar_cost_share_a_matching() -> None:
    graph, costs = sites(16)
    plain, packed = decompose(graph), decompose(graph, costs=costs)
    assert sorted(edge for matching in packed for edge in matching) == graph_edges(graph)
    assert total(packed, costs) < 0.85 * total(plain, costs)
    slow = nx.Graph([edge for edge, cost in costs.items() if cost == 0.1])
    assert sum(any(costs[e] == 0.1 for e in matching) for matching in packed) <= max_degree(slow) + 1


def test_costs_never_make_the_schedule_longer() -> None:
    for seed, graph in enumerate(graphs()):
        generator = random.Random(seed)
        costs = {edge: generator.lognormvariate(0, 1) for edge in graph_edges(graph)}
        packed = decompose(graph, costs=costs)
        assert sorted(edge for matching in packed for edge in matching) == graph_edges(graph)
        assert total(packed, costs) <= total(decompose(graph), costs) + 1e-12
        assert len(packed) < 2 * max(max_degree(graph), 1)


def test_equal_costs_change_nothing_but_the_order() -> None:
    graph = nx.gnp_random_graph(10, 0.5, seed=2)
    assert sorted(decompose(graph, costs=dict.fromkeys(graph_edges(graph), 2.0))) == sorted(decompose(graph))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (nx.DiGraph([(0, 1)]), "got a DiGraph, expected an undirected graph .*Convert"),
        (nx.MultiGraph([(0, 1), (0, 1)]), "got a MultiGraph, expected .*without parallel links"),
        (nx.Graph([(1, 2)]), r"got the nodes \[1, 2\], expected the ranks 0 to 1. .* or rename"),
        (nx.Graph([("a", "b")]), r"got the nodes \['a', 'b'\], expected the ranks"),
        (nx.Graph(), r"got the nodes \[\], expected the ranks"),
        (nx.Graph([(0, 1), (1, 1)]), r"got self-loops at \[1\], expected none: .*Remove"),
        (nx.Graph([(0, 1), (2, 3)]), r"got a graph in 2 pieces \(one is \[0, 1\]\), expected a connected graph"),
    ],
)
def test_graphs_that_cannot_gossip_are_refused(graph: nx.Graph, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decompose(graph)


@pytest.mark.parametrize(
    ("matchings", "message"),
    [
        ([[(0, 1), (1, 2)]], r"got \[\(0, 1\), \(1, 2\)\] as matching 0, expected .*no rank twice"),
        ([[(0, 1)], []], r"got \[\] as matching 1, expected at least one link"),
        ([[(0, 1)], [(1, 0)]], r"got the links \[\(0, 1\)\] again in matching 1, expected each link in one"),
        ("ring", r"got 'ring' as a base graph, expected a networkx graph or its matchings. .*cycle_graph\(8\)"),
        (RingGraph(4), r"got RingGraph.* as a base graph, expected a networkx graph"),
        (
            [(0, 1), (1, 2)],
            r"got 0 as a link, .*Write matchings as lists of links, e.g. \[\[\(0, 1\)\], \[\(1, 2\)\]\]",
        ),
        ([[(0, 0)]], r"got \(0, 0\) as a link, expected a pair of different ranks"),
        ([[(0, -1)]], r"got \(0, -1\) as a link"),
        ([[(0, 1, 2)]], r"got \(0, 1, 2\) as a link"),
        ([[(0, 0.5)]], r"got \(0, 0.5\) as a link"),
        ([[(0, 2)]], r"got the nodes \[0, 2\], expected the ranks 0 to 1. Add links to the missing"),
        ([[(0, 1), (2, 3)]], "got a graph in 2 pieces"),
    ],
)
def test_edges_that_are_no_matching_are_refused(matchings: list[list[tuple[int, int]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_matchings(matchings)


def test_matchings_are_normalised_in_place_of_their_order() -> None:
    assert as_matchings([[(3, 2), (1, 0)], [[2, 1]]]) == (((0, 1), (2, 3)), ((1, 2),))
    assert world_size(as_matchings([[(3, 2), (1, 0)], [[2, 1]]])) == 4


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({(0, 1): 1.0}, r"got 1 costs, none for the links \[\(1, 2\)\]"),
        ({(0, 1): 1.0, (1, 2): 1.0, (0, 2): 1.0}, r"some for \[\(0, 2\)\] which are no links"),
        ({(0, 1): 1.0, (1, 2): 1.0, (2, 1): 1.0}, "got 3 costs"),
        ({(0, 1): float("nan"), (1, 2): 1.0}, r"got the costs \{\(0, 1\): nan\}, expected finite seconds above 0"),
        ({(0, 1): 0.0, (1, 2): 1.0}, "expected finite seconds above 0"),
    ],
)
def test_costs_must_fit_the_links(costs: dict[Edge, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decompose(nx.path_graph(3), costs=costs)


def test_costs_may_name_a_link_from_either_end() -> None:
    assert link_costs([(0, 1), (1, 2)], {(1, 0): 3, (1, 2): 1}) == {(0, 1): 3.0, (1, 2): 1.0}


def test_no_matchings_are_those_of_a_world_of_one() -> None:
    assert as_matchings([]) == tuple(decompose(nx.empty_graph(1))) == ()


# The six predefined graphs have the published sizes, degrees and spectra, and optimal matchings.


# Per graph: degrees by rank, second smallest and largest eigenvalue of the Laplacian.
GRAPHS = [
    ([3, 5, 2, 4, 1, 2, 3, 4], 0.6700, 6.3300),
    ([2, 1, 4, 3, 2, 4, 2, 1, 3, 2, 3, 5, 1, 4, 4, 3], 0.1177, 6.4945),
    ([9, 4, 7, 8, 6, 6, 9, 5, 10, 3, 1, 8, 4, 2, 4, 4], 0.6397, 11.2171),
    ([6, 11, 8, 6, 7, 13, 5, 6, 10, 9, 7, 6, 9, 10, 12, 5], 2.5707, 14.1747),
    ([3, 5, 4, 3, 1, 6, 5, 2, 4, 5, 4, 6, 8, 3, 5, 4], 0.8058, 9.5532),
    ([2] * 8, 0.5858, 4.0),
]


@pytest.mark.parametrize(("index", "degrees", "low", "high"), [(i, *golden) for i, golden in enumerate(GRAPHS)])
def test_graph_is_the_published_one(index: int, degrees: list[int], low: float, high: float) -> None:
    graph, matchings = select_graph(index), predefined_matchings(index)
    assert list(graph.nodes) == list(range(len(degrees)))
    assert [graph.degree[rank] for rank in graph] == degrees
    assert as_matchings(matchings) == matchings
    assert sorted(edge for matching in matchings for edge in matching) == graph_edges(graph)
    assert len(matchings) == max(degrees)
    assert len(decompose(graph)) == max(degrees)
    spectrum = np.linalg.eigvalsh(np.diag(degrees) - nx.to_numpy_array(graph))
    np.testing.assert_allclose(spectrum[[1, -1]], [low, high], atol=1e-4)
    assert dpsgd_weight(matchings).rho == pytest.approx(((high - low) / (high + low)) ** 2, abs=2e-4)


def test_other_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match="got graph 6, expected 0 to 5"):
        select_graph(6)


def test_example() -> None:
    assert doctest.testmod(module).failed == 0

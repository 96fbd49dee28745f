"""The six predefined graphs have the sizes, degrees and spectra that were published, and optimal matchings."""

from __future__ import annotations

import doctest

import networkx as nx
import numpy as np
import pytest

from gossip_modules.graph_manager import predefined_graphs as base_graphs
from gossip_modules.graph_manager.edge_coloring import as_matchings, decompose, graph_edges
from gossip_modules.graph_manager.predefined_graphs import predefined_matchings, select_graph
from gossip_modules.matcha.laplacians import dpsgd_weight

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


def test_examples() -> None:
    assert doctest.testmod(base_graphs).failed == 0

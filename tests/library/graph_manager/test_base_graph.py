"""The Base-(k+1) graph: the exact average after a period, for every number of ranks."""

from __future__ import annotations

from math import isclose, log

import numpy as np
import numpy.typing as npt
import pytest

from gossip_modules.graph_manager import WeightedGraph
from gossip_modules.graph_manager.base_graph import BaseGraph, fewest_factors

# Rounds per period that the authors' construction takes for k = 1 and n = 3, 4, ..., 25.
PERIODS = (3, 2, 5, 4, 5, 3, 7, 6, 7, 5, 7, 6, 7, 4, 9, 8, 9, 7, 9, 8, 9, 6, 9)


def matrix(graph: WeightedGraph, t: int) -> npt.NDArray[np.float64]:
    """W(t) as a matrix; what its links leave of 1 is the own weight."""
    weights = np.zeros((graph.world_size, graph.world_size))
    for rank in range(graph.world_size):
        for peer, weight in graph.link_weights(rank, t).items():
            weights[rank, peer] = weight
    return weights + np.diag(1 - weights.sum(1))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_period_is_the_exact_average(k: int) -> None:
    for n in range(max(2, k + 1), 65):
        graph, product = BaseGraph(n, k), np.eye(n)
        for t in range(graph.period):
            weights = matrix(graph, t)
            assert np.array_equal(weights, weights.T)
            assert weights.min() >= 0
            assert (np.count_nonzero(weights - np.diag(np.diag(weights)), axis=1) <= k).all()
            product = weights @ product
        assert np.abs(product - 1 / n).max() < 1e-12
        assert graph.period <= 2 * log(n, k + 1) + 2


def test_periods_are_those_of_the_paper() -> None:
    assert tuple(BaseGraph(n).period for n in range(3, 26)) == PERIODS
    assert [BaseGraph(n, k).period for n, k in ((27, 2), (64, 3), (25, 4), (30, 4), (6, 5))] == [3, 3, 2, 3, 1]


SMALL: dict[int, list[tuple[set[tuple[int, int]], float]]] = {
    3: [({(0, 1)}, 1 / 2), ({(1, 2)}, 2 / 3), ({(0, 1)}, 1 / 2)],
    6: [
        ({(0, 1), (3, 4)}, 1 / 2),
        ({(1, 2), (4, 5)}, 2 / 3),
        ({(0, 1), (3, 4)}, 1 / 2),
        ({(0, 3), (1, 4), (2, 5)}, 1 / 2),
    ],
}
"""Links and their weight, by n and round."""


@pytest.mark.parametrize(("n", "rounds"), SMALL.items())
def test_small_graphs_are_those_of_the_paper(n: int, rounds: list[tuple[set[tuple[int, int]], float]]) -> None:
    graph = BaseGraph(n)
    assert graph.period == len(rounds)
    for t, (links, weight) in enumerate(rounds):
        expected = np.zeros((n, n))
        for i, j in links:
            expected[i, j] = expected[j, i] = weight
        np.testing.assert_allclose(matrix(graph, t), expected + np.diag(1 - expected.sum(1)), atol=1e-15)


@pytest.mark.parametrize("n", [10**6, 999_983, 999_999])
def test_a_query_looks_at_few_ranks_of_a_million(n: int) -> None:
    """The links of both ends agree, and following them from any rank meets at most O(k log n) others."""
    graph = BaseGraph(n, 2)
    assert graph.period <= 2 * log(n, 3) + 2
    for rank in (0, 1, n // 2, n - 2, n - 1):
        assert len(graph.phone_book(rank)) <= 2 * graph.period
        for t in range(graph.period):
            links = graph.link_weights(rank, t)
            assert len(links) <= 2
            assert sum(links.values()) <= 1 + 1e-12
            for peer, weight in links.items():
                assert graph.link_weights(peer, t)[rank] == weight
    assert graph.is_symmetric


def test_a_schedule_has_a_period_per_entry() -> None:
    graph = BaseGraph(9, {0: 2, 4: 1})
    assert [graph.link_weights(5, t) for t in range(4)] == [BaseGraph(9, 2).link_weights(5, t) for t in (0, 1, 0, 1)]
    assert [graph.link_weights(5, 4 + t) for t in range(9)] == [BaseGraph(9).link_weights(5, t) for t in range(9)]


def test_too_many_peers_are_refused() -> None:
    with pytest.raises(ValueError, match="BaseGraph: got peers_per_itr=4, expected 1 to 3"):
        BaseGraph(4, 4)


def test_factors_are_as_few_as_can_be() -> None:
    assert [fewest_factors(n, 6) for n in (1, 6, 8, 72, 100)] == [(), (6,), (4, 2), (6, 6, 2), (5, 5, 4)]
    # Taking the largest factor first would need three: 10 * 3 * 2.
    assert isclose(len(fewest_factors(60, 10)), 2)

"""W(t) = I - alpha L(t): the right matrix, doubly stochastic without looking at rounds, as fast as promised."""

from __future__ import annotations

import doctest

import networkx as nx
import pytest
import torch

from gossip_modules.graph_manager import (
    CompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicDirectedExponentialGraph,
    HypercubeGraph,
    NetworkXGraph,
    RingGraph,
    select_graph,
)
from gossip_modules.graph_manager.base import GraphManager
from gossip_modules.graph_manager.matchings import predefined_matchings
from gossip_modules.matcha.graph import MatchaGraph
from gossip_modules.mixing_manager import LaplacianMixing, graph_weights
from gossip_modules.mixing_manager.laplacians import contraction, dpsgd_weight, laplacian

MATCHA = MatchaGraph(predefined_matchings(0), budget=0.5, seed=1)
MIXINGS = {
    "matcha": LaplacianMixing(MATCHA),
    "matcha, own alpha": LaplacianMixing(MATCHA, 0.2),
    "base graph": LaplacianMixing(NetworkXGraph(select_graph(1))),
    "ring": LaplacianMixing(RingGraph(6, peers_per_itr=2)),
    "matching by matching": LaplacianMixing(DynamicBipartiteExponentialGraph(8), 0.5),
    "world of one": LaplacianMixing(RingGraph(1)),
    "matcha, world of one": LaplacianMixing(MatchaGraph(nx.empty_graph(1), budget=1)),
}


@pytest.mark.parametrize("name", MIXINGS)
def test_the_matrix_is_the_formula_and_doubly_stochastic(name: str) -> None:
    mixing = MIXINGS[name]
    n = mixing.graph.world_size
    assert mixing.is_doubly_stochastic
    for t in range(12):
        links = [(i, j) for i in range(n) for j in mixing.graph.out_peers(i, t) if i < j]
        expected = torch.eye(n, dtype=torch.float64) - mixing.alpha * torch.from_numpy(laplacian(links, n))
        torch.testing.assert_close(mixing.matrix(t), expected)
        torch.testing.assert_close(mixing.matrix(t).sum(dim=0), torch.ones(n, dtype=torch.float64))
        for rank in range(n):
            assert tuple(mixing.weights(rank, t).inp) == mixing.graph.in_peers(rank, t)


def test_negative_own_weights_are_not_clamped() -> None:
    own = LaplacianMixing(NetworkXGraph(select_graph(0))).matrix(0).diagonal()
    assert own.min().item() == pytest.approx(1 - 5 * 0.285714286)


@pytest.mark.parametrize("index", range(6))
def test_a_static_graph_gets_the_alpha_of_dpsgd(index: int) -> None:
    mixing = LaplacianMixing(NetworkXGraph(select_graph(index)))
    closed = dpsgd_weight(predefined_matchings(index))
    assert mixing.alpha == pytest.approx(closed.alpha, abs=1e-9)
    assert 1 - mixing.spectral_gap() == pytest.approx(closed.rho**0.5, abs=1e-7)
    full = LaplacianMixing(MatchaGraph(predefined_matchings(index), budget=1))
    torch.testing.assert_close(full.matrix(5), mixing.matrix(0))


@pytest.mark.parametrize("graph", [CompleteGraph(5, peers_per_itr=4), HypercubeGraph(8, peers_per_itr=3)])
def test_no_other_alpha_is_faster(graph: GraphManager) -> None:
    best = LaplacianMixing(graph)
    others = [LaplacianMixing(graph, best.alpha * factor).spectral_gap() for factor in (0.8, 0.95, 1.05, 1.2)]
    assert best.spectral_gap() > max(others)


def test_matcha_graphs_bring_their_alpha() -> None:
    assert MIXINGS["matcha"].alpha == MATCHA.alpha
    assert MIXINGS["matcha"].period == 0
    assert repr(MIXINGS["matcha"]) == f"LaplacianMixing({MATCHA!r}, alpha={MATCHA.alpha})"
    assert repr(MIXINGS["matcha"]) != repr(MIXINGS["matcha, own alpha"])


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"got DynamicDirectedExponentialGraph.*expected a graph whose peers answer"):
        LaplacianMixing(DynamicDirectedExponentialGraph(8), 0.5)
    with pytest.raises(ValueError, match="whose links change, without alpha; expected a MatchaGraph or a static graph"):
        LaplacianMixing(DynamicBipartiteExponentialGraph(8))
    for alpha in (0, -0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"got alpha={alpha}, expected a finite weight above 0"):
            LaplacianMixing(MATCHA, alpha)


@pytest.mark.parametrize(
    "graph",
    [
        RingGraph(6, peers_per_itr=2),
        MatchaGraph(nx.cycle_graph(6), budget=1),
        MatchaGraph(nx.cycle_graph(6), budget=0.3, periodic=True),
    ],
)
def test_on_a_static_graph_alpha_is_below_two_by_the_largest_eigenvalue(graph: GraphManager) -> None:
    assert LaplacianMixing(graph, 0.499).alpha == 0.499  # l_n = 4
    for alpha in (0.5, 3.0):
        with pytest.raises(ValueError, match=rf"got alpha={alpha} on .* expected below 0\.5 = 2 / l_n .* Leave it out"):
            LaplacianMixing(graph, alpha)


def test_on_a_random_graph_alpha_contracts_in_expectation() -> None:
    low, high = MATCHA.alpha, 2.0
    for _ in range(50):
        middle = (low + high) / 2
        rho = contraction(MATCHA.matchings, MATCHA.probabilities, alpha=middle)
        low, high = (middle, high) if rho < 1 else (low, middle)
    LaplacianMixing(MATCHA, low - 1e-6)
    with pytest.raises(
        ValueError, match=r"the distance from the average grows by the factor rho=1\.0.* Leave alpha out"
    ):
        LaplacianMixing(MATCHA, high + 1e-6)


def test_example() -> None:
    assert doctest.testmod(graph_weights).failed == 0

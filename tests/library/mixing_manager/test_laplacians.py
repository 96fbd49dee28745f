"""rho and alpha against closed forms, dense grids, and rounds that are really drawn."""

from __future__ import annotations

import doctest
from collections.abc import Sequence

import networkx as nx
import numpy as np
import numpy.typing as npt
import pytest

from gossip_modules.graph_manager import select_graph
from gossip_modules.graph_manager.matchings import Matching, decompose, predefined_matchings
from gossip_modules.matcha import activation_probabilities
from gossip_modules.mixing_manager import laplacians as module
from gossip_modules.mixing_manager.laplacians import (
    contraction,
    dpsgd_weight,
    laplacian,
    mixing_weight,
    periodic_dpsgd_weight,
    second_moment,
    weighted_laplacian,
)

Array = npt.NDArray[np.float64]


def drawn(matchings: Sequence[Matching], flags: npt.NDArray[np.bool_], alpha: float) -> Array:
    """W of each round, [rounds, n, n]."""
    n = 1 + max(v for matching in matchings for _, v in matching)
    laplacians = np.stack([laplacian(matching, n) for matching in matchings])
    result: Array = np.eye(n) - alpha * np.tensordot(flags.astype(float), laplacians, 1)
    return result


@pytest.mark.parametrize("index", range(6))
def test_laplacians_are_those_of_their_own_matching(index: int) -> None:
    matchings, graph = predefined_matchings(index), select_graph(index)
    n = graph.number_of_nodes()
    each = [laplacian(matching, n) for matching in matchings]
    for matching, one in zip(matchings, each, strict=True):
        alone = nx.Graph()
        alone.add_nodes_from(range(n))
        alone.add_edges_from(matching)
        adjacency = nx.to_numpy_array(alone, nodelist=range(n))
        np.testing.assert_array_equal(one, np.diag(adjacency.sum(axis=0)) - adjacency)
        np.testing.assert_array_equal(one @ one, 2 * one)
    adjacency = nx.to_numpy_array(graph, nodelist=range(n))
    np.testing.assert_array_equal(sum(each), np.diag(adjacency.sum(axis=0)) - adjacency)
    weights = np.arange(len(matchings)) / 7
    np.testing.assert_allclose(weighted_laplacian(matchings, weights, n), np.tensordot(weights, each, 1))


def test_second_moment_is_the_sum_over_all_outcomes() -> None:
    matchings, p, alpha = decompose(nx.wheel_graph(5)), np.array([0.9, 0.5, 0.2, 0.7]), 0.3
    outcomes = (np.arange(16)[:, None] >> np.arange(4)) % 2 == 1
    chances = np.where(outcomes, p, 1 - p).prod(axis=1)
    w = drawn(matchings, outcomes, alpha)
    exact = np.tensordot(chances, w @ w, 1)
    mean, square = second_moment(matchings, p)
    np.testing.assert_allclose(np.eye(5) - 2 * alpha * mean + alpha**2 * square, exact, atol=1e-12)
    rho = np.linalg.eigvalsh(exact - 1 / 5)[-1]
    assert contraction(matchings, p, alpha=alpha) == pytest.approx(rho, abs=1e-12)


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("budget", [0.1, 0.5])
def test_rho_agrees_with_drawn_rounds(index: int, budget: float) -> None:
    matchings = predefined_matchings(index)
    p = activation_probabilities(matchings, budget)
    alpha, rho = mixing_weight(matchings, p)
    # In the worst direction v, |W v|^2 has the mean rho.
    mean, square = second_moment(matchings, p)
    n = len(mean)
    v = np.linalg.eigh(np.eye(n) - 2 / n - 2 * alpha * mean + alpha**2 * square)[1][:, -1]
    flags = np.random.default_rng(index).random((4000, len(p))) < p
    shrunk = ((drawn(matchings, flags, alpha) @ v) ** 2).sum(axis=1)
    assert shrunk.mean() == pytest.approx(rho, abs=4 * shrunk.std() / np.sqrt(len(flags)) + 1e-9)


@pytest.mark.parametrize("index", range(6))
def test_alpha_is_the_best_of_a_grid(index: int) -> None:
    matchings = predefined_matchings(index)
    p = np.random.default_rng(index).uniform(0.1, 1, len(matchings))
    alpha, rho = mixing_weight(matchings, p)
    assert contraction(matchings, p, alpha=alpha) == pytest.approx(rho, abs=1e-8)
    assert rho <= min(contraction(matchings, p, alpha=a) for a in np.linspace(0.01, 1.0, 200)) + 1e-9


def test_alpha_on_a_subspace_is_alpha_on_the_whole_space(monkeypatch: pytest.MonkeyPatch) -> None:
    matchings = decompose(nx.connected_watts_strogatz_graph(60, 6, 0.2, seed=0))
    p = np.linspace(0.2, 0.9, len(matchings))
    whole = mixing_weight(matchings, p)
    monkeypatch.setattr(module, "MAX_WHOLE", 10)
    assert mixing_weight(matchings, p) == pytest.approx(whole, abs=1e-8)


@pytest.mark.parametrize("index", range(6))
def test_all_matchings_in_all_rounds_are_dpsgd(index: int) -> None:
    matchings = predefined_matchings(index)
    closed = dpsgd_weight(matchings)
    assert mixing_weight(matchings, np.ones(len(matchings))) == pytest.approx(closed, abs=1e-8)
    w = drawn(matchings, np.ones((1, len(matchings)), dtype=bool), closed.alpha)[0]
    # The singular values of W - J are its factors per round: D-PSGD contracts by sqrt(rho).
    assert np.linalg.norm(w - 1 / len(w), 2) == pytest.approx(np.sqrt(closed.rho), abs=1e-8)
    assert periodic_dpsgd_weight(matchings, 1.0) == pytest.approx(closed)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_periodic_dpsgd_is_one_coin_for_all(probability: float) -> None:
    matchings = predefined_matchings(0)
    w = drawn(matchings, np.ones((1, 5), dtype=bool), 1.0)[0]

    def rho(alpha: float) -> float:
        on = np.eye(8) + alpha * (w - np.eye(8))
        return float(np.linalg.eigvalsh((1 - probability) * np.eye(8) + probability * on @ on - 1 / 8)[-1])

    best = periodic_dpsgd_weight(matchings, probability)
    assert rho(best.alpha) == pytest.approx(best.rho, abs=1e-8)
    assert best.rho <= min(rho(alpha) for alpha in np.linspace(0.01, 1, 200)) + 1e-9


def test_a_world_of_one_agrees() -> None:
    assert mixing_weight([], []) == dpsgd_weight([]) == (1.0, 0.0)
    assert contraction([], [], alpha=1.0) == 0


def test_golden_dpsgd() -> None:
    assert dpsgd_weight(predefined_matchings(0)) == pytest.approx((0.2857, 0.6538), abs=1e-4)
    assert dpsgd_weight(predefined_matchings(5)) == pytest.approx((0.4361, 0.5543), abs=1e-4)
    assert min(1 - dpsgd_weight(predefined_matchings(0)).alpha * degree for degree in (3, 5, 2, 4)) < -0.42


def test_mistakes_are_named() -> None:
    path = [((0, 1),), ((1, 2),)]
    with pytest.raises(ValueError, match=r"got the probabilities \[1.0, 0.0\], expected those above 0 .* connect all"):
        mixing_weight(path, [1.0, 0.0])
    with pytest.raises(ValueError, match="connect all"):
        mixing_weight(path, [0.0, 0.0])
    for wrong in ([0.5], [0.5, 1.1], [-1e-9, 0.5], [np.nan, 0.5]):
        with pytest.raises(ValueError, match="expected 2 numbers from 0 to 1"):
            mixing_weight(path, wrong)
    with pytest.raises(ValueError, match="got probability=0, expected above 0"):
        periodic_dpsgd_weight(path, 0)
    with pytest.raises(ValueError, match="in 2 pieces"):
        dpsgd_weight([((0, 1), (2, 3))])


def test_examples() -> None:
    assert doctest.testmod(module).failed == 0

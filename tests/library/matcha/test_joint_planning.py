"""The joint optimum over p and alpha: never worse than the two stages, and at the golden values where it is better."""

from __future__ import annotations

import doctest

import networkx as nx
import numpy as np
import pytest

from gossip_modules.graph_manager.matchings import Matching, decompose, predefined_matchings
from gossip_modules.matcha import activation_probabilities, joint_probabilities, matching_costs
from gossip_modules.matcha import planning as module
from gossip_modules.mixing_manager.laplacians import contraction, mixing_weight


@pytest.mark.parametrize(("budget", "rho"), [(0.5, 0.633), (0.8, 0.577), (1.0, 0.577)])
def test_golden(budget: float, rho: float) -> None:
    found = joint_probabilities(predefined_matchings(0), budget)
    assert found.rho == pytest.approx(rho, abs=1e-3)
    assert found.probabilities.sum() <= 5 * budget + 1e-5


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("budget", [0.01, 0.4])
def test_never_above_the_two_stages_and_a_local_optimum(index: int, budget: float) -> None:
    matchings = predefined_matchings(index)
    p, alpha, rho = joint_probabilities(matchings, budget)
    assert ((p >= 0) & (p <= 1)).all()
    assert p.sum() <= budget * len(p) + 1e-5
    assert contraction(matchings, p, alpha=alpha) == pytest.approx(rho, abs=1e-8)
    assert rho <= mixing_weight(matchings, activation_probabilities(matchings, budget)).rho + 1e-6
    generator = np.random.default_rng(index)
    for _ in range(30):
        q = np.clip(p + generator.normal(0, 0.02 * budget, len(p)), 0, 1)
        q *= min(1, budget * len(p) / q.sum())
        assert contraction(matchings, q, alpha=alpha * generator.uniform(0.98, 1.02)) >= rho - 2e-5


def test_a_larger_budget_buys_no_useless_links() -> None:
    cheap, dear = joint_probabilities(predefined_matchings(0), 0.6), joint_probabilities(predefined_matchings(0), 1.0)
    assert dear.probabilities.sum() == pytest.approx(cheap.probabilities.sum(), abs=1e-3)


def test_many_ranks_on_a_growing_subspace(monkeypatch: pytest.MonkeyPatch) -> None:
    matchings = decompose(nx.connected_watts_strogatz_graph(24, 4, 0.3, seed=0))
    whole = joint_probabilities(matchings, 0.5)
    monkeypatch.setattr(module, "MAX_WHOLE", 8)
    assert joint_probabilities(matchings, 0.5).rho == pytest.approx(whole.rho, abs=1e-4)


@pytest.mark.parametrize(
    "matchings",
    [
        [((0, 3), (1, 2)), ((0, 1),), ((1, 3),)],  # steps fall below rounding
        [((0, 2), (1, 4), (3, 5)), ((0, 3),), ((0, 4),), ((0, 5),)],  # a flat valley
    ],
)
def test_the_search_ends_where_it_gets_no_further(matchings: list[Matching]) -> None:
    found = joint_probabilities(matchings, 0.6)
    assert found.rho <= mixing_weight(matchings, activation_probabilities(matchings, 0.6)).rho


def test_budget_in_seconds() -> None:
    matchings = predefined_matchings(5)
    costs = {edge: 0.25 for matching in matchings for edge in matching}
    found = joint_probabilities(matchings, budget_seconds=0.2, costs=costs)
    assert found.rho == pytest.approx(joint_probabilities(matchings, 0.4).rho, abs=1e-6)
    with pytest.raises(ValueError, match=r"got budget_seconds=0\.2 without costs"):
        joint_probabilities(matchings, budget_seconds=0.2)


@pytest.mark.parametrize("budget", [0.3, 1e-3, 1e-7])
def test_small_budgets_and_costs_of_any_ratio(budget: float) -> None:
    matchings = decompose(nx.path_graph(3))
    costs = {(0, 1): 1e-3, (1, 2): 1e4}
    found = joint_probabilities(matchings, budget, costs=costs)
    two_stages = mixing_weight(matchings, activation_probabilities(matchings, budget, costs=costs)).rho
    assert 1 - found.rho >= (1 - two_stages) * (1 - 1e-5)
    assert found.probabilities @ matching_costs(matchings, costs) <= budget * (1e-3 + 1e4) * (1 + 1e-12)


def test_a_world_of_one_agrees() -> None:
    p, alpha, rho = joint_probabilities([], 0.5)
    assert (p.tolist(), alpha, rho) == ([], 1.0, 0.0)


def test_example() -> None:
    assert doctest.testmod(module).failed == 0

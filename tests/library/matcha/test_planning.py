"""Activation probabilities against golden values, symmetry, and the conditions that make a concave optimum."""

from __future__ import annotations

import doctest
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt
import pytest

from gossip_modules.graph_manager import select_graph
from gossip_modules.graph_manager.matchings import Edge, Matching, decompose, graph_edges, predefined_matchings
from gossip_modules.matcha import activation_probabilities, matching_costs
from gossip_modules.matcha import planning as module
from gossip_modules.mixing_manager.laplacians import mixing_weight, periodic_dpsgd_weight, weighted_laplacian

Array = npt.NDArray[np.float64]
# Graph 0, found with a convex programming package: budget; p; lambda_2, alpha, rho; rho of equal p and of one coin.
GOLDEN = [
    (0.1, (0.197, 0, 0.152, 0.152, 0), (0.1122, 0.5621, 0.9368, 0.9641, 0.9654)),
    (0.2, (0.393, 0, 0.303, 0.303, 0), (0.2245, 0.5916, 0.8577, 0.9227, 0.9308)),
    (0.3, (0.590, 0, 0.455, 0.455, 0), (0.3367, 0.5148, 0.7765, 0.8754, 0.8961)),
    (0.4, (0.787, 0, 0.607, 0.607, 0), (0.4490, 0.4484, 0.7051, 0.8304, 0.8615)),
    (0.5, (0.984, 0, 0.758, 0.758, 0), (0.5612, 0.3964, 0.6440, 0.7906, 0.8269)),
    (0.6, (1, 0, 1, 1, 0), (0.6571, 0.3656, 0.5773, 0.7557, 0.7923)),
    (0.7, (1, 0, 1, 1, 0.5), (0.6633, 0.3409, 0.6010, 0.7252, 0.7576)),
    (0.8, (1, 0.205, 1, 1, 0.795), (0.6661, 0.3248, 0.6149, 0.6984, 0.7230)),
    (0.9, (1, 0.5, 1, 1, 1), (0.6685, 0.3058, 0.6341, 0.6748, 0.6884)),
    (1.0, (1, 1, 1, 1, 1), (0.6700, 0.2857, 0.6538, 0.6538, 0.6538)),
]


def connectivity(matchings: tuple[Matching, ...] | list[Matching], p: Array) -> float:
    n = 1 + max(v for matching in matchings for _, v in matching)
    return float(np.linalg.eigvalsh(weighted_laplacian(matchings, p, n))[1])


def random_feasible(costs: Array, limit: float, generator: np.random.Generator) -> Array:
    """Probabilities within the budget, many of them at their bounds."""
    p = np.clip(generator.normal(0.5, 1.0, len(costs)), 0, 1)
    cost = float(p @ costs)
    return p if cost <= limit else p * limit / cost


@pytest.mark.parametrize(("budget", "p", "numbers"), GOLDEN)
def test_golden_table(budget: float, p: tuple[float, ...], numbers: tuple[float, ...]) -> None:
    matchings = predefined_matchings(0)
    found = activation_probabilities(matchings, budget)
    np.testing.assert_allclose(found, p, atol=2e-3)
    equal, periodic = mixing_weight(matchings, np.full(5, budget)), periodic_dpsgd_weight(matchings, budget)
    result = (connectivity(matchings, found), *mixing_weight(matchings, found), equal.rho, periodic.rho)
    assert result == pytest.approx(numbers, abs=2e-3)


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("budget", [0.01, 0.1, 0.5, 0.95, 1.0])
def test_no_feasible_direction_is_better(index: int, budget: float) -> None:
    matchings = predefined_matchings(index)
    p = activation_probabilities(matchings, budget)
    costs = np.ones(len(matchings))
    assert p.dtype == np.float64
    assert ((p >= 0) & (p <= 1)).all()
    assert p.sum() <= budget * len(p) + 1e-5
    best = connectivity(matchings, p)
    generator = np.random.default_rng(index)
    # lambda_2 is concave, so an optimum that no small step towards a feasible point improves is global.
    for _ in range(100):
        other = random_feasible(costs, budget * len(p), generator)
        for step in (0.02, 1.0):
            assert connectivity(matchings, p + step * (other - p)) <= best * (1 + 1e-5)


def test_symmetric_matchings_get_equal_probabilities() -> None:
    # The three perfect matchings of K_4 can be exchanged for one another, so the middle of the optima has them equal.
    np.testing.assert_allclose(activation_probabilities(decompose(nx.complete_graph(4)), 0.4), 0.4, atol=1e-5)
    np.testing.assert_allclose(activation_probabilities(predefined_matchings(5), 0.3), 0.3, atol=1e-5)


def test_the_only_link_of_a_rank_is_used_most() -> None:
    p = activation_probabilities(predefined_matchings(0), 0.3)
    assert p.argmax() == 0  # it holds the only link of rank 4


def test_many_ranks_on_a_growing_subspace(monkeypatch: pytest.MonkeyPatch) -> None:
    matchings = decompose(nx.connected_watts_strogatz_graph(60, 6, 0.2, seed=0))
    whole = connectivity(matchings, activation_probabilities(matchings, 0.4))
    monkeypatch.setattr(module, "MAX_WHOLE", 10)
    p = activation_probabilities(matchings, 0.4)
    assert connectivity(matchings, p) == pytest.approx(whole, rel=3e-6)
    assert p.sum() <= 0.4 * len(p) + 1e-4


def test_cheap_matchings_are_used_more() -> None:
    matchings = predefined_matchings(5)  # a ring: two matchings that are alike
    costs = dict.fromkeys(matchings[0], 3.0) | dict.fromkeys(matchings[1], 1.0)
    costs[matchings[0][0]] = 1.0  # the slowest link counts
    assert matching_costs(matchings, costs).tolist() == [3.0, 1.0]
    p = activation_probabilities(matchings, 0.3, costs=costs)
    assert p[1] > p[0]
    assert p @ [3.0, 1.0] == pytest.approx(0.3 * 4.0, abs=1e-5)
    np.testing.assert_array_equal(activation_probabilities(matchings, budget_seconds=1.2, costs=costs), p)
    generator = np.random.default_rng(0)
    others = [random_feasible(np.array([3.0, 1.0]), 1.2, generator) for _ in range(200)]
    assert max(connectivity(matchings, q) for q in others) <= connectivity(matchings, p) * (1 + 1e-5)


def test_seconds_beyond_the_full_schedule_buy_no_more() -> None:
    matchings = predefined_matchings(0)
    costs: dict[Edge, float] = {edge: 0.5 for matching in matchings for edge in matching}
    assert activation_probabilities(matchings, budget_seconds=100, costs=costs).tolist() == [1.0] * 5
    np.testing.assert_allclose(
        activation_probabilities(matchings, budget_seconds=1.25, costs=costs), activation_probabilities(matchings, 0.5)
    )


@pytest.mark.parametrize("index", [2, 4])
def test_packing_slow_links_together_mixes_faster_in_the_same_time(index: int) -> None:
    graph = select_graph(index)
    costs = {(u, v): 0.01 if (u < 8) == (v < 8) else 0.1 for u, v in graph_edges(graph)}
    plain, packed = decompose(graph), decompose(graph, costs=costs)
    seconds = 0.3 * matching_costs(plain, costs).sum()
    rho = [
        mixing_weight(m, activation_probabilities(m, budget_seconds=seconds, costs=costs)).rho for m in (plain, packed)
    ]
    assert rho[1] < rho[0] - 0.005
    assert matching_costs(packed, costs).sum() < 0.8 * matching_costs(plain, costs).sum()


def clusters(seconds: float) -> tuple[nx.Graph, dict[Edge, float]]:
    """Two clusters of 40 ranks with links of 1 ms, joined by one link of `seconds`."""
    graph = nx.disjoint_union(*(nx.random_regular_graph(4, 40, seed=seed) for seed in (0, 1)))
    graph.add_edge(0, 40)
    return graph, dict.fromkeys(graph_edges(graph), 1e-3) | {(0, 40): seconds}


def path(num_ranks: int, ratio: float) -> tuple[nx.Graph, dict[Edge, float]]:
    """A path of links of 1 ms but for one in the middle, which takes `ratio` times as long."""
    costs = {(i, i + 1): 1e-3 for i in range(num_ranks - 1)}
    costs[num_ranks // 2, num_ranks // 2 + 1] *= ratio
    return nx.path_graph(num_ranks), costs


def spread(graph: nx.Graph) -> tuple[nx.Graph, dict[Edge, float]]:
    """Costs from 1e-8 to 1e8, uniform in their logarithm."""
    generator = np.random.default_rng(0)
    return graph, {edge: float(10 ** generator.uniform(-8, 8)) for edge in graph_edges(graph)}


@pytest.mark.parametrize(
    ("case", "budget"),
    [
        *((clusters(1.0), budget) for budget in (0.5, 0.1, 0.01, 1e-4)),
        (clusters(100.0), 0.1),
        (path(100, 1e4), 0.01),
        *((path(100, 1e7), budget) for budget in (1e-3, 1e-5, 1e-7)),
        *((path(3, 1e7), budget) for budget in (0.3, 1e-4, 1e-7)),
        *((spread(nx.path_graph(100)), budget) for budget in (0.3, 1e-3, 1e-7)),
        *((spread(nx.complete_graph(8)), budget) for budget in (0.3, 1e-3, 1e-7)),
        (spread(nx.balanced_tree(2, 5)), 1e-3),
    ],
)
def test_costs_of_any_ratio(case: tuple[nx.Graph, dict[Edge, float]], budget: float) -> None:
    graph, costs = case
    matchings = decompose(graph, costs=costs)
    seconds = matching_costs(matchings, costs)
    p = activation_probabilities(matchings, budget, costs=costs)
    assert ((p >= 0) & (p <= 1)).all()
    assert p @ seconds <= budget * seconds.sum() * (1 + 1e-12)
    best = connectivity(matchings, p)
    generator = np.random.default_rng(0)
    for _ in range(10):
        other = random_feasible(seconds, budget * seconds.sum(), generator)
        for step in (0.02, 1.0):
            assert connectivity(matchings, p + step * (other - p)) <= best * (1 + 3e-5)
    assert 0 < mixing_weight(matchings, p).rho < 1


SHAPES = {
    "pair": nx.path_graph(2),
    "star": nx.star_graph(16),
    "complete 5": nx.complete_graph(5),
    "complete 8": nx.complete_graph(8),
    "bipartite": nx.complete_bipartite_graph(3, 3),
    "barbell": nx.barbell_graph(6, 3),
    "lollipop": nx.lollipop_graph(5, 20),
    "tree": nx.balanced_tree(2, 5),
    "Petersen": nx.petersen_graph(),
}


@pytest.mark.parametrize("slowest", [1.0, 100.0])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, slowest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[float] = []
    solve = module._most_connected_on

    def solve_and_note(*args: Any, **options: Any) -> tuple[Array, float]:
        p, bound = solve(*args, **options)
        bounds.append(bound)
        return p, bound

    monkeypatch.setattr(module, "_most_connected_on", solve_and_note)
    edges = graph_edges(SHAPES[name])
    costs = dict.fromkeys(edges, 1.0) | {edges[len(edges) // 2]: slowest}
    matchings = decompose(SHAPES[name], costs=costs)
    seconds = matching_costs(matchings, costs)
    for budget in (1e-3, 0.1, 0.5, 1.0):
        bounds.clear()
        p = activation_probabilities(matchings, budget, costs=costs)
        assert ((p >= 0) & (p <= 1)).all()
        assert p @ seconds <= budget * seconds.sum() * (1 + 1e-12)
        assert connectivity(matchings, p) > 0
        assert connectivity(matchings, p) >= (1 - 2e-5) * min(bounds, default=0.0)  # no p has more


@pytest.mark.parametrize("budget", [1e-7, 1e-4])
def test_small_budgets_scale_the_plan(budget: float) -> None:
    matchings = predefined_matchings(0)
    p = activation_probabilities(matchings, budget)
    np.testing.assert_allclose(p / budget, activation_probabilities(matchings, 0.1) / 0.1, rtol=1e-4, atol=1e-9)
    assert [float(f"{x:.6g}") for x in p] == p.tolist()
    assert mixing_weight(matchings, p).rho < 1


def test_problems_beyond_double_precision_are_refused() -> None:
    graph, costs = path(20, 1e15)
    with pytest.raises(ValueError, match=r"got a budget of .* expected numbers whose best plan .* larger budget"):
        activation_probabilities(decompose(graph, costs=costs), 1e-15, costs=costs)


def test_a_world_of_one_has_nothing_to_activate() -> None:
    assert activation_probabilities([], 0.5).tolist() == []


LINK_COSTS = {(0, 1): 1.0, (1, 2): 2.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "got budget=0, expected above 0 and at most 1"),
        ({"budget": -0.5}, "got budget=-0.5"),
        ({"budget": 1.01}, "got budget=1.01, .*for seconds there is budget_seconds"),
        ({"budget": float("nan")}, "got budget=nan"),
        ({}, "got budget=None and budget_seconds=None, expected one of them"),
        ({"budget": 0.5, "budget_seconds": 1.0, "costs": LINK_COSTS}, "got budget=0.5 and budget_seconds=1.0"),
        ({"budget_seconds": 1.0}, "got budget_seconds=1.0 without costs, expected"),
        ({"budget_seconds": -1.0, "costs": LINK_COSTS}, "got budget_seconds=-1.0 with costs, expected finite"),
        ({"budget": 0.5, "costs": {(0, 1): 1.0}}, r"none for the links \[\(1, 2\)\]"),
        ({"budget": 0.5, "costs": {**LINK_COSTS, (0, 1): float("nan")}}, "expected finite seconds"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        activation_probabilities([((0, 1),), ((1, 2),)], **options)


def test_example() -> None:
    assert doctest.testmod(module).failed == 0

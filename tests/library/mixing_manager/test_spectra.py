"""How fast differences between ranks grow under the law of a round."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gossip_modules import RingGraph
from gossip_modules.graph_manager import (
    BaseGraph,
    CompleteGraph,
    DynamicBipartiteLinearGraph,
    EquiDynGraph,
    GraphManager,
    HypercubeGraph,
    RandomMatchingGraph,
)
from gossip_modules.mixing_manager import MatrixMixing, MixingManager, MixingWeights, UniformMixing, default_mixing
from gossip_modules.mixing_manager.spectra import (
    MAX_RANKS,
    MAX_STATIC_RANKS,
    blocks,
    check_growth,
    growth,
    identity_like,
)


def gossip(w: Tensor) -> Tensor:
    """Without any momentum: x <- W x."""
    return w


def heavy_ball(w: Tensor) -> Tensor:
    """x <- 1.8 W x - 0.8 W x', where x' is the x of the round before."""
    return blocks([[1.8 * w, -0.8 * w], [identity_like(w), 0 * w]])


GRAPHS: list[GraphManager] = [
    RingGraph(6),
    RingGraph(6, peers_per_itr=2),
    HypercubeGraph(8),
    BaseGraph(5),
    BaseGraph(13),
    DynamicBipartiteLinearGraph(8),
]


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_it_is_the_growth_of_the_recursion(graph: GraphManager) -> None:
    mixing = default_mixing(graph, push_sum=False)
    states = torch.randn(2, graph.world_size, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrices = [mixing.matrix(t) for t in range(graph.period)]
    logs, log_scale = [], 0.0
    for t in range(2400):
        w = matrices[t % graph.period]
        states = torch.stack([1.8 * w @ states[0] - 0.8 * w @ states[1], states[0]])
        states = states - states.mean(1, keepdim=True)
        scale = float(states.norm())
        log_scale += math.log(scale)
        logs.append(log_scale)
        states = states / scale
    factor = growth(mixing, heavy_ball)
    assert factor == pytest.approx(math.exp((logs[-1] - logs[1199]) / 1200), abs=2e-3)


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_without_momentum_it_is_the_spectral_gap(graph: GraphManager) -> None:
    mixing = default_mixing(graph, push_sum=False)
    found = growth(mixing, gossip)
    assert found is not None
    assert found**graph.period == pytest.approx((1 - mixing.spectral_gap()) ** graph.period, abs=1e-6)


def test_random_graphs_have_the_growth_of_rounds_that_are_theirs() -> None:
    """In the mean of the square it is the root of `rho`, and never more almost surely."""
    for graph in (RandomMatchingGraph(16), EquiDynGraph(16)):
        found = growth(default_mixing(graph, push_sum=False), gossip)
        assert found is not None
        assert 0 < found < 1.02 * math.sqrt(graph.rho)
    assert growth(default_mixing(RandomMatchingGraph(16), push_sum=False), lambda w: 1.5 * heavy_ball(w)) > 1.2  # type: ignore[operator]


def test_matrices_in_turn_have_a_period_of_their_own() -> None:
    one, other = torch.tensor([[0.9, 0.1], [0.1, 0.9]]), torch.tensor([[0.2, 0.8], [0.8, 0.2]])
    mixing = MatrixMixing(RingGraph(2), [one, other])
    assert growth(mixing, gossip) == pytest.approx(math.sqrt(0.8 * 0.6), abs=1e-6)


def test_all_entries_of_a_schedule_that_last_a_period_count() -> None:
    both = growth(default_mixing(RingGraph(16, peers_per_itr={0: 1, 9: 2}), push_sum=False), heavy_ball)
    assert both == pytest.approx(growth(default_mixing(RingGraph(16), push_sum=False), heavy_ball))
    assert both is not None
    assert both > 1.2


def test_a_graph_in_parts_does_not_grow() -> None:
    """There differences stay as they are: rounding makes no factor above 1 of it."""
    parts = torch.block_diag(*[torch.full((2, 2), 0.5, dtype=torch.float64)] * 3)
    mixing = MatrixMixing(RingGraph(6, peers_per_itr=2), parts)
    assert growth(mixing, heavy_ball) == pytest.approx(1.0)
    check_growth("Ours", {"momentum": 0.8}, mixing, heavy_ball, step="round", remedy="a smaller momentum")


@pytest.mark.parametrize(
    ("mixing", "is_looked_at"),
    [
        (UniformMixing(RingGraph(1)), True),
        (UniformMixing(RingGraph(MAX_RANKS)), True),
        (UniformMixing(RingGraph(MAX_RANKS + 1)), False),
        (default_mixing(DynamicBipartiteLinearGraph(MAX_RANKS), push_sum=False), True),
        (default_mixing(RandomMatchingGraph(MAX_RANKS), push_sum=False), True),
        (default_mixing(HypercubeGraph(MAX_STATIC_RANKS, peers_per_itr=10), push_sum=False), True),
        (default_mixing(RingGraph(MAX_STATIC_RANKS + 1, peers_per_itr=2), push_sum=False), False),
    ],
    ids=str,
)
def test_worlds_up_to_some_size_are_looked_at(mixing: MixingManager, is_looked_at: bool) -> None:
    assert (growth(mixing, heavy_ball) is not None) == is_looked_at
    if not is_looked_at:
        check_growth("Ours", {}, mixing, lambda w: 2 * heavy_ball(w), step="round", remedy="")


class PairsAndThenARing(MixingManager):
    """Depends on t in a way that it says nothing of: its period is the inherited one of the graph, 1."""

    is_row_stochastic = is_column_stochastic = True

    def weights(self, rank: int, t: int) -> MixingWeights:
        peer = rank ^ 1 if t == 0 else (rank - 1) % self.graph.world_size
        return MixingWeights(0.5, {j: 0.5 * (j == peer) for j in self.graph.in_peers(rank, t)})


def test_an_inherited_period_is_not_believed() -> None:
    mixing = PairsAndThenARing(CompleteGraph(16, peers_per_itr=15))
    assert mixing.period == 1
    found = growth(mixing, heavy_ball)
    assert found is not None
    assert found == pytest.approx(growth(UniformMixing(RingGraph(16)), heavy_ball), rel=0.02)
    assert found > 1


def test_an_error_names_the_rates_the_graph_and_the_factor() -> None:
    message = (
        r"^Ours: got momentum=0.8 and step_size=1 on UniformMixing\(RingGraph\(8, peers_per_itr=1\)\), where the "
        r"differences between ranks grow 1\.\d{4} times from one round to the next, expected a factor of at most 1; "
        r"take a smaller momentum, an undirected graph that never changes, such as RingGraph\(n, "
        r"peers_per_itr=min\(2, n - 1\)\)"
    )
    with pytest.raises(ValueError, match=message):
        check_growth(
            "Ours",
            {"momentum": 0.8, "step_size": 1.0},
            UniformMixing(RingGraph(8)),
            heavy_ball,
            step="round",
            remedy="a smaller momentum",
        )

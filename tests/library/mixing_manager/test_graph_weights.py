"""Graphs that prescribe their weights: they are used by default, and others are refused."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from gossip_modules import GossipDataParallel, RingGraph
from gossip_modules.graph_manager import (
    BaseGraph,
    EquiDynGraph,
    EquiStaticGraph,
    GraphManager,
    RandomMatchingGraph,
    RandomPushGraph,
)
from gossip_modules.mixing_manager import (
    GraphMixing,
    LaplacianMixing,
    MetropolisHastingsMixing,
    MixingManager,
    UniformMixing,
    default_mixing,
    graph_weights,
)
from gossip_modules.wrappers.choices import choose_mixing
from tests.harness.problems import loss_of, net, sgd
from tests.harness.ranks import run_ranks
from tests.harness.reference import Oracle, Snapshot
from tests.library.wrappers.test_oracle import assert_equal, run


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 12])
def test_the_weights_of_a_base_graph_average_exactly(n: int) -> None:
    mixing = default_mixing(BaseGraph(n), push_sum=False)
    assert isinstance(mixing, GraphMixing)
    assert mixing.is_doubly_stochastic
    assert mixing.is_symmetric
    product = torch.eye(n, dtype=torch.float64)
    for t in range(mixing.period):
        product = mixing.matrix(t) @ product
    assert float((product - 1 / n).abs().max()) < 1e-12
    assert mixing.spectral_gap() == 1


@pytest.mark.parametrize("push_sum", [False, True])
@pytest.mark.parametrize("graph", ["base", BaseGraph, BaseGraph(5)])
def test_wrappers_choose_them(graph: str | Callable[[int], GraphManager], push_sum: bool) -> None:
    mixing = choose_mixing(graph, None, push_sum=push_sum, world_size=5)
    assert repr(mixing) == "GraphMixing(BaseGraph(5, peers_per_itr=1))"


@pytest.mark.parametrize("mixing", [UniformMixing, MetropolisHastingsMixing, LaplacianMixing])
def test_other_weights_are_refused(mixing: Callable[[GraphManager], MixingManager]) -> None:
    with pytest.raises(ValueError, match=r"got BaseGraph\(5.*own.*expected another graph. Take GraphMixing, or leave"):
        mixing(BaseGraph(5))


def test_a_graph_without_weights_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"GraphMixing: got RingGraph.*, expected a graph that has weights of its own"):
        GraphMixing(RingGraph(4))


@pytest.mark.parametrize("n", [3, 5, 6])
def test_training_equals_the_oracle(n: int) -> None:
    """One period and a step, with push-sum and without; the average that it makes is exact."""
    graph = BaseGraph(n)
    num_steps = graph.period + 1

    def matrix(t: int) -> torch.Tensor:
        weights = torch.zeros(n, n, dtype=torch.float64)
        for rank in range(n):
            for peer in graph.out_peers(rank, t):
                weights[rank, peer] = graph.link_weights(peer, t)[rank]
        return weights + torch.diag(1 - weights.sum(1))

    def body(group: dist.ProcessGroup) -> list[Snapshot]:
        return [run(group, GossipDataParallel, sgd, num_steps, graph="base", push_sum=push) for push in (False, True)]

    models = [net(rank).double() for rank in range(n)]
    reference = Oracle(models, [sgd(model) for model in models], matrix)
    expected = [*reference.run(num_steps, loss_of), reference.flush()]
    for ranks in zip(*run_ranks(n, body), strict=True):
        assert_equal(ranks, expected)


@pytest.mark.parametrize(
    ("graph", "push_sum"),
    [
        (RandomMatchingGraph(5, seed=1), True),
        (EquiDynGraph(4), True),
        (EquiStaticGraph(5), False),
        (RandomPushGraph(4), True),
    ],
    ids=repr,
)
def test_training_on_random_graphs_equals_the_oracle(graph: GraphManager, push_sum: bool) -> None:
    """No round comes again, so no plan may be kept for one. W by the columns: what a sender hands out."""
    n, num_steps = graph.world_size, 6

    def matrix(t: int) -> torch.Tensor:
        weights = torch.zeros(n, n, dtype=torch.float64)
        keeps = 1 / n if isinstance(graph, EquiStaticGraph) else 1 / (graph.num_peers(t) + 1)
        for rank in range(n):
            for peer in graph.out_peers(rank, t):
                weights[peer, rank] = (1 - keeps) / graph.num_peers(t)
        return weights + torch.diag(1 - weights.sum(0))

    def body(group: dist.ProcessGroup) -> Snapshot:
        return run(group, GossipDataParallel, sgd, num_steps, graph=graph, push_sum=push_sum)

    models = [net(rank).double() for rank in range(n)]
    reference = Oracle(models, [sgd(model) for model in models], matrix)
    assert_equal(run_ranks(n, body), [*reference.run(num_steps, loss_of), reference.flush()])


def test_push_pull_refuses_random_pushes() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="RandomPushGraph"):
            GossipDataParallel(net(0), graph="random-push", push_sum=False, process_group=group)

    run_ranks(3, body)


def test_examples() -> None:
    assert doctest.testmod(graph_weights).failed == 0

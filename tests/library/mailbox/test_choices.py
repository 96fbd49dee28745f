"""Gossip over a close: the graph has as many ranks as the close has workers, and late workers keep their models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossip_modules import GASLoC, GossipDataParallel, NoLoCo, RingGraph
from gossip_modules.algorithms.d_psgd import DPSGD
from gossip_modules.extend import Algorithm, Memory, Mix, Vectors
from gossip_modules.flat.vector import FlatVector
from gossip_modules.graph_manager import BaseGraph, DynamicDirectedExponentialGraph
from gossip_modules.mailbox.choices import MailChoices
from gossip_modules.mailbox.mail_rounds import MailRounds
from gossip_modules.mailbox.membership import MailMembership
from gossip_modules.mailbox.push_sum import PushSumByMail
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.rounds.requests import Mail
from gossip_modules.rounds.vector import Vector
from gossip_modules.schedule import Schedule
from gossip_modules.wrappers.choices import Choices
from tests.harness.mailbox import MailRun, MailWorker, steps

N, H, NUM_ROUNDS, LEARNING_RATE = 5, 2, 6, 0.1
MINIMA = torch.tensor([[-2.0, 1.0], [-1.0, 5.0], [0.0, -3.0], [1.0, 2.0], [3.0, 0.5]], dtype=torch.float64)
START = torch.tensor([0.5, -0.5], dtype=torch.float64)
CLOSES: Mapping[str, Mapping[int, Collection[int]]] = {
    "all in time": {},
    "odd and even": {2: [4], 3: [0, 1], 5: [2]},
    "pairs": {1: [0, 1, 2], 3: [2, 3, 4]},
    "one alone": {2: [0, 1, 3, 4], 3: [2], 4: [0, 1, 2, 3]},
}
"""The workers that miss a round, by the number of the round; the first one is 1."""


class Valley(nn.Module):
    """A point of R^2."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(START.clone())

    def forward(self, worker: int) -> Tensor:
        return (self.x - MINIMA[worker]).square().sum() / 2


def by_hand(algorithm: Algorithm, choices: Choices, late: Mapping[int, Collection[int]]) -> Tensor:
    """The models of all workers, [n, 2], by rounds of the algorithm with dense weights over each close.

    A late worker keeps its model and its memory. Plain gossip has its first round before the first step, where all
    models are equal.
    """
    x = [START.clone() for _ in range(N)]
    memories, vectors = [Memory() for _ in x], [Vector.of(FlatVector.over(each)) for each in x]

    def described(worker: int, t: int, members: Sequence[int]) -> Vectors:
        memories[worker].fit(vectors[worker])
        return Vectors(vectors[worker], Mail(), t=t, rank=members.index(worker), num_ranks=len(members))

    for worker in range(N):
        algorithm.begin(described(worker, 0, range(N)), memories[worker])
    first = int(algorithm.is_plain)
    for t in range(first, first + NUM_ROUNDS):
        for _ in range(H):
            for each, minimum in zip(x, MINIMA, strict=True):
                each.sub_(LEARNING_RATE * (each - minimum))
        members = [worker for worker in range(N) if worker not in late.get(t + 1, ())]
        rounds = {i: algorithm.round(described(i, t, members), memories[i], (t + 1) * H) for i in members}
        requests: dict[int, Any] = {i: next(own) for i, own in rounds.items()}
        assert all(isinstance(request, Mix) for request in requests.values())
        sent = torch.stack([requests[i].x.parts[0].clone() for i in members])
        mixing = choices.for_any_size()(len(members))
        for i, own in rounds.items():
            row = mixing.weights(members.index(i), t)
            weights = torch.zeros(len(members), dtype=torch.float64)
            for rank, weight in {members.index(i): row.own, **row.inp}.items():
                weights[rank] = weight
            requests[i].x.parts[0].copy_(weights @ sent)
            with contextlib.suppress(StopIteration):
                own.send(None)
            memories[i].end_round()
    return torch.stack(x)


def by_mail(options: Mapping[str, Any], late: Mapping[int, Collection[int]]) -> Tensor:
    """The models of all workers, [n, 2], by mail."""

    def body(worker: MailWorker) -> Tensor:
        module = Valley()
        model = worker.wrap(module, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        steps(worker, optimizer, lambda step: model(worker.number), H * NUM_ROUNDS)
        return module.x.detach().clone()

    return torch.stack(MailRun(late, quorum=1).train(N, body))


METHODS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "d-psgd": lambda: {"push_sum": False, "schedule": H},
    "noloco": lambda: {"algorithm": NoLoCo(H)},
    "gasloc": lambda: {"algorithm": GASLoC(H, momentum=0.3)},
}


def _both_ways(n: int) -> RingGraph:
    """A ring with both neighbours."""
    return RingGraph(n, peers_per_itr=min(2, max(n - 1, 1)))


GRAPHS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "by name": {"graph": "ring"},
    "by class": {"graph": BaseGraph},
    "by function": {"graph": _both_ways},
    "with weights": {"graph": _both_ways, "mixing": MetropolisHastingsMixing},
}


def compare(method: str, graph: str, late: Mapping[int, Collection[int]]) -> None:
    options = {**METHODS[method](), **GRAPHS[graph]}
    algorithm = options.get("algorithm") or DPSGD()
    choices = Choices(options.get("graph"), options.get("mixing"), False, options.get("algorithm"))
    expected, found = by_hand(algorithm, choices, late), by_mail(options, late)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("closes", CLOSES)
def test_closes_of_each_size_mix_by_their_own_graph(method: str, closes: str) -> None:
    compare(method, "default", CLOSES[closes])


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_is_given_by_name_class_or_function(graph: str) -> None:
    compare("d-psgd", graph, CLOSES["odd and even"])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_weights_of_each_size_keep_the_mean(method: str, graph: str, size: int) -> None:
    options = {**METHODS[method](), **GRAPHS[graph]}
    choices = Choices(options.get("graph"), options.get("mixing"), False, options.get("algorithm"), None, Schedule(H))
    mixing = MailChoices(choices).weights(size)
    for t in range(5):
        columns = torch.zeros(size, dtype=torch.float64)
        for rank in range(size):
            row = mixing.weights(rank, t)
            columns[rank] += row.own
            for peer, weight in row.inp.items():
                columns[peer] += weight
        torch.testing.assert_close(columns, torch.ones_like(columns), rtol=0, atol=1e-15)


@pytest.mark.parametrize("algorithm", [None, DPSGD()])
def test_push_sum_goes_by_letters(algorithm: Algorithm | None) -> None:
    choices = Choices(DynamicDirectedExponentialGraph, algorithm=algorithm, schedule=Schedule(H))
    assert isinstance(MailChoices(choices).mixer(), PushSumByMail)
    without = Choices(algorithm=algorithm, push_sum=False, schedule=Schedule(H))
    assert isinstance(MailChoices(without).mixer(), MailRounds)


def test_weights_that_do_not_keep_the_sum_are_refused_for_push_sum() -> None:
    with pytest.raises(ValueError, match="column-stochastic"):
        GossipDataParallel(
            Valley(),
            graph=_both_ways,
            mixing=_Rows,
            schedule=H,
            membership=MailMembership("memory://rows", min_workers=2),
        )


def test_a_worker_with_another_graph_is_refused() -> None:
    def start(graph: Any) -> GossipDataParallel:
        membership = MailMembership("memory://graphs", min_workers=1)
        return GossipDataParallel(Valley(), graph=graph, schedule=H, membership=membership)

    first = start(RingGraph)
    with pytest.raises(ValueError, match=r"graph.*RingGraph.*BaseGraph"):
        start(BaseGraph)
    first.close()


class _Rows(MetropolisHastingsMixing):
    """Weights whose columns sum to something else than one."""

    is_column_stochastic = False

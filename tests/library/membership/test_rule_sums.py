"""Algorithms for uneven data on workers that die and join: their limit is the optimum of the workers that live."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    D2,
    EXTRA,
    KGT,
    DecentLaM,
    ExactDiffusion,
    GossipDataParallel,
    GradientTracking,
    Membership,
    ProxSkip,
    QGDSGDm,
    RingGraph,
)
from gossip_modules.engine.lockstep import LockstepEngine, SyncEngine
from gossip_modules.extend import Algorithm, PushPull
from gossip_modules.flat.vector import FlatVector
from gossip_modules.graph_manager import BaseGraph
from gossip_modules.graph_manager.named_graphs import undirected_ring
from gossip_modules.membership.links import LinkTransport
from gossip_modules.mixing_manager import MetropolisHastingsMixing, MixingManager
from gossip_modules.rounds.memory import Memory
from gossip_modules.rounds.rounds import Rounds, mixer_of
from gossip_modules.schedule import Schedule
from gossip_modules.testing import Chaos, Join, Kill
from gossip_modules.testing import Worker as ChaosWorker
from tests.harness.progress import engine_of, local_of
from tests.harness.ranks import TIMEOUT
from tests.library.membership.scripted import Ended, ScriptedWorker, run_workers

DEATH, SECOND, SNAPSHOT, THIRD, LAST = 12, 15, 18, 21, 110
"""The steps of a death, of the generation without the dead one, of a donor's snapshot, and of that with one more."""


class Worker(ScriptedWorker):
    """A number that goes to ten times the worker's name, and the engine of a rule."""

    def __init__(self, name: int, store: dist.Store, rule: Algorithm) -> None:
        super().__init__(name, store)
        self.rule, self.x = rule, FlatVector.over(torch.zeros(1, dtype=torch.float64))
        self.mixing_of = self.mixing_of_size
        self.engine: SyncEngine | None = None
        self.given: tuple[dict[str, Any], Tensor] | None = None

    def mixing_of_size(self, size: int) -> MixingManager:
        return self.rule.default_mixing(size) or MetropolisHastingsMixing(undirected_ring(size))

    def turn_to(self, mixing: MixingManager, transport: LinkTransport, *, is_first: bool) -> None:
        if self.engine is None:
            gossiper = mixer_of(self.rule, PushPull())
            gossiper.bind(mixing, transport)
            self.engine = SyncEngine(gossiper, Schedule())
        if self.given is not None:
            state, model = self.given
            self.engine.load_state_dict(state)
            self.engine.advance(THIRD - SNAPSHOT)
            self.x.segments[0].copy_(model)
            self.given = None
        self.engine.rebind(mixing, transport, self.x)

    def train(self, first: int, last: int) -> None:
        assert self.engine is not None
        x = self.x.segments[0]
        for step in range(first, last):
            assert (self.engine.step, self.engine.t) == (step, step)
            self.engine.round(self.x)
            x.sub_(0.1 * (x - 10 * self.name))


@pytest.mark.parametrize("rule", [D2(), ExactDiffusion(), EXTRA(), GradientTracking(), KGT(2), ProxSkip(0.7)])
def test_living_workers_reach_the_optimum_of_the_mean_of_their_losses(rule: Algorithm) -> None:
    """Without a new beginning the mean would move for ever by what the dead one carried."""
    handed: queue.Queue[tuple[dict[str, Any], Tensor]] = queue.Queue()

    def survivor(worker: Worker) -> None:
        worker.begin(1, [0, 1, 2, 3])
        worker.train(0, SECOND)
        worker.begin(2, [0, 2, 3])
        worker.train(SECOND, SNAPSHOT)
        if worker.name == 0 and worker.engine is not None:
            handed.put((worker.engine.state_dict(joins=True), worker.x.segments[0].clone()))
        worker.train(SNAPSHOT, THIRD)
        worker.begin(3, [0, 2, 3, 4])
        worker.train(THIRD, LAST)

    def dying(worker: Worker) -> None:
        worker.begin(1, [0, 1, 2, 3])
        worker.train(0, DEATH)
        raise Ended

    def newcomer(worker: Worker) -> None:
        worker.given = handed.get(timeout=2 * TIMEOUT.total_seconds())
        worker.begin(3, [0, 2, 3, 4])
        worker.train(THIRD, LAST)

    bodies = [survivor, dying, survivor, survivor, newcomer]
    workers = run_workers(bodies, lambda name, store: Worker(name, store, rule))
    for worker in (workers[k] for k in (0, 2, 3, 4)):
        worker.x.segments[0].add_(0.1 * (worker.x.segments[0] - 10 * worker.name) / 0.9)  # before the last step
        assert worker.x.segments[0].item() == pytest.approx(22.5, abs=0.05)


def memory_of(engine: LockstepEngine) -> Memory:
    rounds = engine.mixer
    assert isinstance(rounds, Rounds)
    return rounds.drivers[0].memory


def freeze_first(wrapper: GossipDataParallel) -> None:
    """The first layer leaves the vector, as after a round that has taken it along."""
    wrapper.module.get_submodule("0").requires_grad_(False)
    local_of(wrapper).choose()
    engine_of(wrapper).t += 1
    local_of(wrapper).choose()
    engine_of(wrapper).t -= 1
    assert len(local_of(wrapper).buffer.tensors) == 2


def training(rule: Algorithm, first_rounds: dict[int, Any], last: list[int]) -> Callable[[ChaosWorker], None]:
    """A body for `Chaos`: trains until the worker that joins has taken ten steps."""

    def body(worker: ChaosWorker) -> None:
        membership = worker.membership(min_workers=3, timeout=60, min_deadline=20.0)
        wrapper = GossipDataParallel(nn.Linear(3, 1), membership=membership, algorithm=rule)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01, momentum=0.9)
        membership.track(optimizer=optimizer)
        first, engine = membership.join(), engine_of(wrapper)
        memory = memory_of(engine)
        for step in membership.steps(1 << 30):
            if worker.rank == 3 and step == first + 10:
                last.append(step + 10)
            if last and step >= last[0]:
                break
            loss = (wrapper(torch.ones(1, 3)) - worker.rank).square().sum()
            first_rounds.setdefault(worker.rank, (memory.num_rounds, memory.momentum.parts[0].norm().item()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.001)
        wrapper.close()

    return body


@pytest.mark.parametrize("rule", [QGDSGDm(), DecentLaM()])
def test_momentum_of_rules_comes_from_the_donor(rule: Algorithm) -> None:
    found: dict[int, Any] = {}
    Chaos([Kill(step=9, rank=0), Join(step=14)]).run(training(rule, found, []), 3)
    assert [found[rank] for rank in (1, 2)] == [(1, 0.0)] * 2
    rounds, momentum = found[3]
    assert rounds > 10
    assert momentum > 0


def test_a_graph_that_does_not_suit_a_rule_is_refused() -> None:
    membership = Membership(dist.HashStore(), min_workers=2)
    with pytest.raises(
        ValueError, match=r"QGDSGDm: got mu=0.9 and the usual momentum=0.9 on .*RingGraph\(8,.* grow 1.00\d+ ti"
    ):
        GossipDataParallel(nn.Linear(2, 1), algorithm=QGDSGDm(), graph=RingGraph, membership=membership)
    with pytest.raises(ValueError, match=r"D2: got .*, expected a graph that never changes"):
        GossipDataParallel(nn.Linear(2, 1), algorithm=D2(), graph=BaseGraph, membership=membership)
    membership.close()


@pytest.mark.parametrize("rule", [QGDSGDm(), DecentLaM()])
def test_a_joining_worker_takes_the_tensors_that_are_still_trained(
    rule: Algorithm,
) -> None:
    """As the others do when the layer is frozen; of a checkpoint too."""
    wrappers = []
    for _ in range(2):
        membership = Membership(dist.HashStore(), min_workers=1)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        wrappers.append(GossipDataParallel(model, membership=membership, algorithm=rule))
    wrapper = wrappers[1]
    donor, newcomer = (engine_of(each) for each in wrappers)
    whole = local_of(wrappers[0]).buffer.vector
    donor.round(whole)
    memory_of(donor).momentum.parts[0].fill_(0.5)
    newcomer.load_state_dict(donor.state_dict(joins=True))
    given = newcomer.state_dict(joins=True)  # it may be a donor before its first round
    freeze_first(wrapper)
    newcomer.load_state_dict(given)
    newcomer.round(local_of(wrapper).buffer.vector)
    (momentum,) = memory_of(newcomer).momentum.parts
    assert momentum.tolist() == [0.5] * 3
    assert memory_of(newcomer).num_rounds == 2
    newcomer.load_state_dict(donor.state_dict())
    newcomer.round(local_of(wrapper).buffer.vector)
    assert memory_of(newcomer).momentum.parts[0].tolist() == [0.5] * 3
    for one in wrappers:
        one.close()


@pytest.mark.parametrize("rule", [D2(), GradientTracking()])
def test_sums_are_in_no_state_that_is_loaded_under_a_membership(rule: Algorithm) -> None:
    membership = Membership(dist.HashStore(), min_workers=1)
    wrapper = GossipDataParallel(nn.Linear(3, 1), membership=membership, algorithm=rule)
    engine, x = engine_of(wrapper), local_of(wrapper).buffer.vector
    engine.round(x)
    assert memory_of(engine).state_dict()["vectors"]
    joins = engine.state_dict(joins=True)["gossiper"]["memory"]
    assert (joins["num_rounds"], joins.get("vectors")) == (0, None)
    engine.load_state_dict(engine.state_dict())
    memory = memory_of(engine).state_dict()
    assert (memory["num_rounds"], memory.get("vectors")) == (0, None)
    wrapper.close()


def test_a_graph_is_refused_for_the_numbers_of_workers_that_may_come_only() -> None:
    """Under QG-DSGDm differences grow on directed rings of eight workers, and not of four."""
    small = Membership(dist.HashStore(), min_workers=1, max_workers=4, timeout=60)
    GossipDataParallel(nn.Linear(2, 1), membership=small, algorithm=QGDSGDm(), graph=RingGraph).close()
    large = Membership(dist.HashStore(), min_workers=1, timeout=60)
    with pytest.raises(ValueError, match=r"grow 1\..*; 8 workers are tried since others may come"):
        GossipDataParallel(nn.Linear(2, 1), membership=large, algorithm=QGDSGDm(), graph=RingGraph)
    large.close()

"""How long workers of a mailbox wait for each other, and when a worker is silent, in exact virtual time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gossip_modules import DiLoCo
from gossip_modules.lab.virtual_clock import VirtualClock
from gossip_modules.mailbox.errors import Unavailable
from gossip_modules.mailbox.job import MailJob, Settings
from gossip_modules.mailbox.memory import MemoryMedium
from gossip_modules.mailbox.saved_models import SavedModels
from gossip_modules.mailbox.sealed import Seal
from gossip_modules.testing.storm import StormyMedium
from tests.harness.virtual_workers import VirtualRun, VirtualWorker

GRACE, POLL = 3.0, 0.5
_runs = itertools.count()


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_worker_waits_longer_than_grace_and_two_polls(seed: int) -> None:
    draw = random.Random(seed)
    speeds, algorithm = [draw.uniform(1, 4) for _ in range(4)], DiLoCo(sync_every=5, delay=draw.choice([0, 0, 1]))
    with VirtualRun(algorithm, speeds, seed=seed, quorum=draw.randint(2, 4), grace=GRACE, poll=POLL) as run:
        for seconds in (8, 16, 24):
            run.clock.run(until=float(seconds))
            live = [worker for worker in run.workers if not worker.thread.is_killed]
            run.clock.kill(draw.choice(live).thread)
            run.workers.append(VirtualWorker(run, draw.uniform(1, 4)))
        assert POLL < run.longest_wait <= GRACE + 2 * POLL + 1e-9


def test_a_step_that_ends_a_round_and_begins_one_waits_no_longer() -> None:
    """The fast worker waits for the round of before until the slow one comes, and then for the next one."""
    with VirtualRun(DiLoCo(sync_every=10), [4.0, 1.0], quorum=2, grace=GRACE, poll=POLL) as run:
        run.clock.run(until=30.0)
        assert run.longest_wait == pytest.approx(GRACE + 2 * POLL)


def test_no_round_waits_for_a_worker_that_died_three_periods_ago() -> None:
    """Also if the rounds of the others are further apart than their signs of life."""
    with VirtualRun(DiLoCo(sync_every=20), [0.2] * 4, quorum=3, grace=5.0, poll=1.0, interval=10.0) as run:
        run.clock.run(until=450.0)
        before = run.longest_wait
        run.clock.kill(run.workers[3].thread)
        run.clock.run(until=1000.0)
        assert run.longest_wait == before
        assert all(worker.num_steps > 190 for worker in run.workers[:3])
        members = sorted(worker.membership.number for worker in run.workers[:3])
        assert list(run.workers[0].membership.members) == members


def test_a_death_right_before_a_round_costs_the_grace_once() -> None:
    with VirtualRun(DiLoCo(sync_every=20), [0.2] * 4, quorum=3, grace=5.0, poll=1.0, interval=10.0) as run:
        run.clock.run(until=490.0)
        run.clock.kill(run.workers[3].thread)
        run.clock.run(until=1000.0)
        assert [sum(wait >= 5.0 for wait in worker.waits) for worker in run.workers[:3]] == [1, 1, 1]


@pytest.mark.parametrize("begin", [19.9, 20.3, 21.1])
@pytest.mark.parametrize("delay", [0, 1])
def test_training_goes_on_while_the_medium_is_away(begin: float, delay: int) -> None:
    speeds, outage = [1.0, 2.0, 3.0, 3.5], [(begin, begin + 60.0)]
    with VirtualRun(DiLoCo(sync_every=5, delay=delay), speeds, quorum=2, grace=GRACE, poll=POLL, outage=outage) as run:
        run.clock.run(until=begin + 15.0)  # each worker has waited once
        before, _ = [worker.num_steps for worker in run.workers], run.clock.run(until=begin + 60.0)
        steps = [worker.num_steps - own for worker, own in zip(run.workers, before, strict=True)]
        run.clock.run(until=begin + 120.0)
        assert POLL < run.longest_wait <= GRACE + 2 * POLL + 1e-9
        assert all(own >= int(45.0 * speed) - 1 for own, speed in zip(steps, speeds, strict=True))
        for worker in run.workers:
            stats = worker.model.comm_stats()
            assert stats["longest_wait"] == pytest.approx(max(worker.waits))
            assert stats["waited"] == pytest.approx(sum(worker.waits))


class Signs:
    """Two workers that only give signs of life; the first one looks at the other one every tenth of a second.

    Args:
        clock: the clock.
        outages: when the medium answers nobody.
        interval: the seconds between two signs.

    Attributes:
        silent: the times at which the first one took the other one for silent.
    """

    def __init__(self, clock: VirtualClock, outages: list[tuple[float, float]], interval: float) -> None:
        self.clock, self.outages, self.name, self.silent = clock, outages, f"signs-{next(_runs)}", list[float]()
        self.settings = Settings(1, 1.0, 1.0, interval, 1e3, 0.0, 1)
        self.reader = clock.start(self._read, "reader")
        self.writer = clock.start(self._write, "writer")

    def _job(self, seed: int) -> MailJob:
        memory = MemoryMedium(self.name, timeout=1e3, clock=self.clock, seal=Seal(None))
        job = MailJob(StormyMedium(memory, seed=seed, outage=self.outages), self.settings)
        job.claim({})
        job.beat()
        job.beat_soon()
        return job

    def _read(self) -> None:
        job = self._job(1)
        job.wait_for(2)
        while True:
            if len(job.live()) < 2:
                self.silent.append(self.clock.now())
            self.clock.sleep(0.1)

    def _write(self) -> None:
        self._job(2)
        self.clock.sleep(1e6)


def test_a_worker_is_silent_after_three_periods_without_a_sign(clock: VirtualClock) -> None:
    signs = Signs(clock, [], interval=10.0)
    clock.run(until=124.9)
    assert not signs.silent
    clock.kill(signs.writer)  # its last sign was at 120
    clock.run(until=200.0)
    assert 150.0 <= signs.silent[0] <= 150.3


@pytest.mark.parametrize("seconds", [3.0, 12.0, 29.0, 31.0, 300.0])
def test_an_outage_makes_no_worker_silent(clock: VirtualClock, seconds: float) -> None:
    signs = Signs(clock, [(125.0, 125.0 + seconds)], interval=10.0)
    clock.run(until=225.0 + seconds)
    assert not signs.silent


def test_a_worker_that_dies_in_an_outage_is_silent_three_periods_after_it(clock: VirtualClock) -> None:
    signs = Signs(clock, [(125.0, 425.0)], interval=10.0)
    clock.run(until=225.0)
    clock.kill(signs.writer)
    clock.run(until=600.0)
    assert 425.0 + 20.0 < signs.silent[0] <= 425.0 + 30.0 + 5.0  # after an outage, tries are up to five seconds apart


def test_training_goes_on_in_an_outage_and_rounds_after_it() -> None:
    outage = [(63.0, 163.0)]
    with VirtualRun(DiLoCo(sync_every=10), [1.0, 2.0, 3.0], quorum=2, outage=outage, interval=10.0) as run:
        run.clock.run(until=163.0)
        assert all(worker.num_steps > 0.4 * 163.0 * worker.speed for worker in run.workers)
        models = SavedModels(MemoryMedium(run.name, timeout=1.0, clock=run.clock, seal=Seal(None)))
        before, _ = models.newest(), run.clock.run(until=263.0)
        assert (models.newest() or 0) > (before or 0) + 5
        assert run.workers[0].membership.members == (0, 1, 2)
        assert run.longest_wait <= GRACE + 2 * POLL + 1e-9


def test_an_outage_longer_than_the_timeout_is_an_error() -> None:
    options: dict[str, Any] = {"outage": [(23.0, 1e6)], "interval": 10.0, "timeout": 100.0}
    with VirtualRun(DiLoCo(sync_every=10), [1.0, 2.0], quorum=2, **options) as run:
        run.clock.run(until=100.0)
        with pytest.raises(Unavailable, match="an outage"):
            run.clock.run(until=300.0)
        assert 115.0 <= run.clock.now() < 125.0  # the last answer was at 15 or later


def test_workers_of_unequal_speeds_meet_where_their_periods_are_in_proportion() -> None:
    speeds = [1.0, 2.0, 4.0]
    with VirtualRun(lambda speed: DiLoCo(sync_every=round(5 * speed)), speeds, quorum=3) as run:
        run.clock.run(until=60.0)
        assert run.longest_wait < 2 * POLL
        assert [worker.num_steps for worker in run.workers] == pytest.approx([60, 120, 240], rel=0.05)
        assert run.workers[0].membership.members == (0, 1, 2)


def test_workers_with_another_outer_momentum_are_refused() -> None:
    run = VirtualRun(lambda speed: DiLoCo(sync_every=5, momentum=speed / 10), [1.0, 2.0])
    with run, pytest.raises(ValueError, match=r"differs from it: .*momentum"):
        run.clock.run(until=1.0)


def test_equal_seeds_have_equal_bits() -> None:
    def ends(seed: int) -> list[Any]:
        with VirtualRun(DiLoCo(sync_every=5), [1.0, 2.0, 3.0], quorum=2, seed=seed) as run:
            run.clock.run(until=30.0)
            parameters = [worker.optimizer.param_groups[0]["params"][0].item() for worker in run.workers]
            return [parameters, *((worker.num_steps, worker.waits) for worker in run.workers)]

    assert ends(0) == ends(0)


def test_a_newcomer_has_the_optimizer_of_the_others() -> None:
    """Its objects are tracked after the model is wrapped, as in the loop of elastic training."""
    with VirtualRun(DiLoCo(sync_every=5), [2.0, 2.0], quorum=2) as run:
        run.clock.run(until=20.0)
        run.workers.append(VirtualWorker(run, 2.0))
        momenta = list[float]()
        step = torch.optim.SGD.step

        def noting(self: torch.optim.SGD, *arguments: Any) -> Any:
            if self is getattr(run.workers[2], "optimizer", None):
                momenta.extend(float(state["momentum_buffer"]) for state in self.state.values())
            return step(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.SGD, "step", noting)
            run.clock.run(until=21.0)
        assert momenta
        assert momenta[0] != 0.0

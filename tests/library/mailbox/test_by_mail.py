"""Wrappers train by letters, at any pace, while workers die, join and leave."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel, GossipDataParallel
from gossip_modules.flat.vector import FlatVector
from gossip_modules.lab.virtual_clock import VirtualClock
from gossip_modules.mailbox.job import read_run
from gossip_modules.mailbox.membership import MailMembership
from gossip_modules.mailbox.memory import MemoryMedium
from gossip_modules.mailbox.push_sum import PushSumByMail
from gossip_modules.mailbox.saved_models import SavedModels
from gossip_modules.mailbox.sealed import Seal
from gossip_modules.membership.view import Change
from gossip_modules.testing.storm import StormyMedium
from tests.harness.letters import LetterRun
from tests.harness.mailbox import MailRun, MailWorker

MINIMA = (-3.0, -1.0, 1.0, 3.0, 8.0)
H, LEARNING_RATE = 4, 0.05
_names = itertools.count()


class Place(nn.Module):
    """A point of R^2 and a running statistic, each of its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((2,), 0.25, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.full((3,), 0.25, dtype=torch.bfloat16))
        self.register_buffer("statistic", torch.full((1,), 0.25))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.count: Tensor
        self.statistic: Tensor

    def forward(self, minimum: float) -> Tensor:
        self.statistic.mul_(0.9).add_(0.1 * minimum)
        self.count += 1
        return ((self.x - minimum).square().sum() + (self.narrow.double() - minimum).square().sum()) / 2


class Member:
    """A worker that trains on its own minimum until its number of seconds is over, and closes then.

    Attributes:
        trace: x after each step.
    """

    def __init__(self, run: Run, speed: float, minimum: float, seconds: float) -> None:
        self.run, self.speed, self.minimum, self.seconds = run, speed, minimum, seconds
        self.trace: list[float] = []
        self.changes: list[Change] = []
        self.module = Place()
        self.model: Any = None
        self.thread = run.clock.start(self._train, f"worker {minimum}")

    def _train(self) -> None:
        run, clock = self.run, self.run.clock
        memory = MemoryMedium(run.name, timeout=1e3, clock=clock, seal=Seal(None))
        self.membership = MailMembership(StormyMedium(memory, seed=0, **run.faults), clock=clock, **run.options)
        self.membership.on_change(self.changes.append)
        self.model = run.wrap(self.module, membership=self.membership)
        self.mixer = self.model._local.engine.mixer
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        start = clock.now()
        for _ in self.membership.steps(1_000_000):
            loss = self.model(self.minimum)
            optimizer.zero_grad()
            loss.backward()
            clock.sleep(1 / self.speed)
            optimizer.step()
            self.trace.append(self.module.x[0].item())
            if clock.now() - start >= self.seconds:
                break
        self.model.close()

    def mean(self) -> float:
        """The mean of x over the second half of its steps."""
        return sum(self.trace[len(self.trace) // 2 :]) / (len(self.trace) - len(self.trace) // 2)


class Run:
    """A run over a mailbox in memory, under a virtual clock.

    Args:
        wrap: the wrapper and its arguments.
        faults: see `StormyMedium`.
        seed: draws the order of threads.
        options: of the memberships.
    """

    def __init__(
        self, wrap: Callable[..., Any], *, faults: dict[str, Any] | None = None, seed: int = 0, **options: Any
    ) -> None:
        self.wrap, self.faults = wrap, faults or {}
        self.name, self.clock = f"by-mail-{next(_names)}", VirtualClock(seed=seed)
        self.options = {"grace": 10.0, "poll": 0.5, "interval": 2.0, "timeout": 1e3, **options}
        self.members: list[Member] = []

    def start(self, speeds: Sequence[float], *, seconds: float, minima: Sequence[float] = MINIMA) -> None:
        self.options.setdefault("min_workers", len(speeds))
        for speed, minimum in zip(speeds, minima, strict=False):
            self.members.append(Member(self, speed, minimum, seconds))

    def end(self) -> None:
        self.clock.run()
        self.clock.close()


def push_sum(module: nn.Module, **options: Any) -> GossipDataParallel:
    return GossipDataParallel(module, schedule=H, gossip_buffers=["statistic"], **options)


def pairs(module: nn.Module, **options: Any) -> BilatGossipDataParallel:
    return BilatGossipDataParallel(module, schedule=H, gossip_buffers=["statistic"], **options)


both = pytest.mark.parametrize("wrap", [push_sum, pairs])


@both
def test_estimates_approach_the_minimum_of_the_mean_of_all_losses(wrap: Callable[..., Any]) -> None:
    run = Run(wrap)
    run.start([2.0] * 4, seconds=20.0)
    run.end()
    assert sum(member.mean() for member in run.members) / 4 == pytest.approx(0.0, abs=0.2)
    for member in run.members:
        assert member.mean() == pytest.approx(0.0, abs=1.0)
        assert member.module.narrow.float().mean().item() == pytest.approx(0.0, abs=1.5)
        assert abs(member.module.statistic.item()) < 2.5
        assert member.module.count.item() == 40
        assert len(member.trace) == 40
    assert {member.membership.members for member in run.members} == {(0, 1, 2, 3)}


@both
def test_faults_of_the_medium_stop_no_worker(wrap: Callable[..., Any]) -> None:
    faults = {"loss": 0.1, "delay": 0.2, "stale": 0.2, "unavailable": 0.1, "outage": [(12.0, 20.0)]}
    run = Run(wrap, faults=faults)
    run.start([2.0] * 3, seconds=40.0)
    run.end()
    assert min(len(member.trace) for member in run.members) >= 80
    assert sum(member.mean() for member in run.members) / 3 == pytest.approx(-1.0, abs=0.5)


@both
def test_workers_go_on_after_a_death_and_a_join(wrap: Callable[..., Any]) -> None:
    run = Run(wrap, min_workers=3, interval=0.5, save_every=2)
    run.start([2.0] * 3, seconds=40.0)
    run.clock.run(until=10.0)
    run.clock.kill(run.members[1].thread)
    run.clock.run(until=16.0)
    survivors = [run.members[0], run.members[2]]
    assert [member.membership.members for member in survivors] == [(0, 2)] * 2
    run.start([2.0], seconds=20.0, minima=[8.0])
    run.clock.run(until=25.0)
    joined = run.members[3]
    assert joined.membership.members == (0, 2, 3)
    assert joined.trace[0] == pytest.approx(survivors[0].trace[0], abs=4.0)
    assert abs(joined.trace[0] - 0.25) > 0.05  # it has begun with a model of the run
    run.end()
    assert [len(member.trace) for member in survivors] == [80, 80]


@pytest.mark.parametrize("seed", range(4))
def test_lost_answers_and_an_outage_leave_the_mass_in_the_models(seed: int) -> None:
    """Lists and reads show the present state, as in a bucket; a worker that leaves may otherwise miss a letter."""
    run = Run(push_sum, seed=seed, faults={"loss": 0.1, "delay": 0.2, "unavailable": 0.1, "outage": [(6.0, 9.0)]})
    run.start([2.0, 3.0, 1.0], seconds=16.0)
    run.end()
    assert sum(member.mixer.weight for member in run.members) == 3.0


@both
@pytest.mark.parametrize("seed", [4, 7, 8, 9])
def test_a_worker_that_closes_during_an_exchange_lets_it_end(wrap: Callable[..., Any], seed: int) -> None:
    run = Run(wrap, seed=seed, faults={"delay": 4.0})
    run.start([4 + seed / 7, 5.0], seconds=6 + seed / 10)
    run.end()
    if wrap is push_sum:
        assert sum(member.mixer.weight for member in run.members) == 2.0


def test_the_mass_of_a_run_that_ends_is_in_its_last_model() -> None:
    run = Run(push_sum)
    run.start([2.0] * 3, seconds=12.0)
    run.end()
    assert sorted(member.mixer.weight for member in run.members) == [0.0, 0.0, 3.0]
    memory = MemoryMedium(run.name, timeout=1.0, clock=run.clock, seal=Seal(None))
    read_run(memory)
    saved = SavedModels(memory).load()
    last = max(run.members, key=lambda member: member.mixer.weight)
    assert saved is not None
    assert saved.model["x"].tolist() == last.module.x.tolist()
    assert not [path for path in memory.list("mail") if not path.endswith(".taken")]


@both
def test_a_checkpoint_has_the_estimate(wrap: Callable[..., Any]) -> None:
    run = Run(wrap)
    run.start([2.0] * 2, seconds=6.0)
    run.clock.run(until=4.0)
    model = run.members[0].model
    state, twin = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    assert torch.equal(twin.module.x, model.module.x)
    run.end()
    assert not torch.equal(model.module.x, twin.module.x)
    twin.load_state_dict(state)
    assert torch.equal(twin.module.x, state["module.x"])


@both
def test_a_checkpoint_that_is_loaded_in_training_changes_no_weight_and_loses_no_letter(
    wrap: Callable[..., Any],
) -> None:
    run = Run(wrap)
    run.start([2.0, 3.0], seconds=12.0)
    run.clock.run(until=4.25)
    first, second = run.members
    state = copy.deepcopy(first.model.state_dict())
    run.clock.run(until=7.25)
    letters = first.mixer.letters
    first.model.load_state_dict(state)
    assert torch.equal(first.module.x, state["module.x"])
    assert first.mixer.letters is letters
    run.end()
    assert not letters.arrived
    if wrap is push_sum:
        assert first.mixer.weight + second.mixer.weight == 2.0


def test_a_model_with_other_tensors_than_before_is_refused() -> None:
    run = LetterRun(PushSumByMail)
    worker = run.add(1.0)
    run.rounds(1)
    worker.vector = FlatVector.over(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"got other trained tensors than before.*freeze and unfreeze layers before"):
        worker.mixer.finish(worker.vector)


def test_momentum_of_pairs_and_requests_in_each_step_are_refused() -> None:
    def membership() -> MailMembership:
        return MailMembership(f"memory://{next(_names)}-refused", min_workers=1)

    with pytest.raises(ValueError, match=r"continuous_momentum=True with a mailbox.*leave it out"):
        BilatGossipDataParallel(Place(), membership=membership(), schedule=H, continuous_momentum=True)
    with pytest.raises(ValueError, match="pass schedule=H"):
        BilatGossipDataParallel(Place(), membership=membership())
    with pytest.raises(ValueError, match=r"expected a mailbox beside it.*leave schedule out"):
        BilatGossipDataParallel(Place(), schedule=H)


@pytest.mark.parametrize("kind", [GossipDataParallel, BilatGossipDataParallel])
def test_a_worker_with_other_tensors_than_before_leaves_by_close(kind: Any) -> None:
    """It takes its model along, and no round waits for it."""

    def body(worker: MailWorker) -> None:
        place = Place()
        place.narrow.requires_grad_(False)
        worker.model = model = kind(place, schedule=H, membership=worker.membership)

        def unfreeze() -> None:
            for step in worker.membership.steps(4 * H):
                place.narrow.requires_grad_(step > H)
                model(1.0).backward()
                worker.clock.sleep(1.0)

        with pytest.raises(ValueError, match="got other trained tensors than before"):
            unfreeze()
        model.close()
        assert f"worker/{worker.number:06d}/left" in worker.medium.list("worker")

    MailRun(quorum=1).train(2, body)

"""One deadline for all waits of an operation: of a rejoin, of a request to the store, of a first generation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import GossipDataParallel, Membership
from gossip_modules.membership import donor
from gossip_modules.membership import membership as membership_module
from gossip_modules.membership.generations import Generations
from gossip_modules.membership.joining import Joining, rejoin
from gossip_modules.membership.shared_roster import SharedRoster
from gossip_modules.membership.view import Change, Joiner, View
from gossip_modules.membership.worker import LocalWorker
from gossip_modules.transport.deadline import Deadline
from gossip_modules.transport.state_tree import pack
from tests.library.membership.test_membership import SECONDS, Job, close, member_of, model_of
from tests.library.transport.clock import Clock


@pytest.mark.parametrize("stage", ["it comes", "a donor", "a generation"])
def test_a_rejoin_stands_still_for_one_timeout_at_most(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever wait fails in the end, and however long those before it took."""
    member = member_of(dist.HashStore(), min_workers=1)
    wrapper = GossipDataParallel(model_of(), membership=member)
    clock, waits = Clock.begin(monkeypatch), []

    def spend(deadline: Deadline, seconds: float) -> None:
        waits.append(min(deadline.left, seconds))
        clock.now += waits[-1]

    def wait_until(self: LocalWorker, condition: Callable[[], bool], deadline: Deadline) -> bool:
        if len(waits) == (0 if stage == "it comes" else 1 if stage == "a generation" else -1):
            spend(deadline, 10 * SECONDS)
            return False
        with self.moved:
            assert self.moved.wait_for(condition, SECONDS), "it is in the join queue"
        spend(deadline, 0.6 * SECONDS)
        return True

    def gather(self: SharedRoster, name: str, *_: Any, is_void: Callable[[], bool], **__: Any) -> list[str]:
        start = clock.now
        while not is_void():
            clock.now += 0.5
        waits.append(clock.now - start)
        raise RuntimeError("nobody came")

    def receive_state(self: Joining, joiner: Joiner, deadline: Deadline) -> bool:
        return True

    monkeypatch.setattr(LocalWorker, "wait_until", wait_until)
    monkeypatch.setattr(Joining, "_restart_if_abandoned", lambda *_: False)
    monkeypatch.setattr(Joining, "load", lambda *_: None)
    monkeypatch.setattr(Joining, "say_loaded", lambda self, joiner: setattr(self.worker, "loaded", joiner.key))
    if stage == "a donor":
        monkeypatch.setattr(SharedRoster, "gather", gather)
    else:
        monkeypatch.setattr(Joining, "_receive_state", receive_state)
    change = rejoin(member, Deadline(member.timeout))
    assert isinstance(change, Change)
    assert change.members == (0,), "it trains on alone"
    assert len(waits) == (1 if stage == "it comes" else 2)
    assert sum(waits) == pytest.approx(SECONDS)
    assert clock.now == pytest.approx(SECONDS)
    monkeypatch.undo()
    wrapper.close()


def test_a_rejoin_that_has_no_time_left_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the first step of a generation came before it, in the same training step."""
    member = member_of(dist.HashStore(), min_workers=1)
    wrapper = GossipDataParallel(model_of(), membership=member)
    clock, rejoins = Clock.begin(monkeypatch), []

    def wait_for_first_step(self: Generations, step: int, deadline: Deadline) -> None:
        clock.now += deadline.left
        self.worker.is_excluded, self.worker.can_rejoin, self.limit = True, True, None

    def rejoin_by(self: Membership, deadline: Deadline) -> Change:
        rejoins.append(deadline.left)
        self.worker.is_excluded = False
        return Change(2, 1, 0, (0,), (), {})

    monkeypatch.setattr(Generations, "wait_for_first_step", wait_for_first_step)
    monkeypatch.setattr(membership_module, "rejoin", rejoin_by)
    member.worker.generations.limit = 0
    member.at_step()
    assert rejoins == []
    member.at_step()
    assert rejoins == [SECONDS]
    monkeypatch.undo()
    wrapper.close()


def test_a_state_that_comes_piece_by_piece_may_take_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model over a slow network: only a wait in which nothing comes is one."""
    clock = Clock.begin(monkeypatch)
    given: list[float] = []

    class Slow:
        def recv(self, buffers: list[Any], source: int, tag: int) -> Any:
            buffers[0].copy_(pieces.pop(0))
            return self

        def wait(self, timeout: timedelta) -> None:
            given.append(timeout.total_seconds())
            clock.now += 6.0

    text, _ = pack({"x": torch.ones(3)})
    pieces = [torch.tensor([text.numel()]), text, torch.ones(3).view(torch.uint8)]
    state = donor.receive(Slow(), deadline=Deadline(10.0))  # type: ignore[arg-type]
    assert torch.equal(state["x"], torch.ones(3))
    assert given == [10.0, 10.0, 10.0]


@pytest.mark.parametrize("who", ["another", "this"])
def test_founders_that_have_all_come_are_told_the_late_part(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that too few have come."""
    form = Generations._form
    is_late: list[Membership] = []

    def form_by(self: Generations, view: View) -> None:
        if self.worker not in [member.worker for member in is_late]:
            form(self, view)

    monkeypatch.setattr(Generations, "_form", form_by)
    job = Job(dist.HashStore(), min_workers=2)
    member = Membership(job.store, min_workers=2, timeout=1.5, min_deadline=20.0)
    (other,) = job.start(1)
    job.until(
        lambda: other.membership is not None and bool(other.membership.worker.roster.founders), "the other one came"
    )
    assert other.membership is not None
    is_late.append(other.membership if who == "another" else member)
    name = r"worker 0 \(.*, process \d+\)" if who == "another" else r"worker 1 \(.*, process \d+\), this worker,"
    match = f"job 'job' did not begin within 1.5 s: all 2 workers have come, but .*{name}.* did not connect .* in time"
    with pytest.raises(TimeoutError, match=match):
        GossipDataParallel(model_of(), membership=member)
    is_late.clear()
    job.until_live([other, *job.start(1)])
    close(job.end())

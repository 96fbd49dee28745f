"""A worker whose training ends by an error: the others go on at once, and not when its interpreter has ended."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import GossipDataParallel, Membership
from gossip_modules.membership.liveness.monitor import LivenessMonitor
from tests.library.membership.test_membership import SECONDS, Job, close, member_of, model_of


class Script:
    """Beside another worker: a loop that raises, in a process that goes on; nobody is told, and nothing is closed."""

    def __init__(self, job: Job, kind: type[BaseException], *, has_generator: bool = True) -> None:
        self.job, self.kind, self.has_generator = job, kind, has_generator
        self.member = member_of(job.store, min_workers=2)
        self.wrapper: GossipDataParallel | None = None
        self.error: BaseException | None = None  # with its traceback, as sys.last_exc has it
        self.may_raise, self.may_go_on = threading.Event(), threading.Event()
        self.step = 0
        self.thread = threading.Thread(target=self.run if has_generator else self.train_without_generator, daemon=True)
        self.thread.start()

    def forward(self) -> None:
        assert self.wrapper is not None
        self.wrapper(torch.randn(4, 4)).pow(2).mean().backward()

    def run(self) -> None:
        self.wrapper = GossipDataParallel(model_of(), membership=self.member)
        self.member.track(optimizer=torch.optim.SGD(self.wrapper.parameters(), lr=0.01))
        try:
            for _ in self.member.steps(1 << 30):
                self.forward()
                if self.may_raise.is_set():
                    raise self.kind
        except BaseException as error:  # noqa: BLE001 (as any)
            self.error = error
        self.may_go_on.wait(SECONDS)
        for step in self.member.steps(1 << 30):
            if step >= self.job.last:
                break
            self.forward()
            self.step = step

    def train_without_generator(self) -> None:
        self.wrapper = GossipDataParallel(model_of(), membership=self.member)
        while not self.may_raise.is_set():
            self.forward()
        raise self.kind


def survivor_of(job: Job) -> Any:
    (survivor,) = job.start(1)
    return survivor


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, SystemExit])
def test_an_error_that_leaves_the_loop_lets_the_others_go_on(kind: type[BaseException]) -> None:
    """And a script that catches it joins again, in the next step that it takes."""
    job = Job(dist.HashStore(), min_workers=2)
    survivor = survivor_of(job)
    script = Script(job, kind)
    job.until(lambda: len(survivor.members) == 2 and survivor.step > 5, "they train")
    script.may_raise.set()
    job.until(lambda: len(survivor.members) == 1, "the other one goes on alone")
    assert isinstance(script.error, kind)
    script.may_go_on.set()
    job.until(lambda: len(survivor.members) == 2 and script.step > 0, "it has joined again")
    assert [list(change.left.values()) for change in survivor.changes] == [[], ["its connection closed"], []]
    job.end()
    script.thread.join(SECONDS)
    assert script.wrapper is not None
    script.wrapper.close()
    close([survivor])


def test_an_error_is_known_also_to_a_worker_that_has_not_met_this_one_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new worker may fail before the others have connected with its liveness."""
    connect, may_connect = LivenessMonitor._connect, threading.Event()

    def late(self: LivenessMonitor, peer: Any) -> None:
        if may_connect.is_set():
            connect(self, peer)

    monkeypatch.setattr(LivenessMonitor, "_connect", late)
    job = Job(dist.HashStore(), min_workers=2)
    survivor = survivor_of(job)
    script = Script(job, RuntimeError)
    job.until(lambda: len(survivor.members) == 2 and survivor.step > 1, "they train")
    script.may_raise.set()
    threading.Timer(0.2, may_connect.set).start()
    job.until(lambda: len(survivor.members) == 1, "the other one goes on alone")
    script.may_go_on.set()
    job.until(lambda: len(survivor.members) == 2 and script.step > 0, "it has joined again")
    job.end()
    script.thread.join(SECONDS)
    assert script.wrapper is not None
    script.wrapper.close()
    close([survivor])


def test_break_and_an_error_that_is_caught_in_the_loop_leave_a_worker_a_member() -> None:
    job = Job(dist.HashStore(), min_workers=2)
    survivor = survivor_of(job)
    member = member_of(job.store, min_workers=2)
    wrapper = GossipDataParallel(model_of(), membership=member)
    for step in member.steps(1 << 30):
        wrapper(torch.randn(4, 4)).pow(2).mean().backward()
        if step == 5:
            break
    for step in member.steps(1 << 30):
        wrapper(torch.randn(4, 4)).pow(2).mean().backward()
        try:
            raise RuntimeError("as told")
        except RuntimeError as error:
            kept = error
        if step == 10:
            break
    assert kept is not None
    assert not member.worker.has_stopped
    assert member.worker.liveness is not None
    assert not member.worker.liveness._is_closed.is_set()
    assert len(survivor.changes) == 1
    wrapper.close()
    job.until(lambda: len(survivor.members) == 1, "it has left")
    close(job.end())


def test_an_error_that_nothing_catches_in_a_thread_lets_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `steps`; the hook that was there is called too."""
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: told.append(arguments.exc_type.__name__))
    job = Job(dist.HashStore(), min_workers=2)
    survivor = survivor_of(job)
    script = Script(job, MemoryError, has_generator=False)
    job.until(lambda: len(survivor.members) == 2 and survivor.step > 5, "they train")
    script.may_raise.set()
    job.until(lambda: len(survivor.members) == 1, "the other one goes on alone")
    script.thread.join(SECONDS)
    assert told == ["MemoryError"]
    assert script.wrapper is not None
    script.wrapper.close()
    close(job.end())


@pytest.mark.parametrize("is_interactive", [False, True])
def test_an_error_that_nothing_catches_ends_the_liveness_of_a_process(
    is_interactive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an interactive interpreter it ends nothing."""
    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, place: told.append(kind))
    if is_interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    members: list[Membership] = [worker.membership for worker in workers if worker.membership is not None]
    for worker in workers:
        worker.is_paused.set()
    ended: list[Membership] = []
    monkeypatch.setattr(Membership, "end_liveness", lambda self: ended.append(self))
    sys.excepthook(ValueError, ValueError("as told"), None)
    assert told == [ValueError]
    assert {id(member) for member in members} & {id(member) for member in ended} == (
        set() if is_interactive else {id(member) for member in members}
    )
    for worker in workers:
        worker.is_paused.clear()
        worker.may_go_on.set()
    close(job.end())

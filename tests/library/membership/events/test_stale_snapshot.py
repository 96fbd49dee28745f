"""A store that came back is found by somebody who knows too little before those who train."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gossip_modules import Membership
from gossip_modules.membership.events import event_log
from gossip_modules.membership.view import View
from gossip_modules.transport.deadline import Deadline
from tests.library.membership.events.stores import serve
from tests.library.membership.test_membership import Job, Worker, close


def tell(path: Path, server: dist.TCPStore) -> None:
    """Now those who ask at "file:path" find this store."""
    path.write_text(f"127.0.0.1:{server.port}")


def test_who_was_stopped_does_not_take_the_job_when_the_store_comes_back(tmp_path: Path) -> None:
    """It puts there what it knew, and forms generations alone, before the others, who went on without it, look."""
    address, server = tmp_path / "address", serve()
    tell(address, server)
    job = Job(f"file:{address}", min_workers=3)
    stopped, *others = job.start(3)
    job.until_live(job.workers)
    assert stopped.membership is not None
    stale, first, second = stopped.membership._roster.dumps(), *(w.membership.id for w in others if w.membership)
    stopped.is_killed.set()
    job.until_live(others)
    numbers = others[0].members
    del server
    job.until(lambda: not any(w.membership._log.is_connected for w in others if w.membership), "the store has gone")
    server = serve()
    me = stopped.membership.id
    events: list[dict[str, Any]] = [
        {"event": "accuse", "by": me, "of": worker, "why": "its connection closed", "is_sure": True}
        for worker in (first, second)
    ]
    events.append({"event": "ready", "id": me, "generation": 3, "step": 0, "weight": 1.0})
    for i, event in enumerate(events):
        server.set(f"gossip/job/entry/{i}", json.dumps(event))
    server.add("gossip/job/size", len(events))
    server.compare_set("gossip/job/base", "", json.dumps({"next": 0, "first": 0, "state": stale}))
    tell(address, server)
    job.until(lambda: all(w.membership.generation > 3 for w in others if w.membership), "the others take it back")
    job.until_live(others)
    assert others[0].members == numbers, "they have not joined anew"
    close(job.end())
    del server


def test_a_worker_that_comes_to_an_empty_store_first_joins_the_job(tmp_path: Path) -> None:
    """It founds no job of its own, and those who train restore theirs."""
    address, server = tmp_path / "address", serve()
    tell(address, server)
    job = Job(f"file:{address}", min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    del server
    job.until(lambda: not any(w.membership._log.is_connected for w in workers if w.membership), "the store has gone")
    server = serve()
    assert workers[0].membership is not None
    description = workers[0].membership._roster.description
    member = {"id": 7, "number": -1, "host": "node", "pid": 1, "address": ["127.0.0.1", 9]}
    come = {"event": "come", "member": member, "description": description, "min_workers": 2}
    server.set("gossip/job/entry/0", json.dumps(come))
    server.add("gossip/job/size", 1)
    tell(address, server)
    newcomer, *_ = job.start(1)
    job.until_live([*workers, newcomer])
    assert newcomer.first > 0
    assert all(w.changes[0].generation == 1 and len(w.changes) == 2 for w in workers), "they have never left the job"
    close(job.end())
    del server


@pytest.mark.parametrize("place", ["a founder", "at the door", "with the state"])
def test_who_waits_comes_again_when_the_store_comes_back_empty(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot that restores the store knows nothing of a worker that has no generation yet."""
    monkeypatch.setattr(event_log, "_RECONNECT_SECONDS", 0.05)
    server = serve()
    port = server.port
    job = Job(f"127.0.0.1:{port}", min_workers=2)
    workers = job.start(1 if place == "a founder" else 2)
    newcomer = workers[0]
    if place == "a founder":
        job.until(lambda: newcomer.membership is not None and len(newcomer.membership._roster.founders) == 1, "it came")
    else:
        job.until_live(workers)
        held = {"at the door": "_take_snapshots", "with the state": "_form"}[place]
        monkeypatch.setattr(Membership, held, lambda *_: None)
        (newcomer,) = job.start(1, seed=1)
        workers.append(newcomer)

        def has_come() -> bool:
            member = newcomer.membership
            if member is None or place == "at the door":
                return member is not None and member._is_newcomer
            return member._roster.forming is not None and member._roster.forming.has(member.id)

        job.until(has_come, f"it is {place}")
    del server
    job.until(lambda: not any(w.membership._log.is_connected for w in workers if w.membership), "the store has gone")
    monkeypatch.undo()
    monkeypatch.setattr(event_log, "_RECONNECT_SECONDS", 0.05)
    server = serve(port)
    if place == "a founder":
        job.until(lambda: any(w.membership._log.is_connected for w in workers if w.membership), "it is back")
        workers += job.start(1)
    job.until_live(workers)
    assert (newcomer.first > 0) == (place != "a founder")
    close(job.end())
    del server


@pytest.mark.parametrize("first", ["who trains", "who comes"])
def test_a_generation_that_formed_as_the_store_died_begins_for_a_newcomer_too(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not read that all were ready; the store comes back with that generation, or with the one before."""
    monkeypatch.setattr(event_log, "_RECONNECT_SECONDS", 0.05)
    is_blind = threading.Event()
    is_blind.set()
    read, reconnect = event_log.EventLog.read, event_log.EventLog._reconnect

    def read_by(self: event_log.EventLog, restart: Any, apply: Any) -> bool:
        member = restart.__self__
        return (is_blind.is_set() and member._is_newcomer and bool(member._formed)) or read(self, restart, apply)

    monkeypatch.setattr(event_log.EventLog, "read", read_by)
    server = serve()
    port = server.port
    job = Job(f"127.0.0.1:{port}", min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    (newcomer,) = job.start(1, seed=1)
    members = [w.membership for w in workers if w.membership]
    job.until(lambda: all(len(m._roster.view.members) == 3 for m in members if m._roster.view), "all were ready")
    assert newcomer.membership is not None
    held = [newcomer.membership._log] if first == "who trains" else [member._log for member in members]

    def reconnect_by(self: event_log.EventLog) -> bool:
        return self not in held and reconnect(self)

    monkeypatch.setattr(event_log.EventLog, "_reconnect", reconnect_by)
    del server
    logs = [newcomer.membership._log, *(member._log for member in members)]
    is_blind.clear()
    job.until(lambda: not any(one.is_connected for one in logs), "the store has gone")
    assert newcomer.membership.generation == 0
    server = serve(port)
    job.until(lambda: all(one._has_base for one in logs if one not in held), "the store is restored")
    held.clear()
    job.until_live([*workers, newcomer])
    assert newcomer.first > 0, "it has the state of the job"
    close(job.end())
    del server


def leave_out(job: Job, newcomer: Worker, by: Worker, may_read: threading.Event | None = None) -> None:
    """As if it had not come to form the generation that it is to begin.

    Args:
        job: of both.
        newcomer: at the door, where it does not come.
        by: who says so.
        may_read: is cleared until the newcomer has come again.
    """

    def is_to_begin() -> bool:
        assert by.membership is not None
        forming = by.membership._roster.forming
        return newcomer.membership is not None and forming is not None and forming.has(newcomer.membership.id)

    job.until(is_to_begin, "a generation with it is being formed")
    assert by.membership is not None
    assert newcomer.membership is not None
    roster, me = newcomer.membership._roster, newcomer.membership.id
    number = roster.next_number
    if may_read is not None:
        may_read.clear()
    by.membership._accuse(me, "it did not come to form a generation", may_have_ended=False)
    if may_read is not None:
        job.until(lambda: me in roster.joiners and roster.joiners[me].member.number >= number, "it has come again")
        may_read.set()


@pytest.mark.parametrize("is_read_at_once", [False, True])
def test_who_was_left_out_at_the_door_comes_again(is_read_at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the state of training, and does not come to form its first generation in time, as if it were stopped.

    The same donor may give to it again, also where that reads in one turn that it has gone and that it comes.
    """
    may_read, read = threading.Event(), event_log.EventLog.read
    may_read.set()

    def read_by(self: event_log.EventLog, restart: Any, apply: Any) -> bool:
        return (not may_read.is_set() and restart.__self__._active is not None) or read(self, restart, apply)

    monkeypatch.setattr(event_log.EventLog, "read", read_by)
    form, num_missed = Membership._form, [0]

    def form_by(self: Membership, view: View) -> None:
        if self._active is None and self._is_newcomer and not num_missed[0]:
            num_missed[0] += 1
        else:
            form(self, view)

    monkeypatch.setattr(Membership, "_form", form_by)
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    (newcomer,) = job.start(1, seed=1)
    leave_out(job, newcomer, workers[0], may_read if is_read_at_once else None)
    job.until_live([*workers, newcomer])
    assert num_missed == [1]
    assert newcomer.first > 0
    close(job.end())


def test_who_is_left_out_at_the_door_for_ever_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    form, come = Membership._form, Membership._come_once_more

    def form_by(self: Membership, view: View) -> None:
        if self._active is not None or not self._is_newcomer:
            form(self, view)

    monkeypatch.setattr(Membership, "_form", form_by)
    monkeypatch.setattr(Membership, "_come_once_more", lambda self, _: come(self, Deadline(0.0)))
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    (newcomer,) = job.start(1, seed=1)
    leave_out(job, newcomer, workers[0])
    newcomer.is_killed.set()  # its error is expected
    job.until(lambda: newcomer.error is not None, "it gives up")
    assert isinstance(newcomer.error, TimeoutError)
    expected = r"left this worker out of each generation that it was to begin, for 0 s; see that they reach it at 127"
    assert re.search(expected, str(newcomer.error))
    job.until_live(workers)
    close(job.end())

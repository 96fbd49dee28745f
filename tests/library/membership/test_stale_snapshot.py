"""A store that came back is found by somebody who knows too little before those who train."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist

from gossip_modules import Membership
from gossip_modules.membership import event_log
from tests.library.membership.test_membership import Job, close


def test_who_was_stopped_does_not_take_the_job_when_the_store_comes_back() -> None:
    """It puts there what it knew, and forms generations alone, before the others, who went on without it, look."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    job = Job(f"127.0.0.1:{port}", min_workers=3)
    stopped, *others = job.start(3)
    job.until_live(job.workers)
    assert stopped.membership is not None
    stale, first, second = stopped.membership._roster.dumps(), *(w.membership.id for w in others if w.membership)
    stopped.is_killed.set()
    job.until_live(others)
    numbers = others[0].members
    del server
    job.until(lambda: not any(w.membership._log.is_connected for w in others if w.membership), "the store has gone")
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
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
    job.until(lambda: all(w.membership.generation > 3 for w in others if w.membership), "the others take it back")
    job.until_live(others)
    assert others[0].members == numbers, "they have not joined anew"
    close(job.end())
    del server


def test_a_worker_that_comes_to_an_empty_store_first_joins_the_job() -> None:
    """It founds no job of its own, and those who train restore theirs."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    job = Job(f"127.0.0.1:{port}", min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    del server
    job.until(lambda: not any(w.membership._log.is_connected for w in workers if w.membership), "the store has gone")
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert workers[0].membership is not None
    description = workers[0].membership._roster.description
    member = {"id": 7, "number": -1, "host": "node", "pid": 1, "address": ["127.0.0.1", 9]}
    come = {"event": "come", "member": member, "description": description, "min_workers": 2}
    server.set("gossip/job/entry/0", json.dumps(come))
    server.add("gossip/job/size", 1)
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
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
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
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    if place == "a founder":
        job.until(lambda: any(w.membership._log.is_connected for w in workers if w.membership), "it is back")
        workers += job.start(1)
    job.until_live(workers)
    assert (newcomer.first > 0) == (place != "a founder")
    close(job.end())
    del server

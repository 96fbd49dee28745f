"""A store that came back is found by somebody who knows too little before those who train."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from gossip_modules.membership import shared_roster
from gossip_modules.membership.donor import Donor
from gossip_modules.membership.generations import Generations
from gossip_modules.membership.joining import Joining
from gossip_modules.membership.roster import Roster
from gossip_modules.membership.shared_roster import SharedRoster
from gossip_modules.membership.view import FailureReport, Member, View
from gossip_modules.membership.worker import LocalWorker
from gossip_modules.transport.deadline import Deadline
from tests.library.membership.stores import serve
from tests.library.membership.test_membership import Job, close
from tests.library.membership.test_membership import Worker as Trainer


def tell(path: Path, server: dist.TCPStore) -> None:
    """Now those who ask at "file:path" find this store."""
    path.write_text(f"127.0.0.1:{server.port}")


def test_a_stopped_worker_does_not_take_the_job_when_the_store_comes_back(tmp_path: Path) -> None:
    """It puts there what it knew, and forms generations alone, before the others, who went on without it, look."""
    address, server = tmp_path / "address", serve()
    tell(address, server)
    job = Job(f"file:{address}", min_workers=3)
    stopped, *others = job.start(3)
    job.until_live(job.workers)
    assert stopped.membership is not None
    stale, first, second = stopped.membership.worker.roster.dumps(), *(w.membership.id for w in others if w.membership)
    stopped.is_killed.set()
    job.until_live(others)
    numbers = others[0].members
    del server
    job.until(
        lambda: not any(w.membership.job.store.is_connected for w in others if w.membership), "the store has gone"
    )
    server = serve()
    me = stopped.membership.id
    roster = Roster()
    roster.restore(Roster.loads(stale), me, branch=1)
    for worker in (first, second):
        roster.report(FailureReport(me, worker, "its connection closed", is_sure=True))
    roster.begin(3, {me: (0, 1.0)})
    assert roster.view is not None
    assert roster.view.ids == (me,)
    server.set("gossip/job/roster", roster.dumps())
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
    job.until(
        lambda: not any(w.membership.job.store.is_connected for w in workers if w.membership), "the store has gone"
    )
    server = serve()
    assert workers[0].membership is not None
    description = workers[0].membership.worker.roster.description
    roster = Roster()
    roster.come(Member(7, -1, "node", 1, ("127.0.0.1", 9)), description=description, min_workers=2)
    server.set("gossip/job/roster", roster.dumps())
    tell(address, server)
    newcomer, *_ = job.start(1)
    job.until_live([*workers, newcomer])
    assert newcomer.first > 0
    assert all(w.changes[0].generation == 1 and len(w.changes) == 2 for w in workers), "they have never left the job"
    close(job.end())
    del server


@pytest.mark.parametrize("place", ["a founder", "at the door", "with the state"])
def test_a_waiting_worker_comes_again_when_the_store_comes_back_empty(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot that restores the store knows nothing of a worker that has no generation yet."""
    monkeypatch.setattr(shared_roster, "_RECONNECT_SECONDS", 0.05)
    server = serve()
    port = server.port
    job = Job(f"127.0.0.1:{port}", min_workers=2)
    workers = job.start(1 if place == "a founder" else 2)
    newcomer = workers[0]
    if place == "a founder":
        job.until(
            lambda: newcomer.membership is not None and len(newcomer.membership.worker.roster.founders) == 1, "it came"
        )
    else:
        job.until_live(workers)
        part, held = {"at the door": (Donor, "take_snapshots"), "with the state": (Generations, "_form")}[place]
        monkeypatch.setattr(part, held, lambda *_: None)
        (newcomer,) = job.start(1, seed=1)
        workers.append(newcomer)

        def has_come() -> bool:
            member = newcomer.membership
            if member is None or place == "at the door":
                return member is not None and member.worker.joiner is not None
            return member.worker.roster.forming is not None and member.worker.roster.forming.has(member.id)

        job.until(has_come, f"it is {place}")
    del server
    job.until(
        lambda: not any(w.membership.job.store.is_connected for w in workers if w.membership), "the store has gone"
    )
    monkeypatch.undo()
    monkeypatch.setattr(shared_roster, "_RECONNECT_SECONDS", 0.05)
    server = serve(port)
    if place == "a founder":
        job.until(lambda: any(w.membership.job.store.is_connected for w in workers if w.membership), "it is back")
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
    monkeypatch.setattr(shared_roster, "_RECONNECT_SECONDS", 0.05)
    is_blind = threading.Event()
    is_blind.set()
    take, reconnect = LocalWorker._take, SharedRoster._reconnect

    def take_by(self: LocalWorker, roster: Roster) -> None:
        if not (is_blind.is_set() and self.attempt >= 0 and self.generations.formed):
            take(self, roster)

    monkeypatch.setattr(LocalWorker, "_take", take_by)
    server = serve()
    port = server.port
    job = Job(f"127.0.0.1:{port}", min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    (newcomer,) = job.start(1, seed=1)
    members = [w.membership for w in workers if w.membership]
    job.until(
        lambda: all(len(m.worker.roster.view.members) == 3 for m in members if m.worker.roster.view), "all were ready"
    )
    assert newcomer.membership is not None
    held = [newcomer.membership.job.store] if first == "who trains" else [member.job.store for member in members]

    def reconnect_by(self: SharedRoster, deadline: Deadline) -> bool:
        return self not in held and reconnect(self, deadline)

    monkeypatch.setattr(SharedRoster, "_reconnect", reconnect_by)
    del server
    stores = [newcomer.membership.job.store, *(member.job.store for member in members)]
    job.until(lambda: not any(one.is_connected for one in stores), "the store has gone")
    is_blind.clear()
    assert newcomer.membership.generation == 0
    server = serve(port)
    job.until(lambda: all(one.num_epochs == 2 for one in stores if one not in held), "the store is restored")
    held.clear()
    job.until_live([*workers, newcomer])
    assert newcomer.first > 0, "it has the state of the job"
    close(job.end())
    del server


def leave_out(job: Job, newcomer: Trainer, by: Trainer, may_read: threading.Event | None = None) -> None:
    """As if it had not come to form the generation that it is to begin.

    Args:
        job: of both.
        newcomer: in the join queue, where it does not come.
        by: the worker that reports it.
        may_read: is cleared until the newcomer has come again.
    """

    def is_to_begin() -> bool:
        assert by.membership is not None
        forming = by.membership.worker.roster.forming
        return newcomer.membership is not None and forming is not None and forming.has(newcomer.membership.id)

    job.until(is_to_begin, "a generation with it is being formed")
    assert by.membership is not None
    assert newcomer.membership is not None
    worker, me = newcomer.membership.worker, newcomer.membership.id
    number = worker.roster.next_number
    if may_read is not None:
        may_read.clear()
    by.membership.worker.report(me, "it did not come to form a generation", may_have_ended=False)
    if may_read is not None:
        job.until(lambda: worker.joiner is not None and worker.joiner.member.number >= number, "it has come again")
        may_read.set()


@pytest.mark.parametrize("is_read_at_once", [False, True])
def test_a_worker_that_was_left_out_while_joining_comes_again(
    is_read_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the state of training, and does not come to form its first generation in time, as if it were stopped.

    The same donor may give to it again, also where that reads in one turn that it has gone and that it comes.
    """
    may_read, take = threading.Event(), LocalWorker._take
    may_read.set()

    def take_by(self: LocalWorker, roster: Roster) -> None:
        if may_read.is_set() or self.generations.active is None:
            take(self, roster)

    monkeypatch.setattr(LocalWorker, "_take", take_by)
    form, num_missed = Generations._form, [0]

    def form_by(self: Generations, view: View) -> None:
        if self.active is None and not self.worker.is_founder and not num_missed[0]:
            num_missed[0] += 1
        else:
            form(self, view)

    monkeypatch.setattr(Generations, "_form", form_by)
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    (newcomer,) = job.start(1, seed=1)
    leave_out(job, newcomer, workers[0], may_read if is_read_at_once else None)
    job.until_live([*workers, newcomer])
    assert num_missed == [1]
    assert newcomer.first > 0
    close(job.end())


def test_a_worker_that_is_always_left_out_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    form, enter = Generations._form, Joining.enter

    def form_by(self: Generations, view: View) -> None:
        if self.active is not None or self.worker.is_founder:
            form(self, view)

    monkeypatch.setattr(Generations, "_form", form_by)
    monkeypatch.setattr(Joining, "enter", lambda self, _: enter(self, Deadline(3.0)))
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    (newcomer,) = job.start(1, seed=1)
    leave_out(job, newcomer, workers[0])
    newcomer.is_killed.set()  # its error is expected
    job.until(lambda: newcomer.error is not None, "it gives up")
    assert isinstance(newcomer.error, TimeoutError)
    expected = r"left this worker out of each generation that it was to begin, for 3 s; see that they reach it at 127"
    assert re.search(expected, str(newcomer.error))
    job.until_live(workers)
    close(job.end())

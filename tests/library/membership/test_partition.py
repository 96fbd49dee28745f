"""Workers that reach the store, and nobody else: they train on alone; and jobs that nobody lives in."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch.distributed as dist

from gossip_modules import Membership
from gossip_modules.membership import limits, shared_roster
from gossip_modules.membership import worker as worker_module
from gossip_modules.membership.background_log import log
from gossip_modules.membership.generations import Generations
from gossip_modules.membership.joining import Joining
from gossip_modules.membership.liveness.contact import LifeSign, probe
from gossip_modules.membership.roster import Roster
from gossip_modules.membership.view import FailureReport, Joiner
from gossip_modules.membership.worker import LocalWorker
from gossip_modules.transport.deadline import Deadline
from tests.library.membership.stores import serve
from tests.library.membership.test_membership import Job, Worker, close, die

FORM = Generations._form


def exclude(stopped: Worker, others: list[Worker]) -> None:
    """As if it had been silent for so long that the others go on without it.

    It has reached a listener before: a worker that never has joins again at once, as `LocalWorker._seek` says.
    """
    assert stopped.membership is not None
    liveness = stopped.membership.worker.liveness
    assert liveness is not None
    stopped.job.until(lambda: liveness.has_met, "it reaches another one")
    for worker in others:
        assert worker.membership is not None
        worker.membership.worker.generations.on_silent(stopped.membership.id, 9.0)


@pytest.mark.parametrize("fails", ["nobody in reach", "no donor gives"])
def test_a_minority_trains_on_alone_and_joins_again(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads in the store that the others go on, and cannot reach them; then it can."""
    monkeypatch.setattr(limits, "RETRY", 0.0)
    monkeypatch.setattr(limits, "QUERY", 0.0)
    job = Job(dist.HashStore(), min_workers=3)
    workers = job.start(3)
    job.until_live(workers)
    stopped, *others = workers
    member = stopped.membership
    assert member is not None
    if fails == "nobody in reach":
        monkeypatch.setattr(worker_module, "probe", lambda ids, **_: dict.fromkeys(ids, LifeSign.SILENT))
    else:
        receive = Joining._receive_state

        def times_out(self: Joining, joiner: Joiner, deadline: Deadline) -> Any:
            receive(self, joiner, deadline)
            raise TimeoutError("no donor has given the state of training within 60 s")

        monkeypatch.setattr(Joining, "_receive_state", times_out)
    with caplog.at_level(logging.WARNING, logger="gossip_modules.membership"):
        exclude(stopped, others)
        job.until_live(others)
        job.until(lambda: member.worker.is_cut_off, "it notices that it is alone")
        step = stopped.step
        job.until(lambda: stopped.step > step + 5, "it trains on")
        job.until(
            lambda: member.worker.is_cut_off and member.stats()["live"] == 1, "it is alone, but while it tries to join"
        )
        monkeypatch.setattr(worker_module, "probe", probe)
        if fails != "nobody in reach":
            monkeypatch.undo()
        job.until_live(workers)
        assert log.flush(60.0)
    words = "reaches none of them" if fails == "nobody in reach" else "trains on alone, and tries again"
    assert any(words in record.getMessage() for record in caplog.records)
    close(job.end())


@pytest.mark.parametrize("end", ["the others leave", "a newcomer founds another job"])
def test_the_last_worker_goes_on_as_the_job(
    end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others went on without it, and have ended since: newcomers get its model, and not the other way round."""
    monkeypatch.setattr(limits, "RETRY", 0.0)
    monkeypatch.setattr(limits, "ENDED", 0.1)
    job = Job(dist.HashStore(), min_workers=1)
    workers = job.start(1)
    job.until_live(workers)
    workers += job.start(1)
    job.until_live(workers)
    other, last = workers
    assert last.membership is not None
    assert other.membership is not None
    monkeypatch.setattr(worker_module, "probe", lambda ids, **_: dict.fromkeys(ids, LifeSign.SILENT))
    exclude(last, [other])
    job.until_live([other])
    job.until(lambda: last.membership is not None and last.membership.worker.is_cut_off, "it notices it")
    with caplog.at_level(logging.WARNING, logger="gossip_modules.membership"):
        if end == "the others leave":
            newcomers = []
            other.membership.worker.say(Roster.leave, other.membership.id, why="it left")
        else:
            monkeypatch.setattr(worker_module, "probe", lambda ids, **_: dict.fromkeys(ids, LifeSign.ENDED))
            other.is_killed.set()
            newcomers = job.start(1, seed=1)
        job.until(lambda: not last.membership.worker.is_excluded, "it is a member again")  # type: ignore[union-attr]
        other.is_killed.set()
        monkeypatch.setattr(worker_module, "probe", probe)
        newcomers += job.start(1, seed=1)
        job.until_live([last, *newcomers])
        assert log.flush(60.0)
    assert any("trains on alone as the job: newcomers join it" in r.getMessage() for r in caplog.records)
    assert last.changes[-1].joined, "the newcomers have joined it"
    close(job.end())


def test_a_job_whose_workers_have_all_died_begins_anew_under_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "ENDED", 0.1)
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    for worker in workers:
        worker.is_killed.set()
    for worker in workers:
        worker.thread.join()
    with caplog.at_level(logging.WARNING, logger="gossip_modules.membership"):
        again = job.start(2, seed=1)
        job.until_live(again)
        assert log.flush(60.0)
    assert [worker.first for worker in again] == [0, 0]
    assert any("no worker lives, so it begins anew under this name: worker" in r.getMessage() for r in caplog.records)
    close(job.end())


def test_a_job_is_not_begun_anew_while_a_member_answers_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener of the member that lives is out of reach, and the machines of the others refuse."""
    job = Job(dist.HashStore(), min_workers=3)
    workers = job.start(3)
    job.until_live(workers)
    asked: list[int] = []

    def ended(ids: dict[int, Any], **_: Any) -> dict[int, LifeSign]:
        asked.append(len(ids))
        return dict.fromkeys(ids, LifeSign.ENDED)

    monkeypatch.setattr(worker_module, "probe", ended)
    newcomer, *_ = job.start(1)
    job.until_live([*workers, newcomer])
    assert asked
    assert newcomer.first > 0
    close(job.end())


def test_a_joining_worker_begins_anew_when_the_last_member_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUERY", 0.1)
    store = dist.HashStore()
    (founder,) = Job(store, min_workers=1).start(1)
    founder.job.until_live([founder])
    founder.is_paused.set()  # gives nothing any more
    founder.job.until(lambda: founder.membership is not None and not founder.may_go_on.is_set(), "it stands")
    monkeypatch.setattr(limits, "ENDED", 0.1)
    job = Job(store, min_workers=1)
    (newcomer,) = job.start(1)
    job.until_queued(newcomer)
    founder.is_killed.set()
    assert isinstance(founder.membership, Membership)
    die(founder.membership)
    job.until_live([newcomer])
    assert newcomer.first == 0
    founder.may_go_on.set()
    founder.thread.join()
    close(job.end())


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_living_worker_is_not_taken_for_ended(has_ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those who gave a worker up and closed its connections do not count, and it is the majority."""
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    by_rank = sorted(workers, key=lambda worker: worker.changes[0].rank)
    first, stopped = (worker.membership for worker in by_rank)
    assert first is not None
    assert stopped is not None
    said: list[FailureReport] = []

    def say(event: Any, *arguments: Any, **_: Any) -> None:
        if event is Roster.report:
            said.extend(arguments)

    monkeypatch.setattr(stopped.worker, "say", say)
    if has_ended:
        by_rank[0].is_killed.set()
        by_rank[0].thread.join()
    else:
        stopped.worker.generations.on_ended(first.id)
    job.until(lambda: bool(said), "it reports")
    assert said[0].is_sure == has_ended
    monkeypatch.undo()
    for worker in workers:
        worker.is_killed.set()
    for worker in workers:
        worker.thread.join()


def num_sure(member: Membership, *, by: list[Membership]) -> int:
    """How often these have said that a process has ended; who dies a little later says so of the others too."""
    return sum(a.is_sure and a.by in {m.id for m in by} for a in member.worker.roster.reports)


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_few_go_on_where_most_have_ended(is_forgotten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That their connections closed was seen by nobody, or is forgotten with the store: it is found out anew."""
    monkeypatch.setattr(shared_roster, "_RECONNECT_SECONDS", 0.05)
    server = serve()
    port = server.port
    job = Job(f"127.0.0.1:{port}", min_workers=5)
    workers = job.start(5)
    job.until_live(workers)
    ended, others = workers[:3], workers[3:]
    members = [w.membership for w in others if w.membership]
    with monkeypatch.context() as patch:
        patch.setattr(limits, "RETRY", 1000.0 if is_forgotten else 0.2)
        report = LocalWorker.report
        if is_forgotten:
            patch.setattr(Generations, "_form", lambda *_: None)
        else:
            patch.setattr(LocalWorker, "report", lambda *a, **_: report(*a, may_have_ended=False))
        for w in ended:
            w.is_killed.set()
        if is_forgotten:
            for member in members:
                job.until(lambda m=member: num_sure(m, by=members) == 6, "all know")  # type: ignore[misc]
            del server
            job.until_store_has_gone()
            patch.setattr(Generations, "_form", FORM)
            server = serve(port)
        job.until_live(others)
    (newcomer,) = job.start(1)
    job.until_live([*others, newcomer])
    close(job.end())
    del server

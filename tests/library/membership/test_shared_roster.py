"""SharedRoster: one order of events for all, whatever becomes of the workers and of the store."""

from __future__ import annotations

import json
import re
import threading
from datetime import timedelta
from operator import methodcaller
from typing import Any

import pytest
import torch.distributed as dist

from gossip_modules import Membership
from gossip_modules.membership import shared_roster
from gossip_modules.membership.address import connect_store
from gossip_modules.membership.shared_roster import SharedRoster
from gossip_modules.transport.deadline import Deadline
from gossip_modules.transport.stores import BoundedStore
from tests.library.membership.stores import serve
from tests.library.membership.test_roster import begin, come, ids, job, report
from tests.library.transport.clock import Clock

TIMEOUT = timedelta(seconds=20)
KEY = "gossip/job/roster"


def numbers(shared: SharedRoster) -> list[int]:
    """The founders, in their order."""
    assert shared.update()
    return list(shared.roster.founders)


def test_all_read_the_same_events_in_one_order() -> None:
    store = dist.HashStore()
    first, second = (SharedRoster(store, name="job", timeout=TIMEOUT) for _ in range(2))
    for i, shared in enumerate((first, second, first)):
        assert shared.update([come(i)])
    assert numbers(first) == numbers(second) == [0, 1, 2]
    assert first.roster.dumps() == second.roster.dumps()
    before = first.roster
    assert numbers(first) == [0, 1, 2]
    assert first.roster is before, "nothing has changed"
    assert numbers(SharedRoster(store, name="another job", timeout=TIMEOUT)) == []


def test_no_event_is_lost_where_many_write_at_once() -> None:
    store = dist.HashStore()

    def write(worker: int) -> None:
        shared = SharedRoster(store, name="job", timeout=TIMEOUT)
        for i in range(10):
            assert shared.update([come(10 * worker + i, min_workers=1000)])

    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers(SharedRoster(store, name="job", timeout=TIMEOUT))) == list(range(40))


def test_the_store_holds_one_roster_however_long_the_job_lasts() -> None:
    store = dist.HashStore()
    shared = SharedRoster(store, name="job", timeout=TIMEOUT)
    for _ in range(40):
        assert shared.update([methodcaller("ask", 1)])
    assert store.num_keys() == 3  # epoch, version, roster


def test_a_writer_that_dies_before_it_counts_the_version_up_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Clock.begin(monkeypatch), dist.HashStore()
    monkeypatch.setattr(shared_roster.time, "monotonic", lambda: clock.now)
    reader = SharedRoster(store, name="job", timeout=TIMEOUT)
    assert numbers(reader) == []
    store.set(KEY, job(3).dumps())
    assert reader.update()
    assert reader.roster.view is None
    clock.now += 2.0
    assert reader.update()
    assert ids(reader.roster) == (0, 1, 2)


@pytest.mark.parametrize("garbage", ["not json", "[1, 2]", "3", "{}", "[" * 200_000])
def test_garbage_is_no_roster(garbage: str) -> None:
    store = dist.HashStore()
    shared = SharedRoster(store, name="job", timeout=TIMEOUT)
    store.set(KEY, garbage)
    assert numbers(shared) == []
    assert shared.update([come(1)])
    assert numbers(SharedRoster(store, name="job", timeout=TIMEOUT)) == [1]


@pytest.mark.parametrize("garbage", ["not json", b"\xff\xfe", "{}"])
def test_a_job_that_runs_repairs_its_roster(garbage: str | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose first reader has missed the latest generation."""
    monkeypatch.setattr(shared_roster, "_FRESH_SECONDS", 0.0)
    store = dist.HashStore()
    stale, first, second = (SharedRoster(store, name="job", timeout=TIMEOUT) for _ in range(3))
    assert first.update([come(i, min_workers=3) for i in range(3)])
    assert first.update([begin(range(3), 1, step=0)])
    assert stale.update()
    assert first.update([report(0, 2)])
    assert first.update([begin(range(2), 2, step=5)])
    assert second.update()
    store.set(KEY, garbage)  # type: ignore[arg-type]
    for shared in (stale, first, second):
        assert shared.update()
    assert ids(first.roster) == ids(second.roster) == (0, 1)
    assert stale.update()
    assert stale.roster == second.roster
    store.set(KEY, garbage)  # type: ignore[arg-type]
    assert second.update([come(9)])
    assert list(second.roster.joiners) == [9]
    assert ids(second.roster) == (0, 1)


def others(text: str) -> list[tuple[str, str]]:
    """Rosters of other releases, and what is said of them."""
    value = json.loads(text)
    older = {name: entry for name, entry in value.items() if name not in ("version", "founded", "branch")}
    return [
        (json.dumps({**value, "version": 3}), "roster: got version 3, expected 2"),
        (json.dumps(older), "roster: got version 1, expected 2"),
        (json.dumps({**value, "color": 7}), r"roster: got version 2 with other entries, \['color'\]"),
        ('{"version": "2024.1"}', "roster: got version '2024.1', expected 2"),
    ]


@pytest.mark.parametrize("which", range(4))
def test_a_roster_of_another_format_is_told_and_not_overwritten(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store, logged = Clock.begin(monkeypatch), dist.HashStore(), list[str]()
    monkeypatch.setattr(shared_roster.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(shared_roster.log, "warning", lambda text, *values: logged.append(text % values))
    member, newcomer = (SharedRoster(store, name="job", timeout=TIMEOUT) for _ in range(2))
    member.worker = 0
    assert member.update([*(come(i, min_workers=2) for i in range(2)), begin(range(2), 1, step=0)])
    text, message = others(member.roster.dumps())[which]
    store.set(KEY, text)
    with pytest.raises(
        ValueError, match=f"job 'job' at .*: {message}, .*; start all workers with one release, or give"
    ):
        newcomer.check_format()
    for _ in range(20):
        clock.now += 2.0
        assert not member.update()
        assert not member.update([report(0, 1)])
        assert not newcomer.update([come(9)])
    assert store.get(KEY).decode() == text
    assert len(logged) == 1
    assert re.search(f"{message}.*; this worker trains on, but no other worker can join it", logged[0])
    clock.now += 30.0
    assert not newcomer.update([come(9)])
    assert member.update(), "nobody writes the other one any more"
    assert ids(member.roster) == (0, 1)
    assert newcomer.update([come(9)])
    assert list(newcomer.roster.joiners) == [9]


def test_a_newcomer_gets_an_error_in_a_job_of_another_release() -> None:
    store = dist.HashStore()
    store.set(KEY, '{"version": 3}')
    with pytest.raises(ValueError, match="roster: got version 3, expected 2"):
        Membership(store, min_workers=1, timeout=TIMEOUT)


def test_an_event_whose_reply_is_lost_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_roster, "_RECONNECT_SECONDS", 0.0)
    store = dist.HashStore()
    shared = SharedRoster(store, name="job", timeout=TIMEOUT)
    compare_set = BoundedStore.compare_set
    is_lost: list[bool] = []

    def lose(self: BoundedStore, key: str, *arguments: Any, **options: Any) -> bytes:
        value = compare_set(self, key, *arguments, **options)
        if key == KEY and not is_lost:
            is_lost.append(True)
            raise ConnectionError("Connection reset by peer")
        return value

    monkeypatch.setattr(BoundedStore, "compare_set", lose)
    events = [*(come(i, min_workers=2) for i in range(2)), begin(range(2), 1, step=0), come(9)]
    for i, event in enumerate(events):
        is_lost.clear()
        assert not shared.update([event]), "the reply is lost"
        assert shared.update([event]), f"event {i} is posted again"
    assert ids(shared.roster) == (0, 1)
    assert shared.roster.joiners[9].attempt == 0
    assert shared.roster.next_number == 3


def test_a_store_that_came_back_gets_the_roster() -> None:
    server = serve()
    port = server.port
    shared = SharedRoster(f"127.0.0.1:{port}", name="job", timeout=TIMEOUT)
    assert shared.update([come(i, min_workers=2) for i in range(2)])
    assert shared.roster.forming is not None
    generation = shared.roster.forming.generation
    assert shared.update([begin(range(2), generation, step=0)])
    assert ids(shared.roster) == (0, 1)
    del server
    assert not shared.update([report(0, 1)])
    assert not shared.is_connected
    server = serve(port)
    early = SharedRoster(f"127.0.0.1:{port}", name="job", timeout=TIMEOUT)
    assert early.update([come(8)])  # a worker that comes now, and knows nothing
    assert list(early.roster.founders) == [8]
    shared._last_attempt = 0.0  # it is time to connect again
    assert shared.update()
    assert ids(shared.roster) == (0, 1)
    assert early.update()
    assert ids(early.roster) == (0, 1)
    assert not early.roster.has_place(8)
    assert shared.num_epochs == 2
    del server


def test_a_worker_that_comes_while_the_store_is_started_again_meets_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends between the connection and the answer to the first request."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ask, failures = BoundedStore.compare_set, [ConnectionError("Connection reset by peer")] * 2

    def compare_set(self: BoundedStore, *arguments: Any, **options: Any) -> bytes:
        if failures:
            raise failures.pop()
        return ask(self, *arguments, **options)

    monkeypatch.setattr(BoundedStore, "compare_set", compare_set)
    shared = SharedRoster(f"127.0.0.1:{server.port}", name="job", timeout=TIMEOUT)
    assert not failures
    assert shared.num_epochs == 1
    assert shared.update([come(1)])
    failures.append(ConnectionError("Connection reset by peer"))
    client = connect_store(f"127.0.0.1:{server.port}", TIMEOUT)
    monkeypatch.setattr(shared_roster, "connect_store", lambda *_, **__: client)  # in the time that is left it may fail
    with pytest.raises(ConnectionError, match="reset by peer"):
        SharedRoster(f"127.0.0.1:{server.port}", name="job", timeout=timedelta(0))


def test_a_worker_that_leaves_waits_shortly_for_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watcher may be waiting for the store then, for as long as a request may take."""
    server = serve()
    shared = SharedRoster(f"127.0.0.1:{server.port}", name="job", timeout=timedelta(days=1))
    del server
    assert not shared.update([come(1)])
    Clock.begin(monkeypatch)
    given: list[float] = []

    def away(*_: Any, deadline: Deadline, **__: Any) -> dist.Store:
        given.append(deadline.left)
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(shared_roster, "connect_store", away)
    for is_last in (False, True):
        shared._last_attempt = 0.0  # it is time to connect again
        assert not shared.update([report(0, 1)], is_last=is_last)
    assert given == [timedelta(days=1).total_seconds(), 1.0]
    monkeypatch.undo()
    monkeypatch.setattr(shared_roster, "_LEAVE_SECONDS", 0.1)
    with shared._updating:
        assert not shared.update([report(0, 1)], is_last=True)


def test_the_requests_of_one_update_share_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close()` makes it in the training thread: a store that answers late, twice, would hold it up for two."""
    shared, clock = SharedRoster(dist.HashStore(), name="job", timeout=timedelta(seconds=10)), Clock.begin(monkeypatch)
    given: list[float] = []

    class Late:
        def compare_set(self, key: str, expected: str, value: str, *, timeout: timedelta, **_: Any) -> bytes:
            self.add(timeout=timeout)
            return value.encode()

        def add(self, *_: Any, timeout: timedelta, **__: Any) -> int:
            given.append(timeout.total_seconds())
            clock.now += 0.6 * given[-1]
            return 1

    shared._store = Late()  # type: ignore[assignment]
    assert shared.update([come(1)])
    assert given == pytest.approx([10.0, 4.0])


def test_a_writer_that_others_are_always_ahead_of_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedRoster(dist.HashStore(), name="job", timeout=timedelta(seconds=0.1))
    rosters = [job(2).dumps(), job(3).dumps()]

    def compare_set(*_: Any, **__: Any) -> bytes:
        rosters.reverse()
        return rosters[0].encode()

    monkeypatch.setattr(BoundedStore, "compare_set", compare_set)
    assert not shared.update([come(9)])


def test_a_worker_that_has_come_to_an_exchange_is_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the exchange ends, workers take their values back, and would be taken for absent."""
    store = dist.HashStore()
    first, second = (SharedRoster(store, name="job", timeout=TIMEOUT) for _ in range(2))
    looks, has_left, late = 0, threading.Event(), list[list[int]]()
    missing = first.missing

    def look(name: str, workers: Any) -> list[int]:
        nonlocal looks
        looks += 1
        found = missing(name, workers)
        if looks == 1:  # half-way; the second worker leaves after it, and before the look at the end
            is_over.set()
            assert has_left.wait(TIMEOUT.total_seconds())
        return found

    monkeypatch.setattr(first, "missing", look)
    is_over = threading.Event()

    def come_and_leave() -> None:
        with pytest.raises(RuntimeError, match="was ended before all had come"):
            second.gather("meeting", 1, "here", [0, 1, 2], is_void=is_over.is_set)
        has_left.set()

    other = threading.Thread(target=come_and_leave)
    other.start()
    while missing("meeting", [1]):
        assert other.is_alive()
    with pytest.raises(RuntimeError, match="was ended before all had come"):
        first.gather("meeting", 0, "here", [0, 1, 2], is_void=lambda: bool(late), on_late=late.append, patience=0.1)
    other.join()
    assert late == [[2]]

"""EventLog: one order of events for all, whatever becomes of those who write them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gossip_modules.membership import limits
from gossip_modules.membership.events import event_log
from gossip_modules.membership.events.event_log import EventLog
from gossip_modules.membership.liveness.address import connect_store
from gossip_modules.transport.deadline import Deadline
from gossip_modules.transport.stores import BoundedStore
from tests.library.membership.events.stores import serve

TIMEOUT = timedelta(seconds=20)


def read(log: EventLog) -> list[Mapping[str, Any]]:
    events: list[Mapping[str, Any]] = []
    assert log.read(lambda state, _: events.append({"snapshot": state}), events.append)
    return events


def test_all_read_the_same_events_in_one_order() -> None:
    store = dist.HashStore()
    first, second = (EventLog(store, name="job", timeout=TIMEOUT) for _ in range(2))
    for i, log in enumerate((first, second, first)):
        assert log.append({"event": "come", "i": i})
    assert [event["i"] for event in read(first)] == [0, 1, 2]
    assert [event["i"] for event in read(second)] == [0, 1, 2]
    assert read(first) == []
    assert read(EventLog(store, name="another job", timeout=TIMEOUT)) == []


def test_an_entry_that_was_never_written_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer died between taking the number and writing."""
    monkeypatch.setattr(event_log, "_HOLE_SECONDS", 0.0)
    store = dist.HashStore()
    log = EventLog(store, name="job", timeout=TIMEOUT)
    store.add("gossip/job/size", 1)
    assert log.append({"i": 1})
    assert [event.get("i") for event in read(log)] == [None, 1]


def test_who_was_too_late_writes_again() -> None:
    store = dist.HashStore()
    log = EventLog(store, name="job", timeout=TIMEOUT)
    store.set("gossip/job/entry/0", "{}")  # declared void by a reader
    assert log.append({"i": 1})
    assert [event.get("i") for event in read(log)] == [None, 1]


@pytest.mark.parametrize("garbage", [b"not json", b"[1, 2]", b"\xff\xfe", b"3", b"[" * 200_000])
def test_garbage_is_no_event(garbage: bytes) -> None:
    store = dist.HashStore()
    log = EventLog(store, name="job", timeout=TIMEOUT)
    store.add("gossip/job/size", 1)
    store.set("gossip/job/entry/0", garbage.decode("latin1"))
    assert log.append({"i": 1})
    assert read(log) == [{"i": 1}]


def test_a_store_that_came_back_begins_with_the_snapshot() -> None:
    server = serve()
    port = server.port
    log = EventLog(f"127.0.0.1:{port}", name="job", timeout=TIMEOUT)
    assert log.append({"i": 0})
    assert read(log) == [{"i": 0}]
    del server
    assert not log.append({"i": 1})
    assert not log.is_connected
    server = serve(port)
    early = EventLog(f"127.0.0.1:{port}", name="job", timeout=TIMEOUT)
    assert early.append({"i": "early"})  # a worker that comes now, and knows nothing
    early.restore("nothing")
    assert read(early) == [{"i": "early"}]
    log._last_attempt = 0.0  # it is time to connect again
    assert read(log) == []
    assert log.is_anew
    log.restore("what was")
    assert log.append({"i": 1})
    events = [{"snapshot": "what was"}, {"i": "early"}, {"i": 1}]
    assert read(log) == events
    assert read(early) == events
    assert not log.is_anew
    other = EventLog(f"127.0.0.1:{port}", name="job", timeout=TIMEOUT)
    other.restore("another state, too late")
    assert read(other) == events
    del server


def test_a_log_is_cut_and_all_read_on_from_what_it_amounts_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_EVENTS", 4)
    store = dist.HashStore()
    writer, reader = (EventLog(store, name="job", timeout=TIMEOUT) for _ in range(2))
    keys = []
    for i in range(40):
        assert writer.append({"i": i})
        read(writer)
        if writer.is_long():
            writer.cut(f"all before {i + 1}")
        keys.append(store.num_keys())
    assert max(keys) == max(keys[:20]) < 3 + 8 + 1  # epoch, size, base; entries
    assert [event.get("i", event.get("snapshot")) for event in read(reader)] == ["all before 40"]
    assert writer.append({"i": 40})
    assert read(reader) == read(writer) == [{"i": 40}]


def test_a_reader_that_falls_behind_goes_on_from_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_EVENTS", 2)
    store = dist.HashStore()
    writer, reader = (EventLog(store, name="job", timeout=TIMEOUT) for _ in range(2))
    assert writer.append({"i": 0})
    assert read(reader) == [{"i": 0}]
    for i in range(1, 8):
        assert writer.append({"i": i})
        read(writer)
        if writer.is_long():
            writer.cut(f"all before {i + 1}")
    assert [event.get("i", event.get("snapshot")) for event in read(reader)] == ["all before 8"]
    reader.cut("another state, too early")
    assert read(EventLog(store, name="job", timeout=TIMEOUT)) == [{"snapshot": "all before 8"}]


def test_who_writes_where_an_entry_was_deleted_writes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still between taking a number and writing, while readers declared the entry void and cut the log."""
    monkeypatch.setattr(limits, "LOG_EVENTS", 1)
    monkeypatch.setattr(event_log, "_HOLE_SECONDS", 0.0)
    store = dist.HashStore()
    slow, other = (EventLog(store, name="job", timeout=TIMEOUT) for _ in range(2))
    write = slow._set_once

    def late(key: str, value: str, deadline: Deadline | None = None) -> str:
        monkeypatch.setattr(slow, "_set_once", write)
        for i in range(3):
            assert other.append({"i": i})
            read(other)
            other.cut(f"{i + 1} events")
        return write(key, value, deadline)

    monkeypatch.setattr(slow, "_set_once", late)
    assert slow.append({"i": "late"})
    assert {"i": "late"} in read(other)


@pytest.mark.parametrize("garbage", ["[3]", '{"next": 1e999, "first": 0, "state": ""}', "[" * 200_000])
def test_garbage_for_a_base_is_none(garbage: str) -> None:
    store = dist.HashStore()
    log = EventLog(store, name="job", timeout=TIMEOUT)
    store.set("gossip/job/base", garbage)
    assert log.append({"i": 0})
    assert read(log) == [{"i": 0}]


def test_who_comes_while_the_store_is_started_again_meets_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends between the connection and the answer to the first request."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ask, failures = BoundedStore.compare_set, [ConnectionError("Connection reset by peer")] * 2

    def compare_set(self: BoundedStore, *arguments: Any, **options: Any) -> bytes:
        if failures:
            raise failures.pop()
        return ask(self, *arguments, **options)

    monkeypatch.setattr(BoundedStore, "compare_set", compare_set)
    log = EventLog(f"127.0.0.1:{server.port}", name="job", timeout=TIMEOUT)
    assert not failures
    assert log.num_lives == 1
    assert log.append({"i": 1})
    failures.append(ConnectionError("Connection reset by peer"))
    client = connect_store(f"127.0.0.1:{server.port}", TIMEOUT)
    monkeypatch.setattr(event_log, "connect_store", lambda *_, **__: client)  # in the time that is left it may fail
    with pytest.raises(ConnectionError, match="reset by peer"):
        EventLog(f"127.0.0.1:{server.port}", name="job", timeout=timedelta(0))

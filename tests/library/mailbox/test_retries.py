"""Tries that fail are repeated until the deadline, and lost answers change nothing."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from gossip_modules.mailbox.errors import MailboxError, Permanent, Unavailable
from gossip_modules.mailbox.medium import Medium, open_medium
from gossip_modules.membership.background_log import log
from gossip_modules.testing.storm import StormyMedium
from tests.library.mailbox.clock import InstantClock

KEY = b"the key of the job"


def memory(name: str, *, timeout: float = 30.0, seed: int = 0, clock: InstantClock | None = None) -> Medium:
    return open_medium(f"memory://{name}", timeout=timeout, key=KEY, seed=seed, clock=clock or InstantClock())


def stormy(seed: int, *, name: str = "", timeout: float = 30.0, **faults: Any) -> StormyMedium:
    return StormyMedium(memory(name or uuid.uuid4().hex, timeout=timeout), seed, **faults)


@pytest.mark.parametrize("seed", range(5))
def test_objects_are_created_once_although_answers_are_lost(seed: int) -> None:
    medium = stormy(seed, loss=0.3, unavailable=0.2, timeout=1e6)
    for i in range(100):
        assert medium.create(f"a/{i}", b"%d" % i)
        assert not medium.create(f"a/{i}", b"other")
        assert medium.get(f"a/{i}", max_bytes=9) == b"%d" % i
    assert medium.counts.retries > 100
    assert medium.counts.refused == 0


def test_one_of_many_threads_creates_in_a_storm(address: str) -> None:
    results: dict[int, list[bool]] = {}
    inner = [open_medium(address, timeout=1e6, key=KEY, clock=InstantClock()) for _ in range(4)]
    media = [StormyMedium(inner[i], i, loss=0.2, unavailable=0.2, stale=0.3, delay=0.1) for i in range(4)]

    def create_all(i: int) -> None:
        results[i] = [media[i].create(f"race/{k}", b"%d" % i) for k in range(4)]

    threads = [threading.Thread(target=create_all, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        winners = [i for i in range(4) if results[i][k]]
        assert [inner[0].get(f"race/{k}", max_bytes=1)] == [b"%d" % i for i in winners]


def test_a_second_try_waits_for_its_own_object_to_be_seen() -> None:
    """The first answer is lost, and reads are stale: the object is neither taken for another one's nor for absent."""
    medium = stormy(0, loss=0.5, stale=0.9, stale_seconds=5.0, timeout=1e6)
    for i in range(30):
        assert medium.create(f"a/{i}", b"mine")


@pytest.mark.parametrize("call", ["create", "put", "get", "list", "delete"])
def test_an_outage_beyond_the_timeout_is_an_error(call: str) -> None:
    medium = stormy(0, timeout=8.0, outage=[(0.0, 1e9)])
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: medium.create("a", b""),
        "put": lambda: medium.put("a", b""),
        "get": lambda: medium.get("a", max_bytes=1),
        "list": lambda: medium.list("a"),
        "delete": lambda: medium.delete(["a"]),
    }
    with pytest.raises(
        Unavailable,
        match=rf"{call} 'a' in memory://\w+ failed after 8.0 s, \d+ tries: an outage; see whether .* longer timeout",
    ):
        calls[call]()
    assert medium.clock.now() == pytest.approx(8.0)
    assert medium.counts.retries > 3


@pytest.mark.parametrize(("deadline", "seconds"), [(2.0, 2.0), (-1.0, 0.0)])
def test_a_call_ends_at_its_deadline(deadline: float, seconds: float) -> None:
    medium = stormy(0, timeout=99.0, outage=[(0.0, 1e9)])
    with pytest.raises(Unavailable, match=rf"failed after {seconds} s"):
        medium.put("a", b"", deadline=deadline)
    assert medium.clock.now() == pytest.approx(seconds)


def test_an_outage_is_logged_once_with_its_end(caplog: pytest.LogCaptureFixture) -> None:
    medium = stormy(0, outage=[(0.0, 6.0)])
    assert log.flush(30.0)  # of other tests
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="gossip_modules.membership"):
        medium.put("a", b"")
        medium.put("b", b"")
        assert log.flush(30.0)
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"put 'a' in {medium.address} failed after 0.")
    assert first.endswith("s, 2 tries: an outage; it is tried again until its deadline")
    assert last.startswith(f"{medium.address} answers again, after ")
    assert medium.counts.writes == 2


def test_pauses_grow_to_five_seconds_and_differ_between_workers() -> None:
    pauses = []
    for seed in range(2):
        clock = InstantClock()
        medium = StormyMedium(memory("pauses", timeout=60.0, clock=clock), seed, outage=[(0.0, 1e9)])
        with pytest.raises(Unavailable):
            medium.list("a")
        pauses.append(clock.sleeps)
        for k, pause in enumerate(clock.sleeps[:-1]):
            longest = min(0.1 * 2**k, 5.0)
            assert longest / 2 <= pause <= longest
    assert pauses[0] != pauses[1]


def test_a_refusal_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    medium, tries = memory("refuses"), []

    def refuse(path: str, data: bytes) -> None:
        tries.append(path)
        raise Permanent("the disk is full", remedy="make room")

    monkeypatch.setattr(medium, "_put", refuse)
    with pytest.raises(
        MailboxError, match=r"put 'a' in memory://refuses .* 1 try: the disk is full; make room"
    ) as caught:
        medium.put("a", b"")
    assert not isinstance(caught.value, Unavailable)
    assert tries == ["a"]


def test_after_close_no_try_follows() -> None:
    medium = stormy(0, outage=[(0.0, 1e9)])
    medium.close()
    medium.close()
    with pytest.raises(Unavailable, match=r"failed after 0.0 s, 1 try"):
        medium.put("a", b"")

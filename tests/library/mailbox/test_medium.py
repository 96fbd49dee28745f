"""The contract of stores of objects, over each kind."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossip_modules.mailbox.errors import MailboxError
from gossip_modules.mailbox.medium import Medium, open_medium

KEY = b"the key of the job"


@pytest.fixture
def medium(address: str) -> Iterator[Medium]:
    medium = open_medium(address, timeout=5.0, key=KEY)
    yield medium
    medium.close()


def test_an_object_is_created_once(medium: Medium) -> None:
    assert medium.create("round/1/close", b"first")
    assert not medium.create("round/1/close", b"second")
    assert medium.get("round/1/close", max_bytes=5) == b"first"
    assert (medium.counts.writes, medium.counts.reads, medium.counts.refused) == (2, 1, 0)


def test_one_of_many_threads_creates(address: str) -> None:
    media = [open_medium(address, timeout=5.0, key=KEY, seed=i) for i in range(8)]
    results: dict[int, list[bool]] = {}

    def create_all(i: int) -> None:
        results[i] = [media[i].create(f"race/{k}", str(i).encode()) for k in range(10)]

    threads = [threading.Thread(target=create_all, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(10):
        winners = [i for i in range(8) if results[i][k]]
        assert len(winners) == 1
        assert media[0].get(f"race/{k}", max_bytes=1) == str(winners[0]).encode()


def test_put_replaces(medium: Medium) -> None:
    tags = []
    for content in (b"1", b"2"):
        medium.put("worker/a/beat", content)
        assert medium.get("worker/a/beat", max_bytes=9) == content
        tags.append(medium.list("worker")["worker/a/beat"])
    assert tags[0] != tags[1]
    assert medium.list("worker/a/") == {"worker/a/beat": tags[1]}


def test_list_is_by_whole_parts(medium: Medium) -> None:
    for path in ("a/b/c", "a/bc/d", "a/b/d"):
        medium.create(path, b"")
    assert set(medium.list("a/b")) == {"a/b/c", "a/b/d"}
    assert set(medium.list()) == {"a/b/c", "a/b/d", "a/bc/d"}
    assert medium.list("nothing") == {}


def test_a_list_has_sizes_and_times_in_order(medium: Medium) -> None:
    for path, size in (("a/b", 10), ("a/c", 20)):
        medium.create(path, b"x" * size)
    first, second = medium.list("a")["a/b"], medium.list("a")["a/c"]
    assert second.num_bytes - first.num_bytes == 10
    assert medium.counts.bytes_written == first.num_bytes + second.num_bytes
    assert math.isnan(first.time) or first.time <= second.time


def test_deleted_objects_are_gone(medium: Medium) -> None:
    medium.create("a/b", b"x")
    medium.create("a/c", b"x")
    medium.delete(["a/b", "a/never"])
    assert set(medium.list("a")) == {"a/c"}
    assert medium.get("a/b", max_bytes=9) is None
    medium.delete(["a/c"])
    assert medium.create("a/b", b"y")


def test_reads_are_bounded(medium: Medium) -> None:
    medium.create("a", b"x" * 100)
    assert medium.get("a", max_bytes=100) == b"x" * 100
    assert medium.get("a", max_bytes=99) is None
    assert medium.counts.refused == 1


def test_a_store_that_keeps_the_first_object_is_accepted(medium: Medium) -> None:
    medium.check()
    assert medium.list() == {}


def test_a_store_that_replaces_objects_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    medium = open_medium("memory://replaces", timeout=5.0, key=KEY)
    monkeypatch.setattr(medium, "_create", lambda path, data: medium._put(path, data) is None)
    with pytest.raises(MailboxError, match=r"memory://replaces lets a second writer replace .*If-None-Match"):
        medium.check()


@pytest.mark.parametrize("address", ["", "run", "s3://", "s4://bucket", "file://run", "file:///", "store://h/run"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=rf"got the address '{address}', expected s3://bucket/run, .* or memory://run"):
        open_medium(address, timeout=5.0, key=KEY)


def test_a_missing_key_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossip_modules.mailbox.medium._warned", set())
    with pytest.warns(UserWarning, match=r"got no key for file://.*anyone with write .*; set GOSSIP_JOB_KEY"):
        open_medium(f"file://{tmp_path}/a", timeout=5.0)
    open_medium(f"file://{tmp_path}/b", timeout=5.0)


def test_a_missing_obstore_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        ImportError, match=r"s3://b/run needs .*; in a clone: pip install '\.\[mailbox\]' .*Python 3.11"
    ):
        open_medium("s3://b/run", timeout=5.0, key=KEY)


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "a/../b", ".a", "a/.b", "a b", "a\n", "a\0b", "ä"])
def test_paths_are_checked(medium: Medium, path: str) -> None:
    with pytest.raises(ValueError, match=r"got the path .*expected parts of letters"):
        medium.create(path, b"")

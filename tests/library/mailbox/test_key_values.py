"""Objects in a key-value store of torch.distributed: its keys, its connections, and foreign entries."""

from __future__ import annotations

import uuid

import pytest
import torch.distributed as dist

from gossip_modules.mailbox.errors import MailboxError, Unavailable
from gossip_modules.mailbox.key_values import StoreMedium, connected
from gossip_modules.mailbox.medium import Medium, open_medium
from gossip_modules.mailbox.sealed import Seal
from gossip_modules.transport.stores import BoundedStore
from tests.library.mailbox.clock import InstantClock

KEY = b"the key of the job"


@pytest.fixture
def store(server_store: dist.TCPStore) -> dist.Store:
    return dist.PrefixStore(uuid.uuid4().hex, server_store)


def opened(store: dist.Store) -> Medium:
    return open_medium(store, timeout=5.0, key=KEY, clock=InstantClock())


def test_a_large_object_arrives_in_chunks(store: dist.Store) -> None:
    medium, data = opened(store), bytes(range(256)) * (9 << 12)  # 9 MiB: a TCPStore takes 8
    assert medium.create("a", data)
    assert medium.get("a", max_bytes=len(data)) == data
    assert len(store.list_keys()) == 1 + 3
    medium.delete(["a"])
    assert store.list_keys() == []


def test_another_store_of_torch_will_do() -> None:
    medium = opened(dist.HashStore())
    assert medium.create("a/b", b"\0\xff")
    assert not medium.create("a/b", b"other")
    assert medium.get("a/b", max_bytes=9) == b"\0\xff"
    assert set(medium.list()) == {"a/b"}


def test_nothing_is_left_of_losers_and_replaced_objects(store: dist.Store) -> None:
    medium = opened(store)
    medium.create("a", b"first")
    medium.create("a", b"second")
    for i in range(5):
        medium.put("beat", b"%d" % i)
    assert len(store.list_keys()) == 4


def test_a_loser_that_has_seen_no_object_leaves_nothing(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both writers look before either has written its entry."""
    medium = opened(store)
    medium.create("a", b"first")
    monkeypatch.setattr(BoundedStore, "check", lambda self, key, **options: False)
    assert not medium.create("a", b"second")
    assert medium.get("a", max_bytes=9) == b"first"
    assert len(store.list_keys()) == 2


@pytest.mark.parametrize("entry", ["", "5", "x y", "5 " + "0" * 31, "-1 " + "0" * 32, "9" * 40 + " " + "0" * 32])
def test_foreign_entries_are_refused(store: dist.Store, entry: str) -> None:
    medium = opened(store)
    store.set("gossip_mailbox/entry:a", entry)
    assert medium.get("a", max_bytes=99) is None
    assert medium.counts.refused == 1
    medium.delete(["a"])
    assert medium.list() == {}


def test_an_entry_without_its_content_is_refused(store: dist.Store) -> None:
    medium = opened(store)
    store.set("gossip_mailbox/entry:a", f"50 {'0' * 32}")
    assert medium.get("a", max_bytes=99) is None
    assert medium.counts.refused == 1


def test_an_object_that_is_replaced_while_it_is_read_is_read_again(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium, other = opened(store), opened(store)
    other.put("a", b"old")
    reads = list[str]()
    keys = StoreMedium.__module__ + "._chunk_keys"

    def replaced(size: int, token: str) -> list[str]:
        if not reads:
            reads.append(token)
            monkeypatch.undo()
            other.put("a", b"new")
        return [f"content:{token}:{start}" for start in range(0, size, 4 << 20)]

    monkeypatch.setattr(keys, replaced)
    assert medium.get("a", max_bytes=9) == b"new"
    assert (medium.counts.retries, medium.counts.refused) == (1, 0)


def test_a_failed_connection_is_made_anew(store: dist.Store) -> None:
    connects = []

    def connect() -> dist.Store:
        connects.append(0)
        if len(connects) in (1, 3):
            raise dist.DistNetworkError("reset by peer")
        return store

    medium = StoreMedium(connect, "store://h:1", timeout=5.0, clock=InstantClock(), seal=Seal(KEY))
    assert len(connects) == 2
    medium._connected = None
    medium.put("a", b"x")
    assert len(connects) == 4


def test_a_store_that_is_away_is_unavailable() -> None:
    def connect() -> dist.Store:
        raise dist.DistNetworkError("connection refused")

    with pytest.raises(Unavailable, match=r"open '' in store://h:1 failed after 5.0 s, \d+ tries: connection refused"):
        StoreMedium(connect, "store://h:1", timeout=5.0, clock=InstantClock(), seal=Seal(KEY))


def test_a_torch_without_the_list_of_keys_is_an_error(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> None:
    monkeypatch.delattr(dist.Store, "list_keys")
    with pytest.raises(MailboxError, match=r"torch .* cannot list the keys of a store; update torch"):
        opened(store)


def test_a_client_gives_up_in_time() -> None:
    """Nobody listens at this port."""
    with pytest.raises(dist.DistError):
        connected("127.0.0.1", 9, 0.2)

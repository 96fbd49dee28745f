"""Objects in a key-value store of torch.distributed, such as torchrun's."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..transport.stores import BoundedStore
from .base import Listed, Medium
from .errors import Permanent, Transient

_CHUNK = 4 << 20  # bytes; a TCPStore takes 8 MiB
_CONNECT = 3.0  # seconds; torch waits for about twice as long
_ENTRY = re.compile(rb"(\d{1,15}) ([0-9a-f]{32})")


def connected(host: str, port: int, timeout: float) -> dist.Store:
    """A new client of the TCPStore at this address."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=min(timeout, _CONNECT))
    )


class StoreMedium(Medium):
    """Objects in a key-value store of torch.distributed.

    [Note: objects in a key-value store] The content of an object stands in chunks under a token of its own, and the
    entry of the path has its size and that token. The entry is written last and read first: `compare_set` decides
    which worker creates an object, and its size is known before it is read. The objects are in the memory of the
    store's process, and end with it.

    Args:
        connect: returns the store; called again after a connection has failed.
        address: see `Medium`.
        prefix: stands in front of all keys.
        options: see `Medium`.
    """

    errors = (ConnectionError, dist.DistError)

    def __init__(self, connect: Callable[[], dist.Store], address: str, *, prefix: str = "", **options: Any) -> None:
        super().__init__(address, **options)
        self._connect, self._prefix = connect, f"gossip_mailbox/{prefix}".rstrip("/")
        self._connected: BoundedStore | None = None
        self._repeat("open", "", lambda is_retry: self._store.check("open", what="a first request"), None)

    @property
    def _store(self) -> BoundedStore:
        """The store, over a new connection if the last one has failed."""
        if (store := self._connected) is None:
            prefixed = dist.PrefixStore(self._prefix, self._connect())
            if not hasattr(prefixed, "list_keys"):
                raise Permanent(f"torch {torch.__version__} cannot list the keys of a store", remedy="update torch")
            store = self._connected = BoundedStore(prefixed, timeout=timedelta(seconds=self.timeout))
        return store

    def _failure(self, error: Exception) -> Transient:
        self._connected = None
        return Transient(error)

    def _create(self, path: str, data: bytes) -> bool:
        store = self._store
        if store.check(_entry_key(path), what=path):
            return False
        entry = _write(store, data)
        found = store.compare_set(_entry_key(path), "", entry, what=path)
        if found != entry.encode():
            _drop(store, entry.encode())
        return found == entry.encode()

    def _put(self, path: str, data: bytes) -> None:
        store = self._store
        entry = _write(store, data)
        old = store.get(_entry_key(path), what=path)
        store.set(_entry_key(path), entry, what=path)
        _drop(store, old)

    def _get(self, path: str, max_bytes: int) -> bytes | None:
        store = self._store
        entry = store.get(_entry_key(path), what=path)
        if entry is None:
            return None
        size, token = _parsed(entry)
        if size > max_bytes:
            return b""
        chunks = [store.get(key, what=path) for key in _chunk_keys(size, token)]
        if None in chunks and store.get(_entry_key(path), what=path) != entry:
            raise Transient("it was replaced while it was read")
        return b"".join(chunk or b"" for chunk in chunks)

    def _list(self, prefix: str) -> dict[str, Listed]:
        store, start = self._store, _entry_key(f"{prefix}/" if prefix else "")
        keys = [key for key in store.keys(what=prefix) if key.startswith(start)]
        found = {key.removeprefix(_entry_key("")): store.get(key, what=key) for key in keys}
        return {path: Listed(str(entry), _parsed(entry)[0]) for path, entry in found.items() if entry is not None}

    def _delete(self, paths: Iterable[str]) -> None:
        store = self._store
        for path in paths:
            entry = store.get(_entry_key(path), what=path)
            store.delete(_entry_key(path), what=path)
            _drop(store, entry)


def _entry_key(path: str) -> str:
    return f"entry:{path}"


def _parsed(entry: bytes | None) -> tuple[int, str]:
    """The size and the token of an entry. An entry of another form has no content, which no seal opens."""
    found = _ENTRY.fullmatch(entry or b"")
    return (int(found[1]), found[2].decode()) if found else (0, "")


def _chunk_keys(size: int, token: str) -> list[str]:
    return [f"content:{token}:{start}" for start in range(0, size, _CHUNK)]


def _write(store: BoundedStore, data: bytes) -> str:
    """Write a content; returns its entry."""
    token = uuid.uuid4().hex
    for i, key in enumerate(_chunk_keys(len(data), token)):
        store.set(key, data[i * _CHUNK : (i + 1) * _CHUNK], what=key)
    return f"{len(data)} {token}"


def _drop(store: BoundedStore, entry: bytes | None) -> None:
    """Delete the content of an entry."""
    for key in _chunk_keys(*_parsed(entry)):
        store.delete(key, what=key)

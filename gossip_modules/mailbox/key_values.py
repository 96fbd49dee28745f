"""Objects in a key-value store of torch.distributed, such as torchrun's."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..transport.stores import BoundedStore
from .base import Listed, Medium
from .errors import Permanent, TooLarge, Transient

T = TypeVar("T")
_CHUNK = 4 << 20  # bytes; a TCPStore takes 8 MiB
_ENTRY = re.compile(rb"(\d{1,15}) ([0-9a-f]{32})")


def connected(host: str, port: int, timeout: float) -> dist.Store:
    """A new client of the TCPStore at this address."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=min(timeout, 10.0))
    )


class StoreMedium(Medium):
    """Objects in a key-value store of torch.distributed.

    [Note: objects in a key-value store] The content of an object stands in chunks under a token of its own, and the
    entry of the path has its size and that token. The entry is written last and read first: `compare_set` decides who
    creates an object, and its size is known before it is read. The objects are in the memory of the store's process,
    and end with it.

    Args:
        connect: returns the store; called again after a connection has failed.
        address: see `Medium`.
        prefix: stands in front of all keys.
        options: see `Medium`.
    """

    def __init__(self, connect: Callable[[], dist.Store], address: str, *, prefix: str = "", **options: Any) -> None:
        super().__init__(address, **options)
        self._connect, self._prefix = connect, f"gossip_mailbox/{prefix}".rstrip("/")
        self._store: BoundedStore | None = None
        self._repeat(
            "open", "", lambda is_retry: self._try(lambda store: store.check("open", what="a first request")), None
        )

    def _create(self, path: str, data: bytes) -> bool:
        def create(store: BoundedStore) -> bool:
            if store.check(_entry_key(path), what=path):
                return False
            token = _write(store, data)
            entry = b"%d %s" % (len(data), token.encode())
            is_new = store.compare_set(_entry_key(path), "", entry.decode(), what=path) == entry
            if not is_new:
                _drop(store, len(data), token)
            return is_new

        return self._try(create)

    def _put(self, path: str, data: bytes) -> None:
        def put(store: BoundedStore) -> None:
            token = _write(store, data)
            old = store.get(_entry_key(path), what=path)
            store.set(_entry_key(path), f"{len(data)} {token}", what=path)
            _drop(store, *_parsed(old))

        self._try(put)

    def _get(self, path: str, max_bytes: int) -> bytes | None:
        def get(store: BoundedStore) -> bytes | None:
            entry = store.get(_entry_key(path), what=path)
            if entry is None:
                return None
            size, token = _parsed(entry)
            if size > max_bytes:
                raise TooLarge
            chunks = [store.get(key, what=path) for key in _chunk_keys(size, token)]
            found = [chunk for chunk in chunks if chunk is not None]
            if len(found) < len(chunks) and store.get(_entry_key(path), what=path) != entry:
                raise Transient("it was replaced while it was read")
            return b"".join(found)

        return self._try(get)

    def _list(self, prefix: str) -> dict[str, Listed]:
        def entries(store: BoundedStore) -> dict[str, Listed]:
            start = _entry_key(f"{prefix}/" if prefix else "")
            keys = [key for key in store.keys(what=prefix) if key.startswith(start)]
            found = {key: store.get(key, what=key) for key in keys}
            return {
                key.removeprefix(_entry_key("")): Listed(str(entry), _parsed(entry)[0])
                for key, entry in found.items()
                if entry is not None
            }

        return self._try(entries)

    def _delete(self, paths: Iterable[str]) -> None:
        def delete(store: BoundedStore) -> None:
            for path in paths:
                entry = store.get(_entry_key(path), what=path)
                store.delete(_entry_key(path), what=path)
                _drop(store, *_parsed(entry))

        self._try(delete)

    def _try(self, request: Callable[[BoundedStore], T]) -> T:
        """The result of requests, over a new connection if the last one has failed."""
        try:
            if self._store is None:
                store = dist.PrefixStore(self._prefix, self._connect())
                if not hasattr(store, "list_keys"):
                    raise Permanent(f"torch {torch.__version__} cannot list the keys of a store", remedy="update torch")
                self._store = BoundedStore(store, timeout=timedelta(seconds=self.timeout))
            return request(self._store)
        except (ConnectionError, dist.DistError) as error:
            self._store = None
            raise Transient(error) from error


def _entry_key(path: str) -> str:
    return f"entry:{path}"


def _parsed(entry: bytes | None) -> tuple[int, str]:
    """The size and the token of an entry. An entry of another form has no content, which no seal opens."""
    found = _ENTRY.fullmatch(entry or b"")
    return (int(found[1]), found[2].decode()) if found else (0, "")


def _chunk_keys(size: int, token: str) -> list[str]:
    return [f"content:{token}:{start}" for start in range(0, size, _CHUNK)]


def _write(store: BoundedStore, data: bytes) -> str:
    """Write a content; returns its token."""
    token = uuid.uuid4().hex
    for i, key in enumerate(_chunk_keys(len(data), token)):
        store.set(key, data[i * _CHUNK : (i + 1) * _CHUNK], what=key)
    return token


def _drop(store: BoundedStore, size: int, token: str) -> None:
    for key in _chunk_keys(size, token):
        store.delete(key, what=key)

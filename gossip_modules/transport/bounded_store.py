"""BoundedStore: requests to a key-value store that end in time, whatever has become of who serves it."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from .threads import CallThread, Reply, result_of

T = TypeVar("T")


class BoundedStore:
    """The requests of this process to one store, each with a limit of time and an error that says what was asked.

    [Note: store requests] The client of a TCPStore waits for ever when the process that serves it is stopped or cut
    off, whatever its timeout. So a daemon thread sends the requests to a TCPStore, one after the other, and who asks
    waits for that thread. A request that was given up stays with the thread, and is carried out if the store answers
    again; until then others fail as soon as it has been there for as long as they would wait. Stores without a server,
    in memory or in a file, are asked directly.

    Args:
        store: of any kind.
        timeout: of each request that gives none; None: the store's own.

    Attributes:
        address: of the store, for error messages.
    """

    def __init__(self, store: dist.Store, *, timeout: timedelta | None = None) -> None:
        self._store = store
        self._timeout: timedelta = store.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        base = store
        while isinstance(base, dist.PrefixStore):
            base = base.underlying_store
        self._base = base  # alive, so that all that ask it share a thread
        self.address = _address_of(base)
        self._client = None if isinstance(base, (dist.HashStore, dist.FileStore)) else _client_of(base)

    def add(self, key: str, amount: int, *, what: str, timeout: timedelta | None = None) -> int:
        """Add `amount` to the number under `key`, 0 before the first time; the sum.

        Args:
            key: of the number.
            amount: may be 0.
            what: is done, for errors: "adding 1 to the progress of the job".
            timeout: None: that of the constructor.

        Raises:
            ConnectionError: the store has failed, or has not answered in time.
        """
        return self._ask(lambda: self._store.add(key, amount), what, timeout)

    def set(self, key: str, value: str, *, what: str, timeout: timedelta | None = None) -> None:
        """Put `value` under `key`. See `add`."""
        self._ask(lambda: self._store.set(key, value), what, timeout)

    def get(self, key: str, *, what: str, timeout: timedelta | None = None) -> bytes | None:
        """What is under `key`; None: nothing. Waits for the answer, never for the key. See `add`."""
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None, what, timeout)

    def compare_set(self, key: str, expected: str, value: str, *, what: str, timeout: timedelta | None = None) -> bytes:
        """Put `value` under `key` if `expected` is there ("": nothing); what is there afterwards. See `add`."""
        return self._ask(lambda: self._store.compare_set(key, expected, value), what, timeout)

    def delete(self, key: str, *, what: str, timeout: timedelta | None = None) -> None:
        """Take `key` away, if it is there. See `add`."""
        self._ask(lambda: self._store.delete_key(key), what, timeout)

    def check(self, key: str, *, what: str, timeout: timedelta | None = None) -> bool:
        """Whether there is anything under `key`. See `add`."""
        return self._ask(lambda: self._store.check([key]), what, timeout)

    def _ask(self, request: Callable[[], T], what: str, timeout: timedelta | None) -> T:
        seconds = (timeout or self._timeout).total_seconds()
        try:
            return request() if self._client is None else self._client.ask(request, seconds)
        except (dist.DistError, _NoAnswer) as error:
            raise ConnectionError(
                f"{what}: its key-value store did not answer ({self.address}: {error}); the process that serves it, "
                "torchrun's agent on the first host or rank 0, has ended, is stopped or is out of reach"
            ) from error


class _NoAnswer(Exception):
    """The limit of time has passed."""


class _Client:
    """Asks one store in a thread of its own. See [Note: store requests]."""

    def __init__(self) -> None:
        self._thread = CallThread("store-requests")
        self._late: tuple[Reply, float] | None = None  # the first request that was given up, and when it was made

    def ask(self, request: Callable[[], T], seconds: float) -> T:
        """The result of a request, or _NoAnswer after so many seconds."""
        start = time.monotonic()
        if (late := self._late) is not None:
            reply, asked = late
            try:
                answer = reply.get(timeout=max(asked + seconds - start, 0.0))
            except queue.Empty:
                raise _NoAnswer(f"no answer to an earlier request for {time.monotonic() - asked:.1f} s") from None
            reply.put(answer)  # other threads may wait for it too
            self._late = None
        reply = self._thread.call(request)
        try:
            result: T = result_of(reply, timeout=max(start + seconds - time.monotonic(), 0.0))
        except queue.Empty:
            self._late = self._late or (reply, start)
            raise _NoAnswer(f"no answer within {seconds:g} s") from None
        return result


_clients: weakref.WeakKeyDictionary[dist.Store, _Client] = weakref.WeakKeyDictionary()  # one thread per store
_clients_lock = threading.Lock()


def _client_of(store: dist.Store) -> _Client:
    with _clients_lock:
        client = _clients.get(store)
        if client is None:
            client = _clients[store] = _Client()
        return client


def _address_of(store: dist.Store) -> str:
    if isinstance(store, dist.TCPStore):
        return f"{store.host}:{store.port}"
    if isinstance(store, dist.FileStore):
        return str(store.path)  # type: ignore[attr-defined]
    return type(store).__name__

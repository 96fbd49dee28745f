"""SharedCount: how many steps workers have taken together who wait for nobody, not even for the store."""

from __future__ import annotations

import threading
from datetime import timedelta

from gossip_modules.membership.address import connect_store
from gossip_modules.transport.stores import BoundedStore

_PERIOD_SECONDS = 0.05  # between two exchanges with the store
_RETRY_SECONDS = 1.0  # after one that has failed
_TIMEOUT = timedelta(seconds=5)


class SharedCount:
    """A number in the store of a run to which all workers add; each knows what it was a twentieth of a second ago.

    [Note: counting] A thread adds the steps that this worker has taken since the last time, and gets the total. While
    the store does not answer, the total grows by the steps of this worker only, and those are added when it is back.
    The number counts from a base, which the first worker writes that finds none: 0, or what it knew before the store
    was lost and came back empty.

    Args:
        store: see `connect_store`.
        name: the name of the count; workers with the same name share it.
        start: what this worker knows of the total.
    """

    def __init__(self, store: str, name: str, *, start: int) -> None:
        self._address, self._name = store, f"gossip_train/{name}"
        self._lock = threading.Lock()
        self._known, self._own = start, 0  # the last total, and steps that are not in it
        self._client: BoundedStore | None = None
        self._base = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared-count", daemon=True)
        self._thread.start()

    @property
    def total(self) -> int:
        """Of all workers, as far as this one knows; never falls."""
        with self._lock:
            return self._known + self._own

    def add(self, n: int) -> None:
        """Count steps of this worker; waits for nobody."""
        with self._lock:
            self._own += n

    def close(self) -> None:
        """Add what is left, if the store answers; idempotent."""
        self._closed.set()
        self._thread.join(_TIMEOUT.total_seconds())

    def _run(self) -> None:
        """The body of the thread."""
        is_closed, pause = False, 0.0
        while not is_closed:
            is_closed = self._closed.wait(pause)
            pause = _PERIOD_SECONDS
            try:
                if self._client is None and not is_closed:
                    self._connect()
                self._exchange()
            except (ConnectionError, OSError, RuntimeError):  # it is away: see [Note: counting]
                self._client, pause = None, _RETRY_SECONDS

    def _connect(self) -> None:
        client = BoundedStore(connect_store(self._address, _TIMEOUT, was_lost=True), timeout=_TIMEOUT)
        base = client.compare_set(f"{self._name}/base", "", str(self._known), what="counting steps")
        self._base, self._client = int(base), client

    def _exchange(self) -> None:
        if self._client is None:
            return
        with self._lock:
            n = self._own
        total = self._base + self._client.add(f"{self._name}/steps", n, what="counting steps")
        with self._lock:
            self._known, self._own = max(self._known + n, total), self._own - n

"""EndableStore: a store in which the wait for a key ends when it is told to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from .deadline import Deadline

_POLL_SECONDS = 0.005


class EndableStore(dist.Store):
    """The keys of another store; a wait for one that is not there ends with an error as soon as an event is set.

    A group over Gloo waits for the addresses of its ranks in its store. The client of a TCPStore does so inside C++
    code, for as long as the group may take to connect, and nothing ends that. This one asks again and again.

    [Note: all addresses at once] A rank that has the address of another one waits inside C++ code until that connects.
    So no rank gets an address before those of all ranks are there: one whose wait is ended takes its own
    address back, and leaves nobody waiting.

    Args:
        store: with the keys; requests go to it one after the other.
        ended: set, from any thread, when nobody is to wait any more.
        timeout: of waits that give none.
        is_void: whether the group is not to be made any more, asked while its addresses are awaited; from any thread.

    Attributes:
        store: that one.
        num_ranks: of the group whose addresses these are, under ".../0", ".../1", ...; 0: of none.
    """

    num_ranks = 0

    def __init__(
        self,
        store: dist.Store,
        ended: threading.Event,
        *,
        timeout: timedelta,
        is_void: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.store, self._ended, self._limit, self._is_void = store, ended, timeout, is_void
        self._own: list[str] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Put `value` under `key`."""
        self._own.append(key)
        self.store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """What is under `key`; waits for it."""
        self.wait([key])
        return self.store.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there is something under each of the keys."""
        return self.store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when there is something under each of the keys.

        Raises:
            RuntimeError: they did not come within `timeout`, or the wait was ended.
        """
        deadline = Deadline(timeout or self._limit)
        groups = {key.rpartition("/")[0] for key in keys}
        keys = list(dict.fromkeys([*keys, *(f"{group}/{i}" for group in groups for i in range(self.num_ranks))]))
        while not self.check(keys):
            if (self._is_void() or self._ended.wait(_POLL_SECONDS)) and not self.check(keys):
                missing = self._missing(keys)
                self._take_back()
                why = "this worker has closed" if self._ended.is_set() else "another group is made in its place"
                raise RuntimeError(f"the wait for {missing} was ended, since {why}")
            if deadline.is_over:
                missing = self._missing(keys)
                self._take_back()
                raise RuntimeError(f"{missing} did not come within {deadline.seconds:g} s")

    def _take_back(self) -> None:
        """See [Note: all addresses at once]: where this rank does not connect, nobody else is to begin to."""
        for key in self._own:
            with contextlib.suppress(RuntimeError):  # a store that deletes nothing, or is away
                self.store.delete_key(key)

    def _missing(self, keys: Sequence[str]) -> str:
        return ", ".join(key for key in keys if not self.check([key]))

    def has_extended_api(self) -> bool:
        """Gloo asks key by key."""
        return False

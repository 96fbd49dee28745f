"""A store of objects with faults, for tests of the code above it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ..mailbox.base import Listed
from ..mailbox.errors import Transient
from ..mailbox.medium import Medium

T = TypeVar("T")


class StormyMedium(Medium):
    """A store of objects whose tries are late, fail, lose their answers, or see an old state.

    The faults are below the retries: see [Note: retries] of `Medium`. Each is drawn by one seeded generator.

    Args:
        inner: the store; this one has its address, clock, timeout and seal.
        seed: the seed of the faults.
        loss: the probability that the answer is lost after a try was carried out.
        delay: the longest delay of a try, in seconds of the clock.
        stale: the probability that a list is the one before, and that an object is not found that was first found less
            than `stale_seconds` ago.
        unavailable: the probability that a try fails before it is carried out, as with the status 503.
        outage: times of the clock, pairs of begin and end, between which all tries fail.
        stale_seconds: see `stale`.
    """

    def __init__(
        self,
        inner: Medium,
        seed: int,
        *,
        loss: float = 0.0,
        delay: float = 0.0,
        stale: float = 0.0,
        unavailable: float = 0.0,
        outage: Sequence[tuple[float, float]] = (),
        stale_seconds: float = 1.0,
    ) -> None:
        super().__init__(inner.address, timeout=inner.timeout, clock=inner.clock, seal=inner.seal, seed=seed)
        self.errors = inner.errors
        self.inner, self.outage, self.stale_seconds = inner, outage, stale_seconds
        self.loss, self.delay, self.stale, self.unavailable = loss, delay, stale, unavailable
        self._faults, self._faults_lock = random.Random(seed), threading.Lock()  # the lock is of all below, too
        self._first_found: dict[str, float] = {}
        self._lists: dict[str, dict[str, Listed]] = {}

    def close(self) -> None:
        """See `Medium`."""
        super().close()
        self.inner.close()

    def _create(self, path: str, data: bytes) -> bool:
        return self._through(lambda: self.inner._create(path, data))

    def _put(self, path: str, data: bytes) -> None:
        self._through(lambda: self.inner._put(path, data))

    def _get(self, path: str, max_bytes: int) -> bytes | memoryview | None:
        data = self._through(lambda: self.inner._get(path, max_bytes))
        with self._faults_lock:
            if data is None:
                self._first_found.pop(path, None)
                return None
            age = self.clock.now() - self._first_found.setdefault(path, self.clock.now())
            return None if age < self.stale_seconds and self._faults.random() < self.stale else data

    def _list(self, prefix: str) -> dict[str, Listed]:
        found = self._through(lambda: self.inner._list(prefix))
        with self._faults_lock:
            before = self._lists.get(prefix, found)
            self._lists[prefix] = found
            return before if self._faults.random() < self.stale else found

    def _delete(self, paths: Iterable[str]) -> None:
        self._through(lambda: self.inner._delete(paths))

    def _failure(self, error: Exception) -> Transient:
        return self.inner._failure(error)

    def _through(self, request: Callable[[], T]) -> T:
        with self._faults_lock:
            delay = self._faults.random() * self.delay
            is_refused, is_lost = (self._faults.random() < odds for odds in (self.unavailable, self.loss))
        if delay:
            self.clock.sleep(delay)
        if any(begin <= self.clock.now() < end for begin, end in self.outage):
            raise Transient("an outage")
        if is_refused:
            raise Transient("503 Service Unavailable")
        result = request()
        if is_lost:
            raise Transient("the answer was lost")
        return result

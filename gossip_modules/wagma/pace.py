"""Pace: how far the others get while a rank takes one training step of its own."""

from __future__ import annotations

import time
from collections import deque

_NUM_STEPS = 3  # remembered
_SLOW = 2  # versions per own step


class Pace:
    """The least number of versions, and seconds, that passed during one of the last three steps of a rank.

    The least of three, so that a single hiccup does not count: only a rank that is slow all the time is `is_slow`.
    """

    def __init__(self) -> None:
        self._versions: deque[int] = deque(maxlen=_NUM_STEPS)
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)
        self._departure: tuple[int, float] | None = None

    def depart(self, front: int) -> None:
        """A step begins, when the ranks that are ahead are at version `front`."""
        self._departure = front, time.perf_counter()

    def arrive(self, front: int, *, is_halted: bool) -> None:
        """It ends. `is_halted`: those ahead are waiting, so that a faster pace of theirs would not have shown."""
        if self._departure is None:
            return
        versions = front - self._departure[0]
        if is_halted and versions <= min(self._versions, default=versions):
            return  # a lower bound that says nothing new
        self._versions.append(versions)
        self._seconds.append(time.perf_counter() - self._departure[1])

    @property
    def versions(self) -> int:
        """Per own step; 1 until three steps are known."""
        return min(self._versions) if len(self._versions) == _NUM_STEPS else 1

    @property
    def seconds(self) -> float:
        """Per own step; 0 until a step is known."""
        return min(self._seconds, default=0.0)

    @property
    def is_slow(self) -> bool:
        """Whether the others take at least two steps for each of this rank's."""
        return self.versions >= _SLOW

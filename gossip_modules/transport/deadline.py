"""Deadline: how long several waits, one after the other, may last in all."""

from __future__ import annotations

import math
import time
from datetime import timedelta

clock = time.monotonic  # apart, so that tests can change it
AT_ONCE = timedelta(milliseconds=1)


class Deadline:
    """A point in time for several waits, so that together they last no longer than one limit.

    [Note: one deadline] If a function waits twice for `timeout`, it takes twice the time allowed by the user. Calls of
    such functions multiply the time. So the first function of an operation makes one `Deadline`, and each wait of the
    operation gets the seconds `left`.

    Args:
        limit: the limit of all waits together, in seconds or as a timedelta.

    Attributes:
        seconds: that limit, for errors.

    Example:
        >>> deadline = Deadline(timedelta(seconds=30))
        >>> first.join(deadline.left)
        >>> second.join(deadline.left)  # what the first one has left of the 30 seconds
    """

    __slots__ = ("_end", "_start", "seconds")

    def __init__(self, limit: timedelta | float) -> None:
        self.seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
        self._start = clock()
        self._end = self._start + self.seconds

    @property
    def left(self) -> float:
        """The remaining seconds, at least 0."""
        return max(self._end - clock(), 0.0)

    @property
    def left_for_gloo(self) -> timedelta:
        """The remaining seconds, at least a millisecond, for a wait with a limit above zero."""
        return max(timedelta(seconds=self.left), AT_ONCE)

    @property
    def passed(self) -> float:
        """The seconds since it was made."""
        return clock() - self._start

    @property
    def is_over(self) -> bool:
        """Whether nothing remains."""
        return clock() >= self._end

    def extend(self, seconds: float) -> None:
        """Allow so many seconds more: the duration of a received part of a large message."""
        self._end += seconds

    def leave(self, seconds: float) -> None:
        """Let at least so many seconds remain, for a wait after successful waits."""
        self._end = max(self._end, clock() + seconds)


def as_timeout(timeout: timedelta | float, *, name: str = "timeout") -> timedelta:
    """The timeout; a number means seconds."""
    if isinstance(timeout, timedelta) and timeout > timedelta(0):
        return timeout
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (is_number and 0 < timeout < math.inf):  # type: ignore[operator]
        raise ValueError(
            f"got {name}={timeout!r}, expected more than zero seconds: a number like 30, or a timedelta; for a wait "
            "without limit give a large one, timedelta(days=1)"
        )
    return timedelta(seconds=timeout)  # type: ignore[arg-type]

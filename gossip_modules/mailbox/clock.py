"""The clock of the mailbox: no other code of this package reads the time, sleeps or starts a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ..transport.threads import start


class Joinable(Protocol):
    """A thread, or its like under another clock."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, for so many seconds at most; None: without limit."""


class Clock:
    """Real time and daemon threads. A subclass may replace both, as the Lab does."""

    def now(self) -> float:
        """The time in seconds since some moment; it never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        time.sleep(seconds)

    def start(self, target: Callable[[], object], name: str) -> Joinable:
        """Start a daemon thread that calls `target`; see [Note: threads at exit] of `start`."""
        return start(target, name=name)

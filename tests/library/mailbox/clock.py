"""A clock without waits, for tests of deadlines."""

from __future__ import annotations

import threading

from gossip_modules.mailbox.clock import Clock


class InstantClock(Clock):
    """Time that passes in sleeps only. Attributes: sleeps: their seconds."""

    def __init__(self) -> None:
        self.sleeps: list[float] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        """See `Clock`."""
        return sum(self.sleeps)

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        with self._lock:
            self.sleeps.append(seconds)

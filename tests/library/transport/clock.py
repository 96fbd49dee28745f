"""A clock that a test sets, in the place of that of `Deadline`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gossip_modules.transport import deadline


@dataclass
class Clock:
    """Attributes: now: seconds, which only the test changes."""

    now: float = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now

    @staticmethod
    def begin(monkeypatch: pytest.MonkeyPatch) -> Clock:
        """Have deadlines use it for the rest of the test."""
        clock = Clock()
        monkeypatch.setattr(deadline, "clock", clock)
        return clock

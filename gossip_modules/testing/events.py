"""The events of `Chaos`: what happens to whom, and at which training step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Something that happens when training comes to a step.

    The rank of an event is the number of a worker in the order of their start: 0 to n - 1 begin, and each `Join` starts
    the next one. It stays that of the worker, unlike its position in a generation.

    Args:
        step: of the job, before whose round it happens: of the event's own rank where it is hit itself (`Kill`,
            `Stop`), otherwise of whoever comes to it first.
    """

    step: int

    def __post_init__(self) -> None:
        if not isinstance(self.step, int) or isinstance(self.step, bool) or self.step < 0:
            raise ValueError(f"got step={self.step!r}, expected the number of a training step: 0, 1, ...")
        rank = getattr(self, "rank", 0)
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ValueError(
                f"got rank={rank!r}, expected the number of a worker in the order of their start: 0, 1, ..."
            )
        seconds = getattr(self, "seconds", 0.0)
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ValueError(f"got seconds={seconds!r}, expected a number of at least 0")


@dataclass(frozen=True)
class Kill(Event):
    """The worker ends at once, as by SIGKILL: its connections close, and nobody is told."""

    rank: int


@dataclass(frozen=True)
class Stop(Event):
    """The worker stands still, as by SIGSTOP, with all its threads; its connections stay open.

    Args:
        seconds: until it goes on; None: until a `Continue`, or for ever.
    """

    rank: int
    seconds: float | None = None


@dataclass(frozen=True)
class Continue(Event):
    """A worker that stands still goes on, when another one comes to the step."""

    rank: int


@dataclass(frozen=True)
class Join(Event):
    """One more worker is started."""


@dataclass(frozen=True)
class StoreKill(Event):
    """The process of the store is killed, and another one started, which is empty.

    Args:
        seconds: between the two.
    """

    seconds: float = 1.0

"""The events of `Chaos`: what happens to whom, and at which training step."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar


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
    _may_last: ClassVar[bool] = True  # whether `seconds` may be None

    def __post_init__(self) -> None:
        if not isinstance(self.step, int) or isinstance(self.step, bool) or self.step < 0:
            raise ValueError(f"got step={self.step!r}, expected the number of a training step: 0, 1, ...")
        rank = getattr(self, "rank", 0)
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ValueError(
                f"got rank={rank!r}, expected the number of a worker in the order of their start: 0, 1, ..."
            )
        seconds = getattr(self, "seconds", 0.0)
        if not ((seconds is None and self._may_last) or _is_number(seconds, 0.0)):
            least = "a number of at least 0" + (", or None for ever" if self._may_last else "")
            raise ValueError(f"got seconds={seconds!r}, expected {least}")


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
    _may_last: ClassVar[bool] = False


@dataclass(frozen=True)
class Delay(Event):
    """Packets to and from a worker take longer, when any worker comes to the step.

    Args:
        delay: seconds, in each direction.
        seconds: until all is well again; None: never.
    """

    rank: int
    delay: float = 0.2
    seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_number(self.delay) and self.delay > 0):
            raise ValueError(f"got delay={self.delay!r}, expected seconds above 0")


@dataclass(frozen=True)
class Loss(Event):
    """Packets to and from a worker are lost at random, when any worker comes to the step.

    Args:
        fraction: of the packets.
        seconds: until all is well again; None: never.
    """

    rank: int
    fraction: float = 0.05
    seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_number(self.fraction) and 0 < self.fraction <= 1):
            raise ValueError(f"got fraction={self.fraction!r}, expected one above 0 and at most 1")


@dataclass(frozen=True)
class Partition(Event):
    """Workers are cut off from all others and from the store, when any worker comes to the step.

    Args:
        ranks: who still reach one another.
        seconds: until all is well again; None: never.
    """

    ranks: tuple[int, ...]
    seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = self.ranks if isinstance(self.ranks, Collection) and not isinstance(self.ranks, str) else ()
        is_whole = [isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks]
        if not is_whole or not all(is_whole):
            raise ValueError(
                f"got ranks={self.ranks!r}, expected numbers of workers in the order of their start: 0, 1, ..."
            )


def _is_number(value: object, least: float = -math.inf) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < math.inf

"""The events of `Chaos`: faults of workers, of the store and of the network, each at a training step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event(ABC):
    """A fault when training comes to a step.

    The rank of an event is the number of a worker in the order of their start: 0 to n - 1 begin, and each `Join` starts
    the next one. The worker keeps it, unlike its position in a generation.

    Args:
        step: the training step of the job; the event happens before its round. `Kill` and `Stop` happen when their own
            rank comes to the step, other events when the first worker does.
    """

    step: int
    is_of_own_step: ClassVar[bool] = False
    needs_network: ClassVar[bool] = False
    _may_last: ClassVar[bool] = True  # whether `seconds` may be None

    def __post_init__(self) -> None:
        if not _is_count(self.step):
            raise ValueError(f"got step={self.step!r}, expected the number of a training step: 0, 1, ...")
        rank = getattr(self, "rank", 0)
        if not _is_count(rank):
            raise ValueError(
                f"got rank={rank!r}, expected the number of a worker in the order of their start: 0, 1, ..."
            )
        seconds = getattr(self, "seconds", 0.0)
        if not ((seconds is None and self._may_last) or _is_number(seconds, 0.0)):
            least = "a number of at least 0" + (", or None for ever" if self._may_last else "")
            raise ValueError(f"got seconds={seconds!r}, expected {least}")

    @abstractmethod
    def happen(self, run: Any) -> None:
        """Carry the event out in `run`, a `ChaosRun`."""


@dataclass(frozen=True)
class Kill(Event):
    """The worker ends at once, as by SIGKILL: its connections close, without a notice to the others."""

    rank: int
    is_of_own_step = True

    def happen(self, run: Any) -> None:
        """See `Event`."""
        run.backend.kill(self.rank)


@dataclass(frozen=True)
class Stop(Event):
    """The worker stops, as by SIGSTOP, with all its threads; its connections stay open.

    Args:
        seconds: the time until it goes on; None: until a `Continue`, or for ever.
    """

    rank: int
    seconds: float | None = None
    is_of_own_step = True

    def happen(self, run: Any) -> None:
        """See `Event`."""
        run.stop(self.rank)
        run.after(self.seconds, lambda: run.resume(self.rank))


@dataclass(frozen=True)
class Continue(Event):
    """A stopped worker goes on, when another worker comes to the step."""

    rank: int

    def happen(self, run: Any) -> None:
        """See `Event`."""
        run.resume(self.rank)


@dataclass(frozen=True)
class Join(Event):
    """One more worker is started."""

    def happen(self, run: Any) -> None:
        """See `Event`."""
        run.start()


@dataclass(frozen=True)
class StoreKill(Event):
    """The process of the store is killed, and a process with an empty store is started.

    Args:
        seconds: the time between the two.
    """

    seconds: float = 1.0
    _may_last = False

    def happen(self, run: Any) -> None:
        """See `Event`."""
        run.backend.kill_store()
        run.after(self.seconds, run.backend.start_store)


@dataclass(frozen=True)
class Delay(Event):
    """Packets to and from a worker take longer, when any worker comes to the step.

    Args:
        delay: the added seconds, in each direction.
        seconds: the time until the delay ends; None: never.
    """

    rank: int
    delay: float = 0.2
    seconds: float | None = None
    needs_network = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_number(self.delay) and self.delay > 0):
            raise ValueError(f"got delay={self.delay!r}, expected seconds above 0")

    def happen(self, run: Any) -> None:
        """See `Event`."""
        run.backend.set_condition(self.rank, delay=self.delay)
        run.after(self.seconds, lambda: run.backend.set_condition(self.rank, delay=0.0))


@dataclass(frozen=True)
class Loss(Event):
    """Packets to and from a worker are lost at random, when any worker comes to the step.

    Args:
        fraction: the lost share of the packets, above 0 and at most 1.
        seconds: the time until the loss ends; None: never.
    """

    rank: int
    fraction: float = 0.05
    seconds: float | None = None
    needs_network = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_number(self.fraction) and 0 < self.fraction <= 1):
            raise ValueError(f"got fraction={self.fraction!r}, expected one above 0 and at most 1")

    def happen(self, run: Any) -> None:
        """See `Event`."""
        run.backend.set_condition(self.rank, loss=self.fraction)
        run.after(self.seconds, lambda: run.backend.set_condition(self.rank, loss=0.0))


@dataclass(frozen=True)
class Partition(Event):
    """Workers are cut off from all others and from the store, when any worker comes to the step.

    Args:
        ranks: the numbers of the workers; they still reach one another.
        seconds: the time until all reach each other again; None: never.
    """

    ranks: tuple[int, ...]
    seconds: float | None = None
    needs_network = True

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = self.ranks if isinstance(self.ranks, Collection) and not isinstance(self.ranks, str) else ()
        if not ranks or not all(map(_is_count, ranks)):
            raise ValueError(
                f"got ranks={self.ranks!r}, expected numbers of workers in the order of their start: 0, 1, ..."
            )

    def happen(self, run: Any) -> None:
        """See `Event`."""
        run.backend.cut(self.ranks)
        run.after(self.seconds, lambda: run.backend.mend(self.ranks))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object, least: float = -math.inf) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < math.inf

"""Methods that the simulator can run: the rounds of algorithms on the models of all ranks, with a clock."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..rounds.requests import SGDStep
from ..rounds.rows import Rows
from ..rounds.stacked import Stacked
from ..schedule import Action, Schedule
from .clocks import Clock
from .setting import ControlRates

MOMENTUM = 0.9
"""Of algorithms that need some, with a learning rate that is smaller by one minus this."""


class SimulatedMethod(ABC):
    """How n models come to agree while they train, and when each of them takes its steps.

    Attributes:
        num_ranks: n.
        starts: when each rank has started the step that it is at: float64 [n], in seconds.
        waited_seconds: what each rank has waited so far: float64 [n].
        sent_bytes: what a rank has sent so far, mean over ranks.
        is_stepping: bool [n], which ranks compute a step after this forward; None = all.
        is_overlapped: whether messages travel while ranks compute.
        algorithm: the text of the method with its arguments; "": it was put together from parts.
    """

    algorithm = ""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.starts, self.waited_seconds = np.zeros(num_ranks), np.zeros(num_ranks)
        self.sent_bytes = 0.0
        self.is_stepping: Tensor | None = None
        self.is_overlapped = False

    @abstractmethod
    def forward(self, x: Tensor) -> None:
        """The safe point before a training step: x [n, d] takes in what peers have said, and time goes on."""

    def estimates(self, x: Tensor) -> Tensor:
        """The models that forward and backward see, [n, d]: x, or with push-sum x / w."""
        return x

    @property
    def control_rates(self) -> ControlRates | None:
        """How often ranks have communicated so far, where that is under control; None elsewhere."""
        return None


class TooFarApartError(RuntimeError):
    """Neighbours are further apart than the theta that Moniqua was given: the library refuses such a round too."""


class ClockedMethod(SimulatedMethod):
    """A method whose ranks step together, so that one clock has the time of all.

    Args:
        clock: what steps take; an `OverlapClock` with overlap.
        overlap: whether rounds run under the compute.
    """

    def __init__(self, clock: Clock, *, overlap: bool = False) -> None:
        super().__init__(len(clock.starts))
        self.clock, self.is_overlapped = clock, overlap
        self.starts, self.waited_seconds = clock.starts, clock.waited_seconds  # which the clock changes in place

    def _count_bytes(self, exchanges: Sequence[Rows | None]) -> None:
        for rows in exchanges if self.num_ranks > 1 else ():
            if rows is None:
                self.sent_bytes += 2 * (self.num_ranks - 1) / self.num_ranks * self.clock.model_bytes
            else:
                self.sent_bytes += rows.mean_out_degree * self.clock.message.num_bytes


class LockstepMethod(ClockedMethod):
    """The rounds of an algorithm, as its driver runs them, a schedule and a clock; step k of one rank is step k of all.

    An algorithm that works on the momentum of SGD gets some: a step u of the problem moves x by (1 - b) u - b m.

    Args:
        driver: runs the rounds; before its first step.
        schedule: which step does what.
        clock: the time that steps take; an `OverlapClock` where the driver overlaps.
    """

    def __init__(self, driver: Stacked, schedule: Schedule, clock: Clock) -> None:
        super().__init__(clock, overlap=driver.overlap)
        self.driver, self.schedule, self.mixing = driver, schedule, driver.mixing
        self._momentum = MOMENTUM if driver.algorithm.needs_sgd else 0.0
        self._last: Tensor | None = None  # what the last round has left, where there is momentum

    def estimates(self, x: Tensor) -> Tensor:
        """See `SimulatedMethod`."""
        return self.driver.estimates(x)

    def forward(self, x: Tensor) -> None:
        """See `SimulatedMethod`."""
        step, clock = self.clock.step, self.clock
        if self._last is not None and (momentum := self.driver.momentum) is not None:
            x.lerp_(self._last, self._momentum).sub_(momentum, alpha=self._momentum)
        action = self.schedule.action(step) if step or clock.begins_with_round else Action.SKIP
        try:
            exchanges = self.driver.step(x, step, action, sgd=SGDStep(1.0, self._momentum) if step else None)
        except (RuntimeError, ValueError) as error:
            if (theta := getattr(self.driver.algorithm, "theta", None)) is None or self.mixing is None:
                raise
            exchanges = self._diverged(x, self.mixing.round(self.driver.t), theta, error)
        clock.advance(exchanges)
        self._count_bytes(exchanges)
        if self._momentum:
            self._last = x.clone()

    def _diverged(self, x: Tensor, rows: Rows, theta: float, error: Exception) -> list[Rows | None]:
        """Neighbours are too far apart for the algorithm: say how far; or x is not finite, which no theta mends."""
        difference = max(float((x[torch.from_numpy(peers)] - x).abs().max()) for peers in rows.peers.T.copy())
        if math.isfinite(difference):
            raise TooFarApartError(
                f"Moniqua: got neighbours that differ by {difference:.3g} in round {self.driver.t}, expected less than "
                f"theta={theta:.3g}; give a larger --theta, or lower the learning rate"
            ) from error
        x.fill_(math.nan)
        return [rows]

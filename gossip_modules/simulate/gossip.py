"""Gossip of all n ranks at once: the rules by which models, or codes of them, become corrections."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from ..compression.compressor import Compressor, random_words
from ..rounds.rows import Array, Rows, StackedMixing
from ..rounds.stacked import Stacked
from ..rounds.vectors import SGDStep
from ..schedule import Action, Schedule
from .clocks import Clock
from .delays import ComputeModel, MessageCost, Network
from .setting import ControlRates

MOMENTUM = 0.9
"""Of algorithms that need some, with a learning rate that is smaller by one minus this."""
_OPTIONS = {
    "sync_every": "sync_period",
    "lr": "outer_lr",
    "momentum": "outer_momentum",
    "theta": "theta",
    "step_size": "step_size",
}
"""The options of training that are fields of algorithms, by the names of the fields."""


class SimulatedMethod(ABC):
    """How n models come to agree while they train, and when each of them takes its steps.

    Attributes:
        num_ranks: n.
        sent_bytes: what a rank has sent so far, mean over ranks.
        is_stepping: bool [n], which ranks compute a step after this forward; None = all.
        is_overlapped: whether messages travel while ranks compute.
        options: of the method, by name, that a user has to set to train like this.
    """

    options: Mapping[str, float] = MappingProxyType({})

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
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
    @abstractmethod
    def starts(self) -> Array:
        """When each rank has started the step that it is at: float64 [n], in seconds."""

    @property
    @abstractmethod
    def waited_seconds(self) -> Array:
        """What each rank has waited so far: float64 [n]."""

    @property
    def control_rates(self) -> ControlRates | None:
        """How often ranks have communicated so far, where that is under control; None elsewhere."""
        return None


class TooFarApartError(RuntimeError):
    """Neighbours are further apart than the theta that Moniqua was given: the library refuses such a round too.

    Attributes:
        theta: that was given.
        difference: the largest of an entry of two neighbours.
    """

    def __init__(self, theta: float, t: int, difference: float) -> None:
        super().__init__(
            f"Moniqua: got neighbours that differ by {difference:.3g} in round {t}, expected less than "
            f"theta={theta:.3g}; give a larger --theta, or lower the learning rate"
        )
        self.theta, self.difference = theta, difference


class OwnPace(SimulatedMethod):
    """A method whose ranks do not all step together, so that it keeps the time of each itself.

    Args:
        compute: how long steps take.
        network: the links.
        message: a model.
    """

    def __init__(self, compute: ComputeModel, network: Network, message: MessageCost) -> None:
        super().__init__(network.num_ranks)
        self.compute, self.network, self.message = compute, network, message
        n = self.num_ranks
        self._starts, self._arrivals, self._waited = np.zeros(n), np.zeros(n), np.zeros(n)

    @property
    def starts(self) -> Array:
        """See `SimulatedMethod`."""
        return self._starts

    @property
    def waited_seconds(self) -> Array:
        """See `SimulatedMethod`."""
        return self._waited


class Rule(ABC):
    """What the messages of a round do to the models."""

    needs_push_sum = False
    """Whether W(t) may be only column-stochastic."""
    options: Mapping[str, float] = MappingProxyType({})
    """See `SimulatedMethod`."""

    @abstractmethod
    def correction(self, x: Tensor, round_: Rows, t: int) -> Tensor:
        """What to add to x [n, d] for round t, e.g. (W - I) x; x does not change."""


class DeepSqueezeRule(Rule):
    """See `DeepSqueeze`.

    Args:
        compressor: C, any.
        step_size: of consensus.
    """

    def __init__(self, compressor: Compressor, *, step_size: float) -> None:
        self.compressor, self.step_size = compressor, step_size
        self.options = {"step_size": step_size}
        self._error: Tensor | None = None

    def correction(self, x: Tensor, round_: Rows, t: int) -> Tensor:
        """See `Rule`."""
        self._error = x.clone() if self._error is None else self._error.add_(x)
        said = self.compressor.decompressed(self._error, t=t)
        self._error -= said
        return round_.mix(said).sub_(said).mul_(self.step_size)


class MoniquaRule(Rule):
    """See `Moniqua`.

    Args:
        theta: bound on the differences of neighbours' entries, for the whole run, as in training.
        bits: per entry.
        step_size: of consensus.
        seed: of the dither.

    Raises:
        TooFarApartError: (rounds) neighbours are further apart than theta.
    """

    def __init__(self, theta: float, *, bits: int = 8, step_size: float = 1.0, seed: int = 0) -> None:
        self.num_levels, self.step_size, self.theta, self.seed = 1 << bits, step_size, theta, seed
        self.options = {"theta": theta, "step_size": step_size}

    def correction(self, x: Tensor, round_: Rows, t: int) -> Tensor:
        """See `Rule`."""
        half = self.num_levels // 2
        spacing = self.theta / (half - 1)
        places = torch.floor(x / spacing + random_words(self.seed, t, 1)[0] / 2**64)
        result = torch.zeros_like(x)
        for k in range(round_.peers.shape[1]):
            differences = places.index_select(0, torch.from_numpy(round_.peers[:, k])) - places
            remainders = (differences + half).remainder_(self.num_levels).sub_(half)
            if bool((remainders != differences).any()):
                difference = self._largest_difference(x, round_)
                if not math.isfinite(difference):
                    return torch.full_like(x, math.nan)  # diverged, which no theta mends
                raise TooFarApartError(self.theta, t, difference)
            weights = torch.from_numpy(round_.weights[:, k].copy()).to(x.dtype)
            result.addcmul_(remainders, weights[:, None] * (self.step_size * spacing))
        return result

    @staticmethod
    def _largest_difference(x: Tensor, round_: Rows) -> float:
        columns = (torch.from_numpy(round_.peers[:, k]) for k in range(round_.peers.shape[1]))
        return float(torch.stack([(x.index_select(0, column) - x).abs().max() for column in columns]).max())


class ClockedMethod(SimulatedMethod):
    """A method whose ranks step together, so that one clock has the time of all.

    Args:
        clock: what steps take; an `OverlapClock` with overlap.
        overlap: whether rounds run under the compute.
    """

    def __init__(self, clock: Clock, *, overlap: bool = False) -> None:
        super().__init__(len(clock.starts))
        self.clock, self.is_overlapped = clock, overlap

    @property
    def starts(self) -> Array:
        """See `SimulatedMethod`."""
        return self.clock.starts

    @property
    def waited_seconds(self) -> Array:
        """See `SimulatedMethod`."""
        return self.clock.waited_seconds

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
        clock: what it takes; an `OverlapClock` where the driver overlaps.
        options: see `SimulatedMethod`; None: those of the algorithm.
    """

    def __init__(
        self, driver: Stacked, schedule: Schedule, clock: Clock, *, options: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(clock, overlap=driver.overlap)
        self.driver, self.schedule, self.mixing = driver, schedule, driver.mixing
        self.options = options_in(driver.algorithm) if options is None else options
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
        exchanges = self.driver.step(x, step, action, sgd=SGDStep(1.0, self._momentum) if step else None)
        clock.advance(exchanges)
        self._count_bytes(exchanges)
        if self._momentum:
            self._last = x.clone()


def options_in(algorithm: object) -> dict[str, float]:
    """The settings of an algorithm or a gossiper that are options of training, by their names there."""
    found = {option: getattr(algorithm, name, None) for name, option in _OPTIONS.items()}
    return {option: value for option, value in found.items() if isinstance(value, int | float)}


class RuleMethod(ClockedMethod):
    """A rule, a graph, a schedule and a clock: step k of one rank is step k of all.

    x <- x + correction of x; with overlap that of the x one forward ago, whose round ran under the step since. Where
    W(t) is not doubly stochastic push-sum weights go along.

    Args:
        rule: what a round does.
        mixing: W(t); None where the schedule has only global averages.
        schedule: which step does what.
        clock: what it takes; an `OverlapClock` with overlap.
        overlap: whether rounds run under the compute.
    """

    def __init__(
        self,
        rule: Rule | None,
        mixing: StackedMixing | None,
        schedule: Schedule,
        clock: Clock,
        *,
        overlap: bool = False,
    ) -> None:
        super().__init__(clock, overlap=overlap)
        self.rule, self.mixing, self.schedule = rule, mixing, schedule
        is_push_sum = (
            mixing is not None and rule is not None and rule.needs_push_sum and not mixing.is_doubly_stochastic
        )
        self.weights = torch.ones(self.num_ranks, 1, dtype=torch.float64, device="cpu") if is_push_sum else None
        self.options = {} if rule is None else rule.options
        self._t = 0  # rounds so far
        self._late: tuple[Tensor, Tensor | None] | None = None

    def estimates(self, x: Tensor) -> Tensor:
        """See `SimulatedMethod`."""
        return x if self.weights is None else x / self.weights.to(x.dtype)

    def forward(self, x: Tensor) -> None:
        """See `SimulatedMethod`."""
        is_idle = self.num_ranks == 1 or (self.clock.step == 0 and not self.clock.begins_with_round)
        action = self.schedule.action(self.clock.step)
        round_ = self.mixing.round(self._t) if self.mixing is not None and action is Action.GOSSIP else None
        self.clock.advance([] if action is Action.SKIP else [round_])
        late, self._late = self._late, None
        if late is not None:
            self._add(x, *late)
        if action is Action.SKIP or is_idle:
            return
        self._count_bytes([round_])
        corrections = self._corrections(x, round_)
        self._t += 1
        if self.is_overlapped:
            self._late = corrections
        else:
            self._add(x, *corrections)

    def _corrections(self, x: Tensor, round_: Rows | None) -> tuple[Tensor, Tensor | None]:
        """Of x and of the weights."""
        if round_ is None:
            return x.mean(0) - x, None if self.weights is None else self.weights.mean(0) - self.weights
        assert self.rule is not None
        correction = self.rule.correction(x, round_, self._t)
        return correction, None if self.weights is None else round_.mix(self.weights) - self.weights

    def _add(self, x: Tensor, correction: Tensor, of_weights: Tensor | None) -> None:
        x += correction
        if self.weights is not None and of_weights is not None:
            self.weights += of_weights

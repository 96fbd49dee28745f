"""Gossip under a `ConsensusControl`: by its law on the models of all workers, or at measured rates."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..consensus_control import ConsensusControl, ControlLaw, Differences, Observed, Step, next_step
from ..mixing_manager.base import MixingManager
from ..rounds.requests import SGDStep
from ..rounds.rows import Rows, StackedMixing
from ..schedule import Action
from .clock import ControlledRound, Exchanges, check

_ROUNDING = 1e-9  # the rounding error of a count times a rate; for measured rates the product is a whole number


class ControlledGossip:
    """Gossip under the law of a control on the models of all workers, like `ControlledMixer` on one rank.

    Args:
        mixing: W(t).
        control: the settings.
        rates: the measured rates that take the place of the law of the control, if they are known.
        overlap: whether a round takes effect one step later.

    Raises:
        ValueError: the weights are not doubly stochastic, or the control cannot have such rates.
    """

    momentum = None

    def __init__(
        self,
        mixing: MixingManager,
        control: ConsensusControl,
        rates: ControlRates | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        self.mixing = StackedMixing(mixing)
        if not mixing.is_doubly_stochastic:
            raise ValueError(
                f"got schedule={control} with {mixing}, expected doubly stochastic weights, with which a correction "
                "tells how far workers are apart; take dpsgd, or another graph"
            )
        self.law = ControlLaw(control) if rates is None else RateLaw(control, rates)
        self.control, self.overlap = control, overlap
        self._differences = Differences(mixing)
        self._t = 0  # rounds of gossip so far
        self._kept: Tensor | None = None  # the models after the last round
        self._late: Tensor | None = None
        self._num_steps = self._num_rounds = self._num_averages = 0

    @property
    def control_rates(self) -> ControlRates | None:
        """How often workers have communicated so far; None: never."""
        if not self._num_rounds:
            return None
        num_gossip = 0 if self.control.average_every == 1 else self._num_rounds
        counts = self._num_rounds, self._num_averages, self._t - num_gossip
        return ControlRates(*(count / self._num_steps for count in counts))

    def estimates(self, x: Tensor) -> Tensor:
        """See `Stacked`."""
        return x

    def settle(self, x: Tensor) -> None:
        """See `Stacked`."""
        if self._late is not None:
            x += self._late
            self._late = None

    def step(self, x: Tensor, k: int, action: Action, *, sgd: SGDStep | None = None) -> Exchanges:
        """See `Stacked`; the law takes the place of the action."""
        self._num_steps += 1
        self.settle(x)
        if len(x) == 1 or not self.law.starts_round(k):
            return []
        mixed, done = self._mix(x)
        self._num_rounds += 1
        self._num_averages += done.has_average
        if self.overlap:
            self._late = mixed - x
        else:
            x.copy_(mixed)
        return done

    def _mix(self, x: Tensor) -> tuple[Tensor, ControlledRound]:
        """Return the models [n, d] after a round, and the steps of the round; x does not change."""
        if isinstance(self.law, ControlLaw) and self.control.average_every != 1:
            self._differences.step(max(self.law.steps_between, 1))
        law, drifts = self.law.round(), [] if self._kept is None else _squares(x - self._kept)
        rounds, mixed, has_average, step = list[Rows](), x, False, next(law, None)
        while step is not None:
            if step is Step.GOSSIP:
                before, gain = mixed, self._differences.mix(self._t)
                rounds.append(self.mixing.round(self._t))
                self._t += 1
                mixed = rounds[-1].mix(before)
                observed = Observed(_squares(mixed - before), drifts, gain)
            else:
                mixed, has_average = mixed.mean(0).expand_as(x), True
                observed = Observed(_squares(mixed - x), drifts)
                self._differences.average()
            drifts = []
            step = next_step(law, observed)
        self._kept = mixed
        return mixed, ControlledRound(tuple(rounds), has_average)


@dataclass(frozen=True)
class ControlRates:
    """How often workers communicate under a `ConsensusControl`, per step of training, as a run has measured it.

    The rates depend on the model, the data and the learning rate, so only a run can tell them: some hundred steps, on
    few workers if need be. Rounds are then spread evenly over the steps; in training the first averages come earlier.

    Args:
        rounds_per_step: steps with a round, of gossip or an exact average, per step; above 0, at most 1.
        averages_per_step: exact averages per step; with average_every=1 every round is one, so leave the number out.
        added_rounds_per_step: rounds of gossip beyond the first one of a step, per step, with remedy="rounds".

    Raises:
        ValueError: a number is out of range.

    >>> stats = {"num_rounds": 100, "num_skipped_steps": 300, "num_averages": 20, "num_added_rounds": 0}
    >>> ControlRates.measured(stats)
    ControlRates(rounds_per_step=0.25, averages_per_step=0.05, added_rounds_per_step=0.0)
    """

    rounds_per_step: float
    averages_per_step: float = 0.0
    added_rounds_per_step: float = 0.0

    def __post_init__(self) -> None:
        rounds, averages, added = self.rounds_per_step, self.averages_per_step, self.added_rounds_per_step
        expected = "above 0 and at most 1: the share of the steps that have a round; take num_rounds of comm_stats()"
        check("rounds_per_step", rounds, 0 < rounds <= 1, f"{expected} over the number of steps")
        expected = f"at least 0 and no more than rounds_per_step={rounds}: an exact average ends a round"
        check("averages_per_step", averages, 0 <= averages <= rounds, expected)
        check("added_rounds_per_step", added, 0 <= added < math.inf, "a number of at least 0; leave it out")

    @classmethod
    def measured(cls, stats: Mapping[str, float]) -> ControlRates:
        """Return the rates of a run, by its `comm_stats()` after a `flush()`; the run was not resumed.

        Raises:
            ValueError: the run had no `ConsensusControl`, or no round.
        """
        counters = ("num_rounds", "num_skipped_steps", "num_averages", "num_added_rounds")
        if missing := [name for name in counters if name not in stats]:
            raise ValueError(
                f"got stats without {', '.join(missing)}, expected comm_stats() of a run with "
                "schedule=ConsensusControl(...)"
            )
        num_rounds, num_skipped, num_averages, num_added = (stats[name] for name in counters)
        if not num_rounds:
            raise ValueError("got stats of a run without a round, expected some hundred steps; train first")
        num_steps = num_rounds + num_skipped
        return cls(num_rounds / num_steps, num_averages / num_steps, num_added / num_steps)


class RateLaw:
    """A law of rounds and averages at measured rates, spread evenly, whatever the models are.

    With r rounds, a averages and e added rounds per step, ceil(k r) rounds begin in the first k steps. The first j
    rounds have floor(j a / r) averages and floor(j e / r) added rounds. So a run with the measured number of steps has
    the measured rounds, averages and bytes.

    Args:
        control: the settings; only `average_every=1` has an effect.
        rates: the measured rates.

    Raises:
        ValueError: the control cannot have such rates.
    """

    def __init__(self, control: ConsensusControl, rates: ControlRates) -> None:
        self.rates, self._num_rounds = rates, 0
        self._is_exact = control.average_every == 1
        if self._is_exact and (
            rates.added_rounds_per_step or rates.averages_per_step not in (0, rates.rounds_per_step)
        ):
            raise ValueError(
                f"got {rates} with average_every=1, expected rounds_per_step alone: each round is an exact average "
                "without gossip; leave the other rates out"
            )

    def starts_round(self, step: int) -> bool:
        """See `ControlLaw`."""
        rate = self.rates.rounds_per_step
        return math.ceil((step + 1) * rate - _ROUNDING) > math.ceil(step * rate - _ROUNDING)

    def round(self) -> Generator[Step, Observed, None]:
        """See `ControlLaw`."""
        num_gossip = 0 if self._is_exact else 1 + self._due(self.rates.added_rounds_per_step)
        has_average = self._is_exact or self._due(self.rates.averages_per_step) > 0
        self._num_rounds += 1
        for step in [Step.GOSSIP] * num_gossip + [Step.AVERAGE] * has_average:  # noqa: UP028 (a list takes no replies)
            yield step

    def _due(self, per_step: float) -> int:
        """Return the number of events in this round, for a rate of events per step."""
        per_round, before = per_step / self.rates.rounds_per_step, self._num_rounds
        return math.floor((before + 1) * per_round + _ROUNDING) - math.floor(before * per_round + _ROUNDING)


def _squares(x: Tensor) -> list[float]:
    """Return ||x_i||^2 of each worker, from x [n, d]."""
    return (torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) ** 2).tolist()

"""Simulation of gossip under `ConsensusControl`: by the law on the models of all ranks, or at measured rates."""

from __future__ import annotations

import math
from collections.abc import Generator

import torch
from torch import Tensor

from ..algorithms.d_psgd import DPSGD
from ..consensus_control import ConsensusControl, ControlLaw, Differences, Observed, Step, next_step
from ..mixing_manager.base import MixingManager
from ..rounds.rows import Rows, StackedMixing
from ..rounds.stacked import Stacked
from ..schedule import Schedule
from .clocks import Clock, ControlledRound
from .gossip import ClockedMethod, LockstepMethod
from .setting import ControlRates, Setting

_ROUNDING = 1e-9  # the rounding error of a count times a rate; for measured rates the product is a whole number


class ControlledMethod(ClockedMethod):
    """Gossip under the law of a control on the models of all ranks, like `ControlledMixer` on one rank.

    Args:
        mixing: W(t), doubly stochastic.
        control: the settings.
        law: the law that decides when a round begins and which steps it has.
        clock: the clock that advances; an `OverlapClock` with overlap.
        overlap: whether rounds run under the compute.

    Raises:
        ValueError: the weights are not doubly stochastic.
    """

    def __init__(
        self,
        mixing: StackedMixing,
        control: ConsensusControl,
        law: ControlLaw | RateLaw,
        clock: Clock,
        *,
        overlap: bool = False,
    ) -> None:
        if not mixing.mixing.is_doubly_stochastic:
            raise ValueError(
                f"got schedule={control} with {mixing.mixing}, expected doubly stochastic weights, with which a "
                "correction tells how far ranks are apart; take dpsgd, or another graph"
            )
        super().__init__(clock, overlap=overlap)
        self.control, self.law, self.mixing = control, law, mixing
        self._differences = Differences(mixing.mixing)
        self._t = 0  # rounds so far
        self._kept: Tensor | None = None  # the models after the last round
        self._late: Tensor | None = None
        self._num_controlled = self._num_added = self._num_averages = 0
        self._num_forwards = 0

    @property
    def control_rates(self) -> ControlRates | None:
        """See `SimulatedMethod`."""
        if not self._num_controlled:
            return None
        counts = self._num_controlled, self._num_averages, self._num_added
        return ControlRates(*(count / self._num_forwards for count in counts))

    def forward(self, x: Tensor) -> None:
        """See `SimulatedMethod`."""
        step, self._num_forwards = self._num_forwards, self._num_forwards + 1
        late, self._late = self._late, None
        if late is not None:
            x += late
        if self.num_ranks == 1 or not self.law.starts_round(step):
            self.clock.advance([])
            return
        mixed, done = self._mix(x)
        self.clock.advance(done)
        self._count(done)
        if self.is_overlapped:
            self._late = mixed - x
        else:
            x.copy_(mixed)

    def _mix(self, x: Tensor) -> tuple[Tensor, ControlledRound]:
        """Return the models [n, d] after a round, and the steps of the round; x does not change."""
        law, is_exact = self.law.round(), self.control.average_every == 1
        if isinstance(self.law, ControlLaw) and not is_exact:
            self._differences.step(max(self.law.steps_between, 1))
        drifts = [] if self._kept is None else _squares(x - self._kept)
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

    def _count(self, done: ControlledRound) -> None:
        self._num_controlled += 1
        self._num_added += max(len(done.rounds) - 1, 0)
        self._num_averages += done.has_average
        self._count_bytes([*done.rounds, *[None] * done.has_average])
        self.sent_bytes += done.measure_bytes(self.num_ranks)


class RateLaw:
    """A law of rounds and averages at measured rates, spread evenly, whatever the models are.

    With r rounds, a averages and e added rounds per step, ceil(k r) rounds begin in the first k steps. The first j
    rounds have floor(j a / r) averages and floor(j e / r) added rounds. So a simulation with the measured number of
    steps has the measured rounds, averages and bytes.

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
        for _ in range(num_gossip):
            yield Step.GOSSIP
        if has_average:
            yield Step.AVERAGE

    def _due(self, per_step: float) -> int:
        """Return the number of events in this round, for a rate of events per step."""
        per_round, before = per_step / self.rates.rounds_per_step, self._num_rounds
        return math.floor((before + 1) * per_round + _ROUNDING) - math.floor(before * per_round + _ROUNDING)


def gossip_of(mixing: MixingManager, setting: Setting, clock: Clock, *, overlap: bool = False) -> ClockedMethod:
    """Make the gossip of models by the schedule or the control of the setting.

    Raises:
        ValueError: the target of the control is in units of updates, but the problem has no updates and no rates are
            given.
    """
    schedule, rates = setting.schedule, setting.control_rates
    if not isinstance(schedule, ConsensusControl):
        return LockstepMethod(Stacked(DPSGD(), mixing, overlap=overlap), schedule, clock)
    if rates is None and schedule.is_relative and not setting.has_gradients:
        raise ValueError(
            f"got schedule={schedule} for a problem in which ranks agree and learn nothing, expected "
            "is_relative=False: there are no updates whose size the target could be in; take the problem digits"
        )
    law = ControlLaw(schedule) if rates is None else RateLaw(schedule, rates)
    return ControlledMethod(StackedMixing(mixing), schedule, law, clock, overlap=overlap)


def schedule_of(method: str, setting: Setting) -> Schedule:
    """Return the schedule of the setting, for a method that does not support a control.

    Raises:
        ValueError: the setting has a control.
    """
    if isinstance(setting.schedule, ConsensusControl):
        raise ValueError(
            f"got schedule={setting.schedule} with {method}, expected a Schedule: its recipe takes no control; take "
            "dpsgd, sgp or osgp, or leave --consensus-target out"
        )
    return setting.schedule


def _squares(x: Tensor) -> list[float]:
    """Return ||x_i||^2 of each rank, from x [n, d]."""
    return [float(square) for square in torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) ** 2]

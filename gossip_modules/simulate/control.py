"""How gossip under `ConsensusControl` is simulated: by its own law on the models of all ranks, or at measured rates."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from ..algorithms.d_psgd import DPSGD
from ..consensus_control import ConsensusControl, ControlLaw, Differences
from ..mixing_manager.base import MixingManager
from ..rounds.rows import Rows, StackedMixing
from ..rounds.stacked import Stacked
from ..schedule import Schedule
from .clocks import Clock, ControlledRound
from .gossip import ClockedMethod, LockstepMethod
from .setting import ControlRates, Setting

_ROUNDING = 1e-9  # of products of a count and a rate, which are whole numbers where rates were measured


class ControlledMethod(ClockedMethod):
    """Steps with any number of rounds of gossip, an exact average after them, or nothing, as the subclass says.

    Args:
        mixing: W(t), doubly stochastic.
        control: the settings.
        clock: what it takes; an `OverlapClock` with overlap.
        overlap: whether rounds run under the compute.

    Raises:
        ValueError: other weights, as with the real one.
    """

    def __init__(
        self, mixing: StackedMixing, control: ConsensusControl, clock: Clock, *, overlap: bool = False
    ) -> None:
        if not mixing.is_doubly_stochastic:
            raise ValueError(
                f"got schedule={control} with {mixing.mixing}, expected doubly stochastic weights, with which a "
                "correction tells how far ranks are apart; take dpsgd, or another graph"
            )
        super().__init__(clock, overlap=overlap)
        self.control, self.mixing = control, mixing
        self._t = 0  # rounds so far
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
        if self.num_ranks == 1 or not self._starts_round(step):
            self.clock.advance([])
            return
        mixed, done = self._mix(x)
        self.clock.advance(done)
        self._count(done)
        if self.is_overlapped:
            self._late = mixed - x
        else:
            x.copy_(mixed)

    @abstractmethod
    def _starts_round(self, step: int) -> bool:
        """Whether ranks communicate at this step; asked once for each, in their order."""

    @abstractmethod
    def _mix(self, x: Tensor) -> tuple[Tensor, ControlledRound]:
        """The models [n, d] after a step's rounds and average, and what these were; x does not change."""

    def _next_round(self) -> Rows:
        round_ = self.mixing.round(self._t)
        self._t += 1
        return round_

    def _count(self, done: ControlledRound) -> None:
        self._num_controlled += 1
        self._num_added += max(len(done.rounds) - 1, 0)
        self._num_averages += done.has_average
        self._count_bytes([*done.rounds, *[None] * done.has_average])
        self.sent_bytes += done.measure_bytes(self.num_ranks)


class ControlSimulation(ControlledMethod):
    """`ControlledMixer` of all ranks at once: the library's own law, on what the rounds have measured.

    Args:
        mixing, control, clock, overlap: see `ControlledMethod`.
    """

    def __init__(
        self, mixing: StackedMixing, control: ConsensusControl, clock: Clock, *, overlap: bool = False
    ) -> None:
        super().__init__(mixing, control, clock, overlap=overlap)
        self.law = ControlLaw(control)
        self._differences = Differences(mixing.mixing)
        self._kept: Tensor | None = None  # the models after the last round
        self._drifts: list[float] = []  # since then, squared; empty where they are not known

    def _starts_round(self, step: int) -> bool:
        return self.law.starts_round(step)

    def _mix(self, x: Tensor) -> tuple[Tensor, ControlledRound]:
        law, control = self.law, self.control
        self._drifts = [] if self._kept is None else _squares(x - self._kept)
        if control.average_every == 1:
            mixed = x.mean(0).expand_as(x)
            self._observe(mixed - x, 1.0)
            distance = law.estimate
            law.count_average()
            law.adapt(distance)
            self._kept = mixed
            return mixed, ControlledRound((), True)
        self._differences.step(max(law.steps_between, 1))
        rounds: list[Rows] = []
        mixed, is_apart = self._gossip(x, rounds)
        distance = law.estimate  # at the beginning of the step
        while is_apart and control.remedy == "rounds" and len(rounds) < control.max_rounds:
            mixed, is_apart = self._gossip(mixed, rounds)
        law.num_added_rounds += len(rounds) - 1
        has_average = law.is_average_due or (is_apart and control.remedy == "average")
        if has_average:
            mixed = mixed.mean(0).expand_as(x)
            law.average(distance, _squares(mixed - x))
            self._differences.average()
            distance = law.estimate
        law.adapt(distance)
        self._kept = mixed
        return mixed, ControlledRound(tuple(rounds), has_average)

    def _gossip(self, x: Tensor, rounds: list[Rows]) -> tuple[Tensor, bool]:
        """One round, which is added to `rounds`: the models after it, and whether those before were too far apart."""
        t = self._t
        rounds.append(self._next_round())
        mixed = rounds[-1].mix(x)
        return mixed, self._observe(mixed - x, self._differences.mix(t))

    def _observe(self, corrections: Tensor, gain: float) -> bool:
        drifts, self._drifts = self._drifts, []
        self.law.observe_update(drifts)
        return self.law.observe(_squares(corrections), gain)


class RateSimulation(ControlledMethod):
    """Rounds and averages as often as measured, spread evenly, whatever the models do.

    In the first k steps begin ceil(k r) rounds, for r of them per step. In the first j rounds are floor(j a / r)
    averages and floor(j e / r) added rounds, for a and e of them per step. So as many steps as were measured have the
    rounds, the averages and the bytes that were measured.

    Args:
        mixing, control, clock, overlap: see `ControlledMethod`; of the control only `average_every=1` matters.
        rates: as measured.

    Raises:
        ValueError: rates that this control does not have.
    """

    def __init__(
        self,
        mixing: StackedMixing,
        control: ConsensusControl,
        clock: Clock,
        *,
        rates: ControlRates,
        overlap: bool = False,
    ) -> None:
        super().__init__(mixing, control, clock, overlap=overlap)
        self.rates = rates
        self._is_exact = control.average_every == 1
        if self._is_exact and (
            rates.added_rounds_per_step or rates.averages_per_step not in (0, rates.rounds_per_step)
        ):
            raise ValueError(
                f"got {rates} with average_every=1, expected rounds_per_step alone: each round is an exact average, "
                "and none of gossip; leave the others out"
            )

    def _starts_round(self, step: int) -> bool:
        rate = self.rates.rounds_per_step
        return math.ceil((step + 1) * rate - _ROUNDING) > math.ceil(step * rate - _ROUNDING)

    def _mix(self, x: Tensor) -> tuple[Tensor, ControlledRound]:
        if self._is_exact:
            return x.mean(0).expand_as(x), ControlledRound((), True)
        num_rounds = 1 + self._due(self.rates.added_rounds_per_step)
        mixed, rounds = x, []
        for _ in range(num_rounds):
            rounds.append(self._next_round())
            mixed = rounds[-1].mix(mixed)
        has_average = self._due(self.rates.averages_per_step) > 0
        if has_average:
            mixed = mixed.mean(0).expand_as(x)
        return mixed, ControlledRound(tuple(rounds), has_average)

    def _due(self, per_step: float) -> int:
        """How many come with this round, of what comes so often per step."""
        per_round, before = per_step / self.rates.rounds_per_step, self._num_controlled
        return math.floor((before + 1) * per_round + _ROUNDING) - math.floor(before * per_round + _ROUNDING)


def gossip_of(mixing: MixingManager, setting: Setting, clock: Clock, *, overlap: bool = False) -> ClockedMethod:
    """Gossip of the models themselves, by the schedule of the setting or under its control.

    Raises:
        ValueError: a control whose target is in units of updates, where nothing is learnt and no rates are given.
    """
    schedule, rates = setting.schedule, setting.control_rates
    if not isinstance(schedule, ConsensusControl):
        return LockstepMethod(Stacked(DPSGD(), mixing, overlap=overlap), schedule, clock)
    if rates is None:
        if schedule.is_relative and not setting.has_gradients:
            raise ValueError(
                f"got schedule={schedule} for a problem in which ranks agree and learn nothing, expected "
                "is_relative=False: there are no updates whose size the target could be in; take the problem digits"
            )
        return ControlSimulation(StackedMixing(mixing), schedule, clock, overlap=overlap)
    return RateSimulation(StackedMixing(mixing), schedule, clock, rates=rates, overlap=overlap)


def schedule_of(method: str, setting: Setting) -> Schedule:
    """The schedule of a method that gossips and takes no control.

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
    """||x_i||^2 of each rank, of x [n, d]."""
    return [float(square) for square in torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) ** 2]

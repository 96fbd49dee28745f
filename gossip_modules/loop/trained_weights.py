"""Whether the parameters are the weights of training, or others that stand in their place for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.buffer import FlatBuffer
from ..state import transient
from .hooks import StepListener
from .moment import ParameterSamples
from .owner import Owner, no_owner
from .turn import Turn


class _Level(NamedTuple):
    """The weights of training with the corrections of the first flushes since the last round.

    Attributes:
        num_flushes: the number of these flushes; see `Engine.add_again`.
        values: samples of the parameters; empty if the vector had another layout then.
        weight: the push-sum weight of the numerator to which the next correction was added, float64 [1].
    """

    num_flushes: int
    values: list[Tensor]
    weight: Tensor


class TrainedWeights(StepListener):
    """Notices that evaluation swaps other weights into the parameters and back, so that no correction is lost by it.

    [Note: Swapped weights] Tools evaluate averages of the weights (EMA, SWA): they save the parameters, write the
    average over them (or point them to it), and put the saved ones back. A correction that is added in between is put
    away with the average, while peers keep their part of the exchange, so the sum over ranks changes. Two things
    prevent that, both from samples of each parameter, as the last optimizer step, or round, has left it:

    - Where a parameter differs from these, `train()` and `eval()` leave corrections in flight, for the next training
      forward.
    - Calls that need corrections at once (`state_dict()`, `settle()`, an average) add them to the weights that stand
      there. A parameter that is back to its samples by the next training forward, optimizer step or flush lacks the
      corrections that were added since, and they are added again, to this parameter alone.

    A swap by pointer leaves the memory of the vector to the script, and the vector moves to new memory: see
    `FlatBuffer.reattach`. Samples are of names and places in the layout, so they hold for vectors in any memory.

    Args:
        buffer: has the parameters.
        turn: another thread that flushes finds the samples and the parameters of one moment.
        max_flushes: the flushes that `Owner.add_again` tells apart; all later ones count as one.

    Attributes:
        owner: adds corrections again.
        levels: the weights with these corrections, if some were added; ascending.
        num_flushes: the flushes since the last round that have added corrections.
        is_step_open: set to True at each round; False after an optimizer step, once a round was in flight.
    """

    is_step_open = False

    owner: Callable[[], Owner | None] = transient(no_owner)

    is_subscribed: bool = transient(False)
    num_flushes: int = transient(0)
    levels: list[_Level] = transient([])
    _has_stepped: bool = transient(False)
    _samples: ParameterSamples | None = transient(None)  # None: the weights of training are not known
    _left: list[Tensor] = transient([])  # as the last step or round has left the parameters

    def __init__(self, buffer: FlatBuffer, turn: Turn, *, max_flushes: int) -> None:
        super().__init__(buffer)
        self._turn, self._max_flushes = turn, max_flushes

    def close(self) -> None:
        """Watch no more; idempotent."""
        super().close()
        self.forget()

    def forget(self) -> None:
        """The parameters are about to become others for good."""
        self._samples, self._left, self.levels = None, [], []

    def begin_round(self) -> None:
        """A round takes all corrections of before into account."""
        self.num_flushes, self.levels = 0, []

    def note(self) -> None:
        """A step or a round of training has left the parameters as they are now."""
        vector = self.buffer.vector
        samples = self._samples
        if samples is None or (samples.layout is not vector.layout and samples.layout != vector.layout):
            if not self.is_subscribed:
                self.subscribe()
            samples = self._samples = ParameterSamples(vector.layout, vector.raw.device)
            self._left = samples.read(vector)
        samples.layout = vector.layout  # an equal one, which is compared faster the next time
        samples.read_to(self._left, vector)
        if self.levels:
            self.levels = []

    def leave(self) -> None:
        """A script has put other tensors in the place of some parameters, whose values are still in the vector."""
        if not (self._has_stepped or self.levels):  # else the last step has left them
            self.note()

    def is_replaced(self) -> bool:
        """Whether a parameter is another than training has left; not known without a torch optimizer."""
        if not self._has_stepped or self._samples is None:
            return False
        if self._samples.layout != self.buffer.vector.layout:
            return True
        return not bool(self._matches().any(0).all())

    def recover(self) -> None:
        """Add corrections again that were added to other weights, where the weights of training are back."""
        samples = self._samples
        if samples is None or not self.levels or samples.layout != self.buffer.vector.layout:
            return
        for level, chosen in self._lacking():
            if (owner := self.owner()) is None:
                return
            vector = self.buffer.vector
            others = None if bool(chosen.all()) else vector.clone()
            owner.add_again(level.num_flushes, level.weight)
            if others is not None:
                samples.copy_parameters(vector, others, ~chosen)
            if newest := self.levels[-1].values:
                samples.merge(newest, samples.read(vector), chosen)

    def _matches(self) -> Tensor:
        """For each level and each parameter whether the parameter is at it now: bool [levels, parameters]."""
        samples = self._samples
        assert samples is not None, "the weights of training are not known"
        now = samples.read(self.buffer.vector)
        known = [level.values for level in self.levels] or [self._left]
        return torch.stack([samples.are_equal(now, values) for values in known])

    def _lacking(self) -> list[tuple[_Level, Tensor]]:
        """The levels at which parameters lack corrections, and these parameters: bool [parameters]."""
        matches = self._matches()
        num_levels = len(matches)
        at = torch.full(
            matches.shape[1:], -1, device="cpu"
        )  # of each parameter its newest level; -1: the weights are others
        for level in range(num_levels):
            at[matches[level]] = level
        # Some corrections are zero at all samples, such as those of the rows of an embedding. Such a parameter was
        # swapped like the others.
        decided = at[matches.sum(0) == 1].unique()
        if len(decided) == 1:
            at[matches[decided[0]]] = decided[0]
        return [(self.levels[k], at == k) for k in range(num_levels - 1) if bool((at == k).any())]

    def flush_at(self, weight: Tensor) -> None:
        """Corrections are about to be added to numerators of this push-sum weight, float64 [1]."""
        if self._samples is None:
            return
        if not self.levels:
            self.levels = [_Level(self.num_flushes, [x.clone() for x in self._left], weight.clone())]
        else:
            self.levels[-1] = self.levels[-1]._replace(weight=weight.clone())

    def flushed(self) -> None:
        """Corrections were added to the weights that stand in the parameters, outside of a round."""
        self.num_flushes = min(self.num_flushes + 1, self._max_flushes)
        samples, vector = self._samples, self.buffer.vector
        if samples is None:
            return
        if self.levels[-1].num_flushes == self.num_flushes:
            self.levels.pop()
        is_known = samples.layout == vector.layout  # else other weights stand there, in another dtype perhaps
        values = samples.read(vector) if is_known else []
        self.levels.append(_Level(self.num_flushes, values, vector.push_sum_weight.clone()))

    def before_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`."""
        if self.levels:
            with self._turn.change:
                self.recover()

    def after_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`."""
        with self._turn.change:
            self._has_stepped, self.is_step_open = True, False
            self.note()

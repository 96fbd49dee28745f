"""Gossip under a `ConsensusControl`, by its law on the models of all workers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..consensus_control import ConsensusControl, ControlLaw, Differences, Observed, Step, next_step
from ..mixing_manager.base import MixingManager
from ..rounds.requests import SGDStep
from ..rounds.rows import Rows, StackedMixing
from ..schedule import Action
from .clock import ControlledRound, Exchanges


class ControlledGossip:
    """Gossip under the law of a control on the models of all workers, like `ControlledMixer` on one rank.

    Args:
        mixing: W(t).
        control: the settings.
        overlap: whether a round takes effect one step later.

    Raises:
        ValueError: the weights are not doubly stochastic.
    """

    momentum = None

    def __init__(self, mixing: MixingManager, control: ConsensusControl, *, overlap: bool = False) -> None:
        self.mixing = StackedMixing(mixing)
        if not mixing.is_doubly_stochastic:
            raise ValueError(
                f"got schedule={control} with {mixing}, expected doubly stochastic weights, with which a correction "
                "tells how far workers are apart; take dpsgd, or another graph"
            )
        self.law, self.control, self.overlap = ControlLaw(control), control, overlap
        self._differences = Differences(mixing)
        self._t = 0  # rounds of gossip so far
        self._kept: Tensor | None = None  # the models after the last round
        self._late: Tensor | None = None
        self._num_steps = self._num_rounds = self._num_averages = 0

    @property
    def rates(self) -> tuple[float, float] | None:
        """The rounds and the exact averages so far, per step; None: no round."""
        return (self._num_rounds / self._num_steps, self._num_averages / self._num_steps) if self._num_rounds else None

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
        if self.control.average_every != 1:
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


def _squares(x: Tensor) -> list[float]:
    """Return ||x_i||^2 of each worker, from x [n, d]."""
    return (torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) ** 2).tolist()

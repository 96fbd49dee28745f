"""Interpolation: the factor f of a merge, x <- x + f (x_peer - x)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple


class Standing(NamedTuple):
    """The numbers sent by a worker with its model.

    clock: the number of its publications, interpolated at every merge; finite and >= 0. loss: the last reported
    training loss; None before the first report.
    """

    clock: float = 0.0
    loss: float | None = None


class Interpolation(ABC):
    """The factor f of a merge, from the standing of the two workers: 0 keeps the own model, 1 takes the peer's.

    f is a number in [0, 1] for all losses and clocks.
    """

    needs_loss: bool = False
    """Whether the own loss must have been reported."""
    needs_peer_loss: bool = False
    """Whether the peer's loss must have been reported."""

    @abstractmethod
    def factor(self, own: Standing, peer: Standing) -> float:
        """Return f for a worker with standing `own` and the model of `peer`."""


@dataclass(frozen=True)
class ConstantInterpolation(Interpolation):
    """f = value. With 1/2, the average of the two models (Jin et al. 2016, arXiv 1611.04581, pull-gossip).

    Raises:
        ValueError: `value` is outside [0, 1].
    """

    value: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.value <= 1.0:
            raise ValueError(f"got value={self.value}, expected a factor in [0, 1]; 0.5 averages the two models")

    def factor(self, own: Standing, peer: Standing) -> float:
        """See `Interpolation`."""
        return self.value


@dataclass(frozen=True)
class ClockInterpolation(Interpolation):
    """f = peer_clock / (own_clock + peer_clock): longer training gives more weight. Both zero: 1/2."""

    def factor(self, own: Standing, peer: Standing) -> float:
        """See `Interpolation`."""
        return _share(peer.clock, own.clock)


@dataclass(frozen=True)
class LossInterpolation(Interpolation):
    """f = own_loss / (own_loss + peer_loss): the worker with the larger loss takes more of the other's model.

    A negative loss counts as zero; both zero: 1/2. A worker with an infinite or NaN loss takes the peer's model whole:
    f = 1. A peer with such a loss has been refused before.
    """

    needs_loss = True
    needs_peer_loss = True

    def factor(self, own: Standing, peer: Standing) -> float:
        """See `Interpolation`. Both losses must have been reported."""
        assert own.loss is not None, "a merge by loss comes after the first report of one"
        assert peer.loss is not None, "a merge by loss comes after the peer's first report of one"
        if not math.isfinite(own.loss):
            return 1.0
        return _share(own.loss, peer.loss)


@dataclass(frozen=True)
class DivergenceThreshold(Interpolation):
    """f of another interpolation, times own_loss / threshold where the own loss is below the threshold.

    Nearly converged workers move less and less towards each other. A negative loss counts as zero.

    Args:
        base: the other interpolation.
        threshold: in the unit of the loss, > 0.

    Raises:
        ValueError: `threshold` is not a positive number.
    """

    base: Interpolation
    threshold: float
    needs_loss = True

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold < math.inf:
            raise ValueError(
                f"got threshold={self.threshold}, expected a positive number; divergence_threshold=0 switches it off"
            )
        object.__setattr__(self, "needs_peer_loss", self.base.needs_peer_loss)

    def factor(self, own: Standing, peer: Standing) -> float:
        """See `Interpolation`. The own loss must have been reported."""
        assert own.loss is not None, "a merge with a threshold comes after the first report of a loss"
        factor = self.base.factor(own, peer)
        return factor * max(own.loss, 0.0) / self.threshold if own.loss < self.threshold else factor


def _share(x: float, y: float) -> float:
    """x / (x + y), negative numbers as zero, 1/2 for two zeros; finite also where x + y is not."""
    x, y = max(x, 0.0), max(y, 0.0)
    larger = max(x, y)
    if larger == 0.0:
        return 0.5
    return (x / larger) / (x / larger + y / larger)

"""RateUnits: scales vectors that are sums of optimizer steps when the learning rate changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..flat.layout import FlatLayout
from ..state import State, leaf
from .vector import Vector

Rates: TypeAlias = float | Mapping[str, float]
"""One learning rate for all parameters, or a rate for each of some parameters, by name."""


class RateUnits(State):
    """The learning rate that is the unit of vectors.

    [Note: Units of the learning rate] A vector that is a sum of optimizer steps is proportional to their learning rate.
    Before a round it is scaled to the rate of the latest steps, each parameter by its own rate. A step at a rate of
    zero changes nothing, so the round after it uses zeros and afterwards the vector gets its old values back. If a rate
    is more than 1 / sqrt(eps) times the one before (3,000 times in float32), rounding errors would dominate the scaled
    vector, so it restarts at zero.

    Attributes:
        rates: the units, never zero; None: not known.
        kept: during a round at rate zero, the parts of vectors that it uses as zeros, with their values.
    """

    rates: Rates | None = leaf(None)
    kept: list[tuple[Tensor, Tensor]] = leaf([], is_saved=False)

    def scale(self, vectors: Sequence[Vector], rates: Rates, layout: FlatLayout | None) -> None:
        """Scale vectors to units of these rates.

        Args:
            vectors: the vectors, mutated.
            rates: one rate for all parameters, or rates by name.
            layout: the layout with the places of the parameters; needed for rates by name.
        """
        before = self.rates
        if not isinstance(before, Mapping) and not isinstance(rates, Mapping):
            for vector in vectors:
                for x in vector.parts:
                    self._scale(x, before, rates)
            self.rates = rates or before
            return
        assert layout is not None, "rates by name need the places of the parameters"
        now: dict[str, float | None] = {}
        for k, segment in enumerate(layout.segments):
            for first, spec in segment.places():
                old, new = rate_of(before, spec.name), rate_of(rates, spec.name)
                now[spec.name] = new or old
                for vector in vectors:
                    self._scale(vector.parts[k][first : first + spec.numel], old, new)
        self.rates = merged(now)

    def put_back(self) -> None:
        """Restore the values of vectors that a round at rate zero used as zeros."""
        for x, before in self.kept:
            x.copy_(before)
        self.kept = []

    def _scale(self, x: Tensor, old: float | None, new: float | None) -> None:
        if old is None or new is None or old == new:
            return
        if new == 0:
            self.kept.append((x, x.clone()))
        if new == 0 or new > old * torch.finfo(x.dtype).eps ** -0.5:
            x.zero_()
        else:
            x.mul_(new / old)


def rate_of(rates: Rates | None, name: str) -> float | None:
    """Return the rate of the parameter with this name; None: not known."""
    return rates.get(name) if isinstance(rates, Mapping) else rates


def merged(rates: Mapping[str, float | None]) -> Rates | None:
    """Return the known rates, as one number if all parameters have the same rate; None if no rate is known."""
    known = {name: rate for name, rate in rates.items() if rate is not None}
    values = set(known.values())
    if len(known) == len(rates) and len(values) == 1:
        return values.pop()
    return known or None

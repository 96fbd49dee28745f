"""RateUnits: vectors that are made of steps follow the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..flat.layout import FlatLayout
from .vector import Vector

Rates: TypeAlias = float | Mapping[str, float]
"""One learning rate of all parameters, or those of some of them, by name."""


class RateUnits:
    """The learning rate in whose units vectors are.

    [Note: Units of the learning rate] A vector that is made of steps is as large as the learning rate of these steps.
    Before a round it is scaled to the rate of the steps that the round is about, each parameter by its own. A step at a
    rate of zero moves nothing, so the round after it uses zeros, and the vector stays as it was. Where the rate is more
    than 1 / sqrt(eps) times the one before (3,000 times in float32), a vector of that size is rounding: it starts from
    zero.

    Attributes:
        rates: the units; never zero. None: nobody knows them.
    """

    def __init__(self) -> None:
        self.rates: Rates | None = None
        self.kept: list[tuple[Tensor, Tensor]] = []  # during a round: parts of vectors, and their values after it

    def scale(self, vectors: Sequence[Vector], rates: Rates, layout: FlatLayout | None) -> None:
        """The vectors <- themselves in units of these rates.

        Args:
            vectors: mutated.
            rates: one for all parameters, or by name.
            layout: has the places of the parameters; None: there is one rate.
        """
        before = self.rates
        if rates == before:
            return
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
        """Where the rate was zero in the last round, vectors <- their values before it."""
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
    """The rate of the parameter of that name, where it is known."""
    return rates.get(name) if isinstance(rates, Mapping) else rates


def merged(rates: Mapping[str, float | None]) -> Rates | None:
    """The rates that are known: one number where all parameters have one; None where there are none."""
    known = {name: rate for name, rate in rates.items() if rate is not None}
    values = set(known.values())
    if len(known) == len(rates) and len(values) == 1:
        return values.pop()
    return known or None

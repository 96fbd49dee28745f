"""Carried: the vectors that an update rule keeps of one model from round to round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..flat.vector import FlatVector
from .step_rates import Rates, merged, rate_of


class Carried:
    """The parameters of a rank, the vector that is mixed, and what is carried from round to round.

    Carried vectors and `sent` have at least float32 where the model is narrower: they hold differences of models. The
    running statistics of the model travel with `sent`, and no rule touches them.

    [Note: Units of the learning rate] A vector that is made of steps is as large as the learning rate that they were
    taken with. Before a round it is scaled to the rate of the steps that the round is about, each parameter by its own.
    A step at a rate of zero is none, so the round after it uses zeros, and the vector stays as it was. Where the rate
    is more than 1 / sqrt(eps) times the one before (3,000 times in float32), a vector of that size is rounding: it
    starts from zero.

    Args:
        x: the model; only its layout and device matter.
        names: of the vectors that are carried.
        scaled: the names of those that are in units of the learning rate.

    Attributes:
        sent: what is mixed.
        num_rounds: the rounds so far.
    """

    def __init__(self, x: FlatVector, names: Sequence[str], *, scaled: Sequence[str] = ()) -> None:
        self._layout = x.layout
        self._scaled = tuple(scaled)
        self._rates: Rates | None = None  # that the scaled vectors are in units of; never zero
        self._kept: list[tuple[Tensor, Tensor]] = []  # during a round: parts of them, and what they are after it
        self.num_rounds = 0
        self.sent = FlatVector.zeros(x.layout.with_dtypes(_widened), x.raw.device)
        self._sent = _parameters_of(self.sent)
        self._x = _parameters_of(x)
        self._vectors = {name: [torch.zeros_like(sent) for sent in self._sent] for name in names}

    def each(self, *names: str) -> Iterator[tuple[Tensor, ...]]:
        """The parameters of each dtype: (x, sent, and the vectors of these names), flat tensors of one length."""
        return zip(self._x, self._sent, *(self._vectors[name] for name in names), strict=True)

    def vector(self, name: str) -> Sequence[Tensor]:
        """The carried vector of that name, a flat tensor for each dtype."""
        return self._vectors[name]

    def take(self, x: FlatVector, rates: Rates | None = None) -> None:
        """Before a round: x is the model; the buffers of `sent` <- those of x.

        Args:
            x: read now, and by the round.
            rates: the learning rates of the steps since the last round, by the name of the parameter or one for all;
                see [Note: Units of the learning rate]. None: nobody knows them, and nothing is scaled.
        """
        self._x = _parameters_of(x)
        for sent, own in zip(self.sent.buffers, x.buffers, strict=True):
            sent.copy_(own)
        self._put_back()
        if self._scaled and rates is not None and rates != self._rates:
            self._scale_to(rates)

    def write_to(self, x: FlatVector) -> None:
        """After a round: x <- sent, with its buffers."""
        for own, sent in zip(x.segments, self.sent.segments, strict=True):
            own.copy_(sent)
        self._put_back()

    def _scale_to(self, rates: Rates) -> None:
        """[Note: Units of the learning rate]"""
        before = self._rates
        if not isinstance(before, Mapping) and not isinstance(rates, Mapping):
            for tensors in self._scaled_tensors():
                for x in tensors:
                    self._scale(x, before, rates)
            self._rates = rates or before
            return
        now: dict[str, float | None] = {}
        for k, segment in enumerate(self._layout.where(is_buffer=False).segments):
            for first, spec in segment.places():
                old, new = rate_of(before, spec.name), rate_of(rates, spec.name)
                now[spec.name] = new or old
                for tensors in self._scaled_tensors():
                    self._scale(tensors[k][first : first + spec.numel], old, new)
        self._rates = merged(now)

    def _scaled_tensors(self) -> Iterator[Sequence[Tensor]]:
        return (self._vectors[name] for name in self._scaled)

    def _scale(self, x: Tensor, old: float | None, new: float | None) -> None:
        """x, a part of a carried vector: in units of the rate `old`, to be of `new`."""
        if old is None or new is None or old == new:
            return
        if new == 0:
            self._kept.append((x, x.clone()))
        if new == 0 or new > old * torch.finfo(x.dtype).eps ** -0.5:
            x.zero_()
        else:
            x.mul_(new / old)

    def _put_back(self) -> None:
        """Where the rate was zero in the last round, the carried vectors are what they were before it."""
        for x, before in self._kept:
            x.copy_(before)
        self._kept = []

    def has_tensors_of(self, x: FlatVector) -> bool:
        """Whether x has the tensors that this was made for, in any dtype, on any device."""
        return x.layout is self._layout or x.layout.with_dtypes(_widened) == self.sent.layout

    def fits(self, x: FlatVector) -> bool:
        """Whether x has these tensors, on the same device."""
        return self.has_tensors_of(x) and x.raw.device == self.sent.raw.device

    def state_dict(self) -> dict[str, Any]:
        """The carried vectors; shares memory with this object, as that of a module does."""
        self._put_back()
        vectors = {name: list(tensors) for name, tensors in self._vectors.items()}
        rates = {"rates": self._rates} if self._scaled else {}
        return {"num_rounds": self.num_rounds, "vectors": vectors, **rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave; copies it.

        Raises:
            ValueError: it is the state of a model with other tensors.
        """
        for name, tensors in self._vectors.items():
            found, own = ([x.numel() for x in side] for side in (state["vectors"][name], tensors))
            if found != own:
                raise ValueError(
                    f"got a carried vector with {found} elements, expected {own}: other tensors were trained when it "
                    "was saved; freeze the same parameters, or load the model alone: module.load_state_dict"
                )
            for mine, theirs in zip(tensors, state["vectors"][name], strict=True):
                mine.copy_(theirs)
        self.num_rounds = state["num_rounds"]
        self._rates = state.get("rates")  # older versions have none


def _parameters_of(x: FlatVector) -> Sequence[Tensor]:
    return x.where(is_buffer=False).segments


def _widened(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32

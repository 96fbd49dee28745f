"""Carried: the vectors that an update rule keeps of one model from round to round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..flat.vector import FlatVector


class Carried:
    """The parameters of a rank, the vector that is mixed, and what is carried from round to round.

    Carried vectors and `sent` have at least float32 where the model is narrower: they hold differences of models. The
    running statistics of the model travel with `sent`, and no rule touches them.

    Args:
        x: the model; only its layout and device matter.
        names: of the vectors that are carried.

    Attributes:
        sent: what is mixed.
        num_rounds: the rounds so far.
    """

    def __init__(self, x: FlatVector, names: Sequence[str]) -> None:
        self._layout = x.layout
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

    def take(self, x: FlatVector) -> None:
        """Before a round: x is the model; the buffers of `sent` <- those of x."""
        self._x = _parameters_of(x)
        for sent, own in zip(self.sent.buffers, x.buffers, strict=True):
            sent.copy_(own)

    def write_to(self, x: FlatVector) -> None:
        """x <- sent, with its buffers."""
        for own, sent in zip(x.segments, self.sent.segments, strict=True):
            own.copy_(sent)

    def has_tensors_of(self, x: FlatVector) -> bool:
        """Whether x has the tensors that this was made for, in any dtype, on any device."""
        return x.layout is self._layout or x.layout.with_dtypes(_widened) == self.sent.layout

    def fits(self, x: FlatVector) -> bool:
        """Whether x has these tensors, on the same device."""
        return self.has_tensors_of(x) and x.raw.device == self.sent.raw.device

    def state_dict(self) -> dict[str, Any]:
        """The carried vectors; shares memory with this object, as that of a module does."""
        vectors = {name: list(tensors) for name, tensors in self._vectors.items()}
        return {"num_rounds": self.num_rounds, "vectors": vectors}

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


def _parameters_of(x: FlatVector) -> Sequence[Tensor]:
    return x.where(is_buffer=False).segments


def _widened(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32

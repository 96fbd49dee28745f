"""Anchor: where the ranks last began together, with the optimizer that moves it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.vector import FlatVector

MakeOptimizer: TypeAlias = Callable[[Sequence[Tensor]], Optimizer]
"""Makes an optimizer of parameters, such as `lambda parameters: torch.optim.Adam(parameters, lr=1e-3)`."""


class Anchor:
    """The anchor phi of one rank, the vector that is mixed in an outer step, and the outer optimizer.

    phi and `sent` have at least float32 where the model is narrower, so that small steps are not lost. Floating-point
    buffers of the model travel along and are averaged; no optimizer touches them.

    Args:
        x: what the anchor starts as; copied.
        make_optimizer: see `OuterMethod.make_optimizer`.

    Attributes:
        phi: the anchor.
        sent: what is mixed; the same layout.
        parameters: phi without buffers, one flat tensor for each of its segments; share memory with phi.
        gradients: `sent` without buffers, likewise.
    """

    def __init__(self, x: FlatVector, make_optimizer: MakeOptimizer) -> None:
        self._layout = x.layout
        self.phi = FlatVector.zeros(x.layout.with_dtypes(_widened), x.raw.device)
        self.sent = self.phi.like()
        for own, theirs in zip(self.phi.segments, x.segments, strict=True):
            own.copy_(theirs)
        self.parameters = parameters_of(self.phi)
        self.gradients = parameters_of(self.sent)
        # A shard of a model that has fewer elements than processes may be empty.
        self.optimizer = make_optimizer(self.parameters) if self.parameters else None

    def take_drift(self, x: Sequence[Tensor]) -> None:
        """sent <- phi - x, without buffers."""
        for drift, phi, own in zip(self.gradients, self.parameters, x, strict=True):
            torch.sub(phi, own, out=drift)

    def step(self) -> None:
        """phi <- a step of the outer optimizer with the gradient `sent`."""
        if self.optimizer is None:
            return
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        try:
            self.optimizer.step()
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def take_buffers(self, x: FlatVector) -> None:
        """The buffers of `sent` <- those of x."""
        for sent, own in zip(self.sent.buffers, x.buffers, strict=True):
            sent.copy_(own)

    def keep_buffers(self) -> None:
        """The buffers of phi <- those of `sent`, which were mixed."""
        for phi, sent in zip(self.phi.buffers, self.sent.buffers, strict=True):
            phi.copy_(sent)

    def write_to(self, x: FlatVector) -> None:
        """x <- phi."""
        for own, phi in zip(x.segments, self.phi.segments, strict=True):
            own.copy_(phi)

    def has_tensors_of(self, x: FlatVector) -> bool:
        """Whether x has the tensors that phi was made of, in any dtype, on any device."""
        return x.layout is self._layout or x.layout.with_dtypes(_widened) == self.phi.layout

    def fits(self, x: FlatVector) -> bool:
        """Whether x has these tensors, on the device of phi."""
        return self.has_tensors_of(x) and x.raw.device == self.phi.raw.device

    def state_dict(self) -> dict[str, Any]:
        """phi and the state of the optimizer; shares memory with this object, as that of a module does."""
        optimizer = {} if self.optimizer is None else self.optimizer.state_dict()
        return {"phi": list(self.phi.segments), "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave; copies it.

        Raises:
            ValueError: it is the state of a model with other tensors.
        """
        found, own = ([x.numel() for x in phi] for phi in (state["phi"], self.phi.segments))
        if found != own:
            raise ValueError(
                f"got an anchor with {found} elements, expected {own}: other tensors were trained when it was saved; "
                "freeze the same parameters, or load the model alone: module.load_state_dict"
            )
        for mine, theirs in zip(self.phi.segments, state["phi"], strict=True):
            mine.copy_(theirs)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


def parameters_of(x: FlatVector) -> Sequence[Tensor]:
    """The parameters of each segment of x, without buffers; share memory."""
    return x.where(is_buffer=False).segments


def _widened(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32

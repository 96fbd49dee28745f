"""StepWatcher: the base of objects that watch the optimizers of one model; and samples of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .buffer import FlatBuffer
from .step_hooks import STEP_HOOKS, holds_any

_SAMPLE = 64  # elements of a tensor that are compared


class StepWatcher:
    """A member of STEP_HOOKS that is told of the steps of optimizers over the parameters of a buffer.

    A copy has optimizers of its own, which are not known yet: its `__setstate__` begins anew with the attributes that
    `__getstate__` gave.

    Args:
        buffer: has the parameters.
    """

    order = 0

    def __init__(self, buffer: FlatBuffer) -> None:
        self._buffer = buffer
        self._watch()

    def _watch(self) -> None:
        STEP_HOOKS.add(self)

    def close(self) -> None:
        """Watch no more; idempotent."""
        STEP_HOOKS.discard(self)

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """See `Stepped`."""
        return holds_any(optimizer, self._buffer.parameters)

    def before_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""

    def after_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()


def sample(x: Tensor) -> Tensor:
    """Some elements of x, the same ones in tensors of one shape: flat, without autograd, maybe a view."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]


class Samples:
    """Some elements of tensors, and their values at some time: writes through `.data` change no version of a tensor.

    Args:
        tensors: of which the elements are views.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._views = [sample(x) for x in tensors if x.numel()]
        self.values = self.now()

    def now(self) -> list[Tensor]:
        """Copies of the elements as they are now."""
        return [view.clone() for view in self._views]

    @torch.no_grad()
    def take(self) -> None:
        """The values are those of now."""
        for value, view in zip(self.values, self._views, strict=True):
            value.copy_(view)

    def equal(self, values: Sequence[Tensor]) -> bool:
        """Whether the elements have these values now."""
        return len(values) == len(self._views) and all(map(torch.equal, values, self._views))

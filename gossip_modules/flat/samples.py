"""Samples: some elements of tensors, to notice that a script has written them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .sharded import local_of

_SAMPLE = 64  # elements of a tensor that are compared


def sample(x: Tensor) -> Tensor:
    """Some elements of x, the same ones in tensors of one shape: flat, without autograd, maybe a view."""
    flat = local_of(x.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]


class Samples:
    """Some elements of tensors, and their values at some time: writes through `.data` change no version of a tensor.

    Args:
        tensors: the elements are views of them.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._views = [sample(x) for x in tensors if x.numel()]
        self.values = self.now()

    def now(self) -> list[Tensor]:
        """Copies of the elements as they are now."""
        return [view.clone() for view in self._views]

    def take(self) -> None:
        """Keep the present values."""
        for value, view in zip(self.values, self._views, strict=True):
            value.copy_(view)

    def equal(self, values: Sequence[Tensor]) -> bool:
        """Whether the elements have these values now."""
        return len(values) == len(self._views) and all(map(torch.equal, values, self._views))

"""Whether the parameters are the weights of training, or others that stand in their place for a while."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...flat.buffer import FlatBuffer
from ...flat.step_hooks import STEP_HOOKS, holds_any
from ...flat.vector import FlatVector

_SAMPLE = 256  # elements of each dtype that are compared


class OwnWeights:
    """Notices that evaluation swaps other weights into the parameters and back, so that no correction is lost by it.

    [Note: Swapped weights] Tools evaluate averages of the weights (EMA, SWA): they save the parameters, write the
    average over them, and put back what they have saved. A correction that is added in between is put away with the
    average, while peers keep their part of the exchange, so the sum over ranks changes. Two things prevent that, both
    from samples of the parameters as the last optimizer step, or round, has left them:

    - Where parameters differ from these, `train()` and `eval()` leave corrections in flight, for the next training
      forward.
    - What needs corrections at once (`state_dict()`, `settle()`, an average) adds them to whatever stands there. Where
      the parameters are back to the samples by the next training forward, optimizer step or flush, the corrections
      that were added since are gone, and are added again.

    Writes that go through `.data`, as most of those tools', change no version of a tensor, so that values are compared.

    Args:
        buffer: has the parameters.
        add_again: adds the corrections again that were added since the last round.

    Attributes:
        weight: the push-sum weight that the last corrections outside of rounds were added at, float64 [1].
    """

    order = 1  # after `Debias`: samples are of estimates, which storage holds outside of steps

    def __init__(self, buffer: FlatBuffer, add_again: Callable[[], None]) -> None:
        self._buffer = buffer
        self.bind(add_again)
        self._start()

    def bind(self, add_again: Callable[[], None]) -> None:
        """Call `add_again`, a bound method, without keeping its object alive."""
        self._add_again = weakref.WeakMethod(add_again)

    def _start(self) -> None:
        self.weight = torch.ones(1, dtype=torch.float64, device="cpu")
        self._is_listening = self._has_stepped = False
        self._vector: FlatVector | None = None  # of which there are samples
        self._views: list[Tensor] = []  # the elements that are compared
        self._left: list[Tensor] = []  # what they were after the last step or round
        self._flushed: list[Tensor] = []  # after corrections were added outside of rounds, if any were

    def close(self) -> None:
        """Watch no more; idempotent."""
        STEP_HOOKS.discard(self)
        self.forget()

    def forget(self) -> None:
        """The parameters are about to become others for good."""
        self._vector, self._flushed = None, []

    # What the wrapper tells and asks.

    @torch.no_grad()
    def note(self) -> None:
        """A step or a round of training has left the parameters as they are now."""
        if not self._is_listening:
            self._is_listening = True
            STEP_HOOKS.add(self)
        if self._vector is not self._buffer.vector:
            self._vector = self._buffer.vector
            segments = [segment for segment in self._buffer.parameter_segments if segment.numel()]
            self._views = [segment[:: max(1, segment.numel() // _SAMPLE)] for segment in segments]
            self._left = [torch.empty_like(view) for view in self._views]
        for left, view in zip(self._left, self._views, strict=True):
            left.copy_(view)
        self._flushed = []

    def is_replaced(self) -> bool:
        """Whether the parameters are others than training has left; not known without a torch optimizer."""
        return self._has_stepped and self._is_known and not (self._equals(self._left) or self._equals(self._flushed))

    def recover(self) -> None:
        """Add again what was added to other weights, if those of training are back."""
        if not (self._flushed and self._is_known and self._equals(self._left)):
            return
        if (add_again := self._add_again()) is not None and not _are_equal(self._flushed, self._left):
            add_again()
            self.flushed()

    def flush_at(self, weight: Tensor) -> None:
        """Corrections are about to be added to numerators of this push-sum weight, float64 [1]."""
        self.weight = weight.clone()

    def flushed(self) -> None:
        """Corrections were added to what stands in the parameters, outside of a round."""
        if self._is_known:
            self._flushed = [view.clone() for view in self._views]

    @property
    def _is_known(self) -> bool:
        return self._vector is not None and self._vector is self._buffer.vector

    def _equals(self, samples: Sequence[Tensor]) -> bool:
        return len(samples) == len(self._views) and _are_equal(samples, self._views)

    # See `Stepped`.

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """See `Stepped`."""
        return holds_any(optimizer, self._buffer.parameters)

    def before_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""
        self.recover()

    def after_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""
        self._has_stepped = True
        self.note()

    def __getstate__(self) -> dict[str, Any]:
        return {"_buffer": self._buffer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


def _are_equal(samples: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(samples, others, strict=True))

"""Whether the parameters are the weights of training, or others that stand in their place for a while."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...flat.buffer import FlatBuffer
from ...flat.samples import Samples
from ...flat.step_hooks import STEP_HOOKS, Stepped
from ...flat.vector import FlatVector


class OwnWeights(Stepped):
    """Notices that evaluation swaps other weights into the parameters and back, so that no correction is lost by it.

    [Note: Swapped weights] Tools evaluate averages of the weights (EMA, SWA): they save the parameters, write the
    average over them, and put the saved ones back. A correction that is added in between is put away with the average,
    while peers keep their part of the exchange, so the sum over ranks changes. Two things prevent that, both from
    samples of the parameters as the last optimizer step, or round, has left them:

    - Where parameters differ from these, `train()` and `eval()` leave corrections in flight, for the next training
      forward.
    - Calls that need corrections at once (`state_dict()`, `settle()`, an average) add them to the weights that stand
      there. Where the parameters are back to the samples by the next training forward, optimizer step or flush, the
      corrections that were added since are gone, and are added again.

    Args:
        buffer: has the parameters.
        add_again: adds the corrections again that were added since the last round.

    Attributes:
        added: values of the samples after corrections were added outside of rounds; empty if none were since then.
        weight: the push-sum weight at which the last corrections outside of rounds were added, float64 [1].
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
        self._has_stepped = False
        self._vector: FlatVector | None = None  # of the samples
        self._left = Samples(())  # as the last step or round has left the parameters
        self.added: list[Tensor] = []

    def close(self) -> None:
        """Watch no more; idempotent."""
        super().close()
        self.forget()

    def forget(self) -> None:
        """The parameters are about to become others for good."""
        self._vector, self.added = None, []

    def note(self) -> None:
        """A step or a round of training has left the parameters as they are now."""
        if self._vector is not self._buffer.vector:
            STEP_HOOKS.add(self)
            self._vector = self._buffer.vector
            self._left = Samples(self._vector.parameters)
        self._left.take()
        self.added = []

    def is_replaced(self) -> bool:
        """Whether the parameters are others than training has left; not known without a torch optimizer."""
        left, is_known = self._left, self._has_stepped and self._is_known
        return is_known and not (left.equal(left.values) or left.equal(self.added))

    def recover(self) -> None:
        """Add again the corrections that were added to other weights, if the weights of training are back."""
        left = self._left
        if not (self.added and self._is_known and left.equal(left.values)):
            return
        if (add_again := self._add_again()) is not None and not all(map(torch.equal, self.added, left.values)):
            add_again()
            self.flushed()

    def flush_at(self, weight: Tensor) -> None:
        """Corrections are about to be added to numerators of this push-sum weight, float64 [1]."""
        self.weight = weight.clone()

    def flushed(self) -> None:
        """Corrections were added to the weights that stand in the parameters, outside of a round."""
        if self._is_known:
            self.added = self._left.now()

    @property
    def _is_known(self) -> bool:
        return self._vector is not None and self._vector is self._buffer.vector

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

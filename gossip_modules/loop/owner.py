"""The model of one rank, as the observer of its training calls it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Owner(Protocol):
    """The model of one rank. Its `Loop` does not keep it alive."""

    def round_after_step(self) -> None:
        """Run the round of a step, in a hook on the step of an optimizer; see `RoundTime.STEP`."""

    def reattach(self) -> None:
        """Attach tensors that were put in place of ours; see `FlatBuffer.reattach`."""

    def add_again(self, num_flushes: int, at: Tensor) -> None:
        """Add the corrections of flushes again: see [Note: Swapped weights] of `TrainedWeights`.

        Args:
            num_flushes: the number of the first flushes, whose corrections are in the weights already.
            at: the push-sum weight at which the next correction was added, float64 [1].
        """


def no_owner() -> None:
    """In place of a reference to an owner: it is bound later."""

"""ModelWorld: the other processes of a training, as one process sees them."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ..transport.base import Transport

Average = TypeVar("Average")


class ModelWorld:
    """A world of ranks that stays as it is: one generation for ever, which ends where a rank fails.

    Several processes may hold one model together, as one rank. Their decisions about its rounds must be equal, so each
    of them calls `agree`, `first` and `sum_over_processes` at the same point, and all get the same result.

    Args:
        sharers: a transport over the processes that hold the model of this process and run its rounds together, for
            tensors in CPU memory; None: this process holds a whole model, and decides alone.

    Attributes:
        changes: whether workers may die and join.
        has_lost_peers: whether members of this generation had failed at the last step, so that the graph has holes.
    """

    changes: bool = False
    has_lost_peers: bool = False

    def __init__(self, sharers: Transport | None = None) -> None:
        self._sharers = sharers

    @property
    def sharers(self) -> Transport | None:
        """See the arguments."""
        return self._sharers

    def enter(self) -> None:
        """Come to the others, when the model is ready for its first step."""

    @property
    def own_name(self) -> str | None:
        """The name of this worker in statistics; None: its rank."""
        return None

    @property
    def num_bytes_sent(self) -> int:
        """The bytes that this process has sent in another way than over the transport of its rounds."""
        return 0

    def averager_of(self, exact: Average) -> Average:
        """Return the average over all ranks for evaluation; `exact`: by an all-reduce over the transport."""
        return exact

    def at_step(self) -> bool:
        """Begin the generation that is due, at the safe point of a training step.

        Returns:
            Whether the model may have changed, such as by a donor's state.
        """
        return False

    def compare_layouts(self) -> None:
        """In the first round of a generation: take over the exchanged tensors of the others, where this rank is new."""

    def repeat_step(self) -> None:
        """The round of this step has failed: the next call of `at_step` is of the same step."""

    def stats(self) -> dict[str, float]:
        """Counters of the workers, for `comm_stats()`."""
        return {}

    def close(self) -> None:
        """Leave the world."""

    # The processes that hold one model.

    def agree(self, is_true: bool) -> bool:
        """Return whether `is_true` holds on all processes of this model."""
        if (sharers := self.sharers) is None:
            return is_true
        num_false = torch.tensor([0.0 if is_true else 1.0], device=sharers.device)
        sharers.all_reduce(num_false, what="a decision of the processes of one model")
        return num_false.item() == 0.0

    def first(self, x: Tensor) -> None:
        """x, in CPU memory, <- its values in the first process of this model, in place."""
        if (sharers := self.sharers) is not None:
            sharers.broadcast(x, source=0, what="the measurements of the processes of one model")

    def sum_over_processes(self, x: Tensor) -> None:
        """x, in CPU memory, <- its sum over the processes of this model, in place."""
        if (sharers := self.sharers) is not None:
            total = x.to(sharers.device)
            sharers.all_reduce(total, what="a sum over the processes of one model")
            x.copy_(total)


ALONE = ModelWorld()
"""The world of a process that holds a whole model, among ranks that stay as they are."""

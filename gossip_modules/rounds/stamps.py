"""Stamps: by which the ranks of a generation come to have one memory."""

from __future__ import annotations

import torch

from ..transport.agreement import broadcast_state
from ..transport.base import Transport
from .memory import Memory


class Stamps:
    """The steps of the last rounds of one memory, and whether the memory is that of all ranks.

    [Note: One memory] Where all ranks keep the same vectors (`has_equal_memory`), and workers may die and join, all
    would train on around different anchors for ever if one of them took a round that another did not take. An average
    takes effect on all or on none, but for a worker that dies while it says that it has the result (`ElasticAverage`).
    And a worker that joins has the memory that its donor had some steps before. So a memory has a stamp, the step of
    the last round that it took. The first step of a generation, the same on all workers, runs

        stamps of all workers, and the steps of rounds that were lost <- all_gather
        memory <- that of the first rank with the largest stamp; x <- as after a recovery     # of ranks that are behind
        the last round that was lost                                                    # unless one is due anyway

    If that fails too, since another worker dies, the next generation does it. Until then there are no rounds that
    average, and workers train alone. So the ranks of one generation have the same memory, bit for bit.

    Attributes:
        taken, lost: the steps of the last rounds that took effect, and that were lost.
        is_agreed: whether all ranks have the memory of the newest stamp.
        has_tried: whether that was tried in this generation.
    """

    def __init__(self) -> None:
        self.taken = self.lost = 0
        self.is_agreed = self.has_tried = True

    def begin_generation(self, *, is_needed: bool) -> None:
        """Workers have come or gone. is_needed: whether they must have one memory."""
        self.is_agreed = self.has_tried = not is_needed

    def agree(self, memory: Memory, transport: Transport, *, who: object) -> bool:
        """Take the newest memory, if no worker fails; returns whether it was another one. who: the algorithm."""
        self.has_tried, self.is_agreed = True, False
        mine = torch.tensor([self.taken, self.lost], device="cpu")
        everyone = mine.new_empty(transport.world_size * 2)
        try:
            transport.all_gather(everyone, mine, what="the last rounds of all workers")
            taken, lost = everyone.view(-1, 2).unbind(1)
            newest, source = int(taken.max()), int(taken.argmax())
            is_behind = self.taken < newest
            if int(taken.min()) < newest:
                state = memory.state_dict(joins=True) if source == transport.rank else None
                state = broadcast_state(transport, state, source=source, what=f"the memory of {who}")
                if is_behind:
                    memory.take(state)
            self.taken, self.lost, self.is_agreed = newest, int(lost.max()), True
        except (ConnectionError, TimeoutError):
            return False  # the next generation does it
        return is_behind

    def state(self) -> list[int]:
        """For a checkpoint: the two steps."""
        return [self.taken, self.lost]

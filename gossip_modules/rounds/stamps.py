"""Stamps: the steps of the last rounds, by which the workers of a new generation agree on one memory."""

from __future__ import annotations

import torch

from ..state import Restart, State, leaf
from ..transport.agreement import broadcast_state, rows_of_all
from ..transport.base import Transport
from ..worlds.all_or_none import MayBeLost
from .memory import Memory


class Stamps(State):
    """The steps of the last rounds of a memory, and whether all ranks have agreed on the newest memory.

    [Note: One memory] Some algorithms need equal vectors on all ranks (`has_equal_memory`). Under a membership memories
    may differ for two reasons. An average takes effect on all ranks or on none, unless a worker dies during the
    confirmation (`GlobalAverage`). And a joining worker has the memory that its donor had some steps before. Workers
    would then train around different anchors for ever. So a memory has a stamp, the step of its last round. The first
    step of a generation, which is equal on all workers, runs

        stamps and steps of lost rounds of all workers <- all_gather
        memory <- memory of the first rank with the largest stamp; x <- recovered model     # on ranks that are behind
        the last lost round                                                         # unless a round is due anyway

    If this fails because another worker dies, the next generation runs it. Until then no round averages, and workers
    train alone. So the ranks of one generation have equal memories, bit for bit.

    Attributes:
        taken, lost: the step of the last round that took effect, and of the last round that was lost; -1: other workers
            have not had it, see `go_back`.
        is_needed: whether the workers of a generation must agree on one memory.
        is_agreed: whether all ranks have the memory with the newest stamp.
        has_tried: whether this generation has run the agreement.
    """

    taken: int = leaf(0)
    lost: int = leaf(0)

    def __init__(self) -> None:
        self.is_needed = False
        self.is_agreed = self.has_tried = True

    def restarted(self, event: Restart) -> None:
        """See `State`: the workers of a new generation agree."""
        if event is Restart.GENERATION:
            self.is_agreed = self.has_tried = not self.is_needed

    def go_back(self, k: int) -> None:
        """Take no memory of this rank for the newest if it had rounds after step k, which comes only now.

        A donor that was left out of a generation has such rounds, without the workers of the generation.
        """
        if self.taken > k:
            self.taken = -1
        if self.lost > k:
            self.lost = self.taken

    def agree(self, memory: Memory, transport: Transport, *, who: object) -> bool:
        """Take the newest memory of all workers.

        Args:
            memory: the memory of this rank, mutated.
            transport: the transport between the workers.
            who: the algorithm, for errors.

        Returns:
            Whether the memory changed. False if a worker failed.
        """
        self.has_tried, self.is_agreed = True, False
        mine = torch.tensor([self.taken, self.lost], device="cpu")
        with MayBeLost(transport):
            taken, lost = rows_of_all(transport, mine, what="the last rounds of all workers").unbind(1)
            newest, source = int(taken.max()), int(taken.argmax())
            is_behind = self.taken < newest
            if int(taken.min()) < newest:
                state = memory.state_dict(joins=True) if source == transport.rank else None
                state = broadcast_state(transport, state, source=source, what=f"the memory of {who}")
                if is_behind:
                    memory.take(state)
            self.taken, self.lost, self.is_agreed = newest, int(lost.max()), True
            return is_behind
        return False  # the next generation runs it

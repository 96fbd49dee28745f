"""Compressed gossip where a rank says the same to all its peers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingWeights
from .compressed import CompressedGossiper, Memory, copy_memory
from .message import Envelope


class BroadcastGossiper(CompressedGossiper):
    """Compressed gossip where a rank says the same to all its peers; an algorithm writes `say` and `hear`.

    Both are called for each section in code, with what `remember` allocated for it. Beside that, memory holds one
    message of this rank and one of each peer.
    """

    def __init__(self, *, step_size: float) -> None:
        super().__init__(step_size=step_size)
        self.num_messages = 0
        self._memory: list[Memory] = []
        self._inbox: dict[int, Envelope] = {}

    @abstractmethod
    def remember(self, x: Tensor) -> Memory:
        """New memory for a section of values like x, by name."""

    @abstractmethod
    def message_like(self, x: Tensor) -> Tensor:
        """A message for a section of values like x: uint8 [num_bytes]."""

    @abstractmethod
    def say(self, x: Tensor, memory: Memory, message: Tensor) -> None:
        """message <- the code of x, which is not changed; `memory` is updated."""

    @abstractmethod
    def hear(self, target: Tensor, memory: Memory, messages: Sequence[tuple[Tensor, float]]) -> None:
        """target <- target + step_size (W - I) s'.

        Args:
            target: where the correction is added, like x.
            memory: updated.
            messages: every message with its weight in the row of W - I, this rank's own first.
        """

    def number_of(self, peer: int) -> int:
        """See `CompressedGossiper`."""
        return self.num_messages

    def letters_of(self, peer: int) -> tuple[Envelope, Envelope]:
        """See `CompressedGossiper`: the outgoing one is the same for all."""
        if peer not in self._inbox:
            self._inbox[peer] = Envelope(self._own.sizes, self._device)
        return self._own, self._inbox[peer]

    def num_coded_bytes(self) -> int:
        """See `CompressedGossiper`."""
        return sum(piece.numel() for piece in self._own.pieces[len(self._exact) :])

    def write(self, s: FlatVector) -> None:
        """See `CompressedGossiper`."""
        self.copy_exact(s, self._own)
        messages = self._own.pieces[len(self._exact) :]
        for x, memory, message in zip(self.coded(s), self._memory, messages, strict=True):
            self.say(x, memory, message)

    def read(self, s: FlatVector, weights: MixingWeights) -> None:
        """See `CompressedGossiper`."""
        self.num_messages += 1
        self.add_exact(s, weights)
        letters = [(self._own, weights.own - 1), *((self._inbox[j], weight) for j, weight in weights.inp.items())]
        targets = self.targets(s)
        for index, (target, memory) in enumerate(zip(targets, self._memory, strict=True), start=len(self._exact)):
            self.hear(target, memory, [(letter.pieces[index], weight) for letter, weight in letters])
        self.apply_targets(s, targets)

    def make_memory(self, coded: Sequence[Tensor]) -> None:
        """See `CompressedGossiper`."""
        self.num_messages = 0
        self._memory = [self.remember(x) for x in coded]
        sizes = [*self.exact_sizes, *((torch.uint8, self.message_like(x).numel()) for x in coded)]
        self._own, self._inbox = Envelope(sizes, self._device), {}

    def memory(self) -> dict[str, Any]:
        """See `CompressedGossiper`."""
        return {"num_messages": self.num_messages, "sections": self._memory}

    def set_memory(self, memory: Mapping[str, Any]) -> None:
        """See `CompressedGossiper`."""
        copy_memory(self, self._memory, memory["sections"])
        self.num_messages = memory["num_messages"]


def checked_compressor(compressor: Compressor) -> Compressor:
    """The compressor, or ValueError."""
    if not isinstance(compressor, Compressor):
        raise ValueError(f"got compressor={compressor!r}, expected a Compressor; pass e.g. SignNorm() or TopK(0.01)")
    return compressor

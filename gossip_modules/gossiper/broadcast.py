"""The base of compressed gossip in which a rank sends one message to all its peers: CHOCO, DeepSqueeze, Moniqua."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingWeights
from .compressed import CompressedGossiper, State, copy_state
from .gossiper import Messages
from .message import MessageBuffer


class BroadcastGossiper(CompressedGossiper):
    """Compressed gossip in which a rank sends one message to all its peers.

    A round, for each run of compressed tensors x with its state:

        compress(x, state, message)            before the exchange
        send message to all peers, receive theirs
        apply(x, state, messages)              x = x + step_size (W - I) s'

    An algorithm writes `init_state`, `message_like`, `compress` and `apply`. Beside the state, a rank keeps one message
    of its own and one of each peer.
    """

    def __init__(self, *, step_size: float) -> None:
        super().__init__(step_size=step_size)
        self.num_messages = 0
        self._states: list[State] = []
        self._inbox: dict[int, MessageBuffer] = {}

    @abstractmethod
    def init_state(self, x: Tensor) -> State:
        """The state before the first round, for a run of values like x: tensors by name."""

    @abstractmethod
    def message_like(self, x: Tensor) -> Tensor:
        """A new message for a run of values like x: uint8 [num_bytes]."""

    @abstractmethod
    def compress(self, x: Tensor, state: State, message: Tensor) -> None:
        """Write the message for x. `state` is updated, x is not changed."""

    @abstractmethod
    def apply(self, target: Tensor, state: State, messages: Sequence[tuple[Tensor, float]]) -> None:
        """target <- target + step_size (W - I) s'.

        Args:
            target: the tensor that the correction is added to, like x. It may be zero instead of x: do not read it.
            state: the state of this run of tensors; updated.
            messages: each message with its weight in the row of W - I; the message of this rank comes first.
        """

    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """See `Gossiper`."""
        self.prepare(s)
        if self._is_elastic:  # workers that came later have sent fewer, and random choices must be the same
            self.num_messages = self._t
        return super().encode(s, out_peers, in_peers)

    def message_number(self, peer: int) -> int:
        """See `LinkedGossiper`."""
        return self.num_messages

    def buffers_for(self, peer: int) -> tuple[MessageBuffer, MessageBuffer]:
        """See `CompressedGossiper`; the outgoing message is the same for all peers."""
        if peer not in self._inbox:
            self._inbox[peer] = MessageBuffer(self._own.sizes, self._device)
        return self._own, self._inbox[peer]

    def num_compressed_bytes(self) -> int:
        """See `CompressedGossiper`."""
        return sum(field.numel() for field in self._own.fields[len(self._exact_runs) :])

    def write_messages(self, s: FlatVector) -> None:
        """See `CompressedGossiper`."""
        self.copy_exact(s, self._own)
        messages = self._own.fields[len(self._exact_runs) :]
        for x, state, message in zip(self.values_to_compress(s), self._states, messages, strict=True):
            self.compress(x, state, message)

    def apply_messages(self, s: FlatVector, weights: MixingWeights) -> None:
        """See `CompressedGossiper`."""
        self.num_messages += 1
        self.add_exact(s, weights)
        buffers = [(self._own, weights.own - 1), *((self._inbox[j], weight) for j, weight in weights.inp.items())]
        targets = self.targets(s)
        for index, (target, state) in enumerate(zip(targets, self._states, strict=True), start=len(self._exact_runs)):
            self.apply(target, state, [(buffer.fields[index], weight) for buffer, weight in buffers])
        self.add_targets(s, targets)

    def allocate_state(self, values: Sequence[Tensor]) -> None:
        """See `CompressedGossiper`."""
        self.num_messages = 0
        self._states = [self.init_state(x) for x in values]
        sizes = [*self.exact_sizes, *((torch.uint8, self.message_like(x).numel()) for x in values)]
        self._own, self._inbox = MessageBuffer(sizes, self._device), {}

    def state(self) -> dict[str, Any]:
        """See `CompressedGossiper`."""
        return {"num_messages": self.num_messages, "sections": self._states}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `CompressedGossiper`."""
        copy_state(self, self._states, state["sections"])
        self.num_messages = state["num_messages"]


def checked_compressor(compressor: Compressor) -> Compressor:
    """The compressor; raises ValueError if it is something else."""
    if not isinstance(compressor, Compressor):
        raise ValueError(f"got compressor={compressor!r}, expected a Compressor; pass e.g. SignNorm() or TopK(0.01)")
    return compressor

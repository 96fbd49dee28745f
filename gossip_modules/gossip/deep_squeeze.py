"""DeepSqueeze: gossip of compressed models, with the error of compression fed back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from .broadcast import BroadcastGossiper, checked_compressor
from .compressed import Memory


class DeepSqueeze(BroadcastGossiper):
    """v_i = x_i + e_i;  e_i <- v_i - C(v_i);  x_i <- x_i + step_size sum_j W_ij (C(v_j) - C(v_i)).

    What compression loses in one round is added to what is compressed in the next. The whole model is compressed, not
    a difference that vanishes, so ranks agree only up to the error of compression times the step size; in return no
    rank follows its neighbours, so the graph may change from round to round, and memory is one model.

    Tang et al., "DeepSqueeze: Decentralization Meets Error-Compensated Compression", 2019, arXiv 1907.07346,
    Algorithm 1.

    Args:
        compressor: C, any.
        step_size: of consensus, eta in the paper; 0.01 for signs on a ring of 8.

    Example:
        >>> gossiper = DeepSqueeze(SignNorm(), step_size=0.01)
        >>> model = GossipDataParallel(model, push_sum=False, gossiper=gossiper)
    """

    def __init__(self, compressor: Compressor, *, step_size: float) -> None:
        super().__init__(step_size=step_size)
        self.compressor = checked_compressor(compressor)

    def remember(self, x: Tensor) -> Memory:
        """See `BroadcastGossiper`. `error` is e."""
        return {"error": torch.zeros_like(x)}

    def message_like(self, x: Tensor) -> Tensor:
        """See `BroadcastGossiper`."""
        return self.compressor.message_like(x)

    def say(self, x: Tensor, memory: Memory, message: Tensor) -> None:
        """See `BroadcastGossiper`."""
        memory["error"].add_(x)
        self.compressor.compress(memory["error"], message, t=self.num_messages)
        self.compressor.add_decompressed(message, memory["error"], alpha=-1.0)

    def hear(self, target: Tensor, memory: Memory, messages: Sequence[tuple[Tensor, float]]) -> None:
        """See `BroadcastGossiper`."""
        for message, weight in messages:
            self.compressor.add_decompressed(message, target, alpha=self.step_size * weight)

    def __repr__(self) -> str:
        return f"DeepSqueeze({self.compressor}, step_size={self.step_size})"

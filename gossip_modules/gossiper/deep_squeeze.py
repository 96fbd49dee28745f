"""DeepSqueeze: gossip of compressed models, with the error of compression fed back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from .broadcast import BroadcastGossiper, checked_compressor
from .compressed import State


class DeepSqueeze(BroadcastGossiper):
    """DeepSqueeze: each rank sends its compressed model and adds what compression lost to what it compresses next.

    A round on rank i with the neighbours j, after the local SGD step; e_i is zero at first:

        v_i = x_i + e_i                                         compress
        q_i = C(v_i)
        e_i = v_i - q_i
        send q_i to all neighbours, receive their q_j           (broadcast.py)
        x_i = x_i + step_size sum_j W_ij (q_j - q_i)            apply

    The model itself is compressed, not a difference that shrinks, so the ranks agree only up to the error of
    compression times the step size. In return a rank needs no copy of its neighbours' models: the graph may change from
    round to round, and the state takes as much memory as the model.

    Tang et al., "DeepSqueeze: Decentralization Meets Error-Compensated Compression", 2019, arXiv 1907.07346,
    Algorithm 1.

    Args:
        compressor: the compressor C; any.
        step_size: the consensus step size, eta in the paper; 0.01 for signs on a ring of 8.

    Example:
        >>> gossiper = DeepSqueeze(SignNorm(), step_size=0.01)
        >>> model = GossipDataParallel(model, push_sum=False, gossiper=gossiper)
    """

    is_elastic = True

    def __init__(self, compressor: Compressor, *, step_size: float) -> None:
        super().__init__(step_size=step_size)
        self.compressor = checked_compressor(compressor)

    def init_state(self, x: Tensor) -> State:
        """See `BroadcastGossiper`. `error` is e."""
        return {"error": torch.zeros_like(x)}

    def compress(self, x: Tensor, state: State, message: Tensor) -> None:
        """v = x + e;  message <- C(v);  e <- v - C(v)."""
        state["error"].add_(x)
        self.compressor.compress(state["error"], message, t=self.num_messages)
        self.compressor.add_decompressed(message, state["error"], alpha=-1.0)

    def apply(self, target: Tensor, state: State, messages: Sequence[tuple[Tensor, float]]) -> None:
        """target <- target + step_size sum_j (W - I)_ij C(v_j)."""
        for message, weight in messages:
            self.compressor.add_decompressed(message, target, alpha=self.step_size * weight)

    def message_like(self, x: Tensor) -> Tensor:
        """See `BroadcastGossiper`."""
        return self.compressor.message_like(x)

    def __repr__(self) -> str:
        return f"DeepSqueeze({self.compressor}, step_size={self.step_size})"

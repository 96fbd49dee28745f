"""CHOCO-SGD: gossip of compressed differences to a public copy of each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from .broadcast import BroadcastGossiper, checked_compressor
from .compressed import Memory


class Choco(BroadcastGossiper):
    """q_i = C(x_i - x̂_i);  x̂_j <- x̂_j + q_j for i and its neighbours;  x_i <- x_i + step_size sum_j W_ij (x̂_j - x̂_i).

    Every rank has a public copy x̂ that its neighbours can follow from the compressed q alone. As the x̂ approach the
    x, so do the differences that are compressed, and the error of compression vanishes: consensus is exact in the
    limit, for any contraction C. The neighbours' copies are not kept, only drift_i = sum_j W_ij (x̂_j - x̂_i), so memory
    is three models whatever the degree. The graph must not change: drift is a sum over the same neighbours all along.

    The step size has to fit the compression and the graph, and too large a one diverges: about 0.4 for signs, 0.04 for
    the largest 1 % on a ring of 8.

    Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019, arXiv 1902.00340, Algorithm 2 in the memory-efficient form of its appendix.

    Args:
        compressor: C, a contraction.
        step_size: of consensus, gamma in the paper.

    Example:
        >>> ring = RingGraph(8, peers_per_itr=2)
        >>> model = GossipDataParallel(model, graph=ring, push_sum=False, gossiper=Choco(SignNorm(), step_size=0.4))
    """

    needs_static_graph = True

    def __init__(self, compressor: Compressor, *, step_size: float) -> None:
        super().__init__(step_size=step_size)
        self.compressor = checked_compressor(compressor)
        self._scratch: dict[tuple[torch.dtype, int], Tensor] = {}  # of differences, by kind of section

    def make_memory(self, coded: Sequence[Tensor]) -> None:
        """See `CompressedGossiper`."""
        self._scratch = {(x.dtype, x.numel()): torch.empty_like(x) for x in coded}
        super().make_memory(coded)

    def memory(self) -> dict[str, Any]:
        """See `CompressedGossiper`; drift belongs to the neighbours and their weights."""
        return {"mixing": repr(self.mixing), **super().memory()}

    def set_memory(self, memory: Mapping[str, Any]) -> None:
        """See `CompressedGossiper`."""
        if memory["mixing"] != repr(self.mixing):
            raise ValueError(
                f"{self}: got state of {memory['mixing']}, expected {self.mixing}, since it holds a sum over the "
                "neighbours; resume on the same graph"
            )
        super().set_memory(memory)

    def remember(self, x: Tensor) -> Memory:
        """See `BroadcastGossiper`. `public` is x̂; both begin at zero, as in the paper."""
        return {"public": torch.zeros_like(x), "drift": torch.zeros_like(x)}

    def message_like(self, x: Tensor) -> Tensor:
        """See `BroadcastGossiper`."""
        return self.compressor.message_like(x)

    def say(self, x: Tensor, memory: Memory, message: Tensor) -> None:
        """See `BroadcastGossiper`."""
        difference = torch.sub(x, memory["public"], out=self._scratch[x.dtype, x.numel()])
        self.compressor.compress(difference, message, t=self.num_messages)
        self.compressor.add_decompressed(message, memory["public"])

    def hear(self, target: Tensor, memory: Memory, messages: Sequence[tuple[Tensor, float]]) -> None:
        """See `BroadcastGossiper`."""
        for message, weight in messages:
            self.compressor.add_decompressed(message, memory["drift"], alpha=weight)
        target.add_(memory["drift"], alpha=self.step_size)

    def __repr__(self) -> str:
        return f"Choco({self.compressor}, step_size={self.step_size})"

"""CHOCO-SGD: gossip of compressed differences between each model and a public copy of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from .broadcast import BroadcastGossiper, checked_compressor
from .compressed import State


class Choco(BroadcastGossiper):
    """CHOCO-SGD: each rank sends the compressed difference between its model x_i and a public copy x̂_i of it.

    A round on rank i with the neighbours j, after the local SGD step; x̂_i and drift_i are zero at first:

        q_i = C(x_i - x̂_i)                                      compress
        x̂_i = x̂_i + q_i
        send q_i to all neighbours, receive their q_j           (broadcast.py)
        drift_i = drift_i + sum_j W_ij (q_j - q_i)              apply
        x_i = x_i + step_size drift_i

    All neighbours of a rank follow its public copy, since the q alone determine it. As the x̂ approach the x, the
    differences that are compressed shrink, and so does the error of compression: for any contraction C the ranks agree
    exactly in the limit. A rank does not store the copies of its neighbours, only drift_i = sum_j W_ij (x̂_j - x̂_i), so
    the state takes twice the memory of the model, whatever the degree, and a scratch tensor takes as much again. The
    graph must not change, because drift_i is a sum over the same neighbours in all rounds.

    The step size has to fit the compressor and the graph; training diverges if it is too large. On a ring of 8 about
    0.4 works for signs and 0.04 for the largest 1 % of the entries.

    Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019, arXiv 1902.00340, Algorithm 2 in the memory-efficient form of its appendix.

    Args:
        compressor: the compressor C; a contraction.
        step_size: the consensus step size, gamma in the paper.

    Example:
        >>> ring = RingGraph(8, peers_per_itr=2)
        >>> model = GossipDataParallel(model, graph=ring, push_sum=False, gossiper=Choco(SignNorm(), step_size=0.4))
    """

    needs_static_graph = True

    def __init__(self, compressor: Compressor, *, step_size: float) -> None:
        super().__init__(step_size=step_size)
        self.compressor = checked_compressor(compressor)
        self._scratch: dict[tuple[torch.dtype, int], Tensor] = {}  # holds x - x̂, one for each dtype and length

    def init_state(self, x: Tensor) -> State:
        """See `BroadcastGossiper`. `public` is x̂; both are zero at first, as in the paper."""
        return {"public": torch.zeros_like(x), "drift": torch.zeros_like(x)}

    def compress(self, x: Tensor, state: State, message: Tensor) -> None:
        """message <- q = C(x - x̂);  x̂ <- x̂ + q."""
        difference = torch.sub(x, state["public"], out=self._scratch[x.dtype, x.numel()])
        self.compressor.compress(difference, message, t=self.num_messages)
        self.compressor.add_decompressed(message, state["public"])

    def apply(self, target: Tensor, state: State, messages: Sequence[tuple[Tensor, float]]) -> None:
        """drift <- drift + sum_j (W - I)_ij q_j;  target <- target + step_size drift."""
        for message, weight in messages:
            self.compressor.add_decompressed(message, state["drift"], alpha=weight)
        target.add_(state["drift"], alpha=self.step_size)

    def message_like(self, x: Tensor) -> Tensor:
        """See `BroadcastGossiper`."""
        return self.compressor.message_like(x)

    def allocate_state(self, values: Sequence[Tensor]) -> None:
        """See `CompressedGossiper`."""
        self._scratch = {(x.dtype, x.numel()): torch.empty_like(x) for x in values}
        super().allocate_state(values)

    def state(self) -> dict[str, Any]:
        """See `CompressedGossiper`; includes the mixing, since drift is a sum over its neighbours and weights."""
        return {"mixing": repr(self.mixing), **super().state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `CompressedGossiper`."""
        if state["mixing"] != repr(self.mixing):
            raise ValueError(
                f"{self}: got state of {state['mixing']}, expected {self.mixing}, since it holds a sum over the "
                "neighbours; resume on the same graph"
            )
        super().load_state(state)

    def __repr__(self) -> str:
        return f"Choco({self.compressor}, step_size={self.step_size})"

"""SPARTA: in each step ranks average a small random share of their parameters, and leave the others alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..compression.sparsifier import RandomK
from ..gossiper.broadcast import BroadcastGossiper
from ..gossiper.compressed import State
from ..graph_manager.base import GraphManager
from ..graph_manager.static_graphs import CompleteGraph


class Sparta(BroadcastGossiper):
    """SPARTA: each rank sends a random share of its parameters, the same ones on all ranks, which are averaged.

    A round on rank i with the neighbours j; M is drawn from the seed and the number of the round:

        M       = a share `ratio` of the parameters             RandomK, alike on all ranks
        q_i     = x_i on M                                      compress
        send q_i to all neighbours, receive their q_j           (broadcast.py)
        x_i     = x_i + sum_j W_ij (q_j - q_i), on M            apply

    So a round is one of D-PSGD for the parameters in M, without any error of compression, and nothing is kept from
    round to round. The mean over ranks stays; after t rounds a share (1 - ratio)^t of them was never averaged.
    As published all ranks average with all: that is the `CompleteGraph`, the default, on which a rank sends n - 1
    messages. Any undirected graph may take its place, which sends fewer and agrees more slowly.

    Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging", 2025,
    https://openreview.net/forum?id=stFPf3gzq1.

    Args:
        ratio: the share of the parameters that is averaged in a round, in (0, 1]; 0.0005 to 0.005 are published.
        seed: of the choice; the same on all ranks.

    Raises:
        ValueError: ratio or seed is out of range.

    Example:
        >>> model = GossipDataParallel(model, gossiper=Sparta())
    """

    is_elastic = True

    def __init__(self, ratio: float = 0.005, *, seed: int = 0) -> None:
        super().__init__(step_size=1.0)
        self.compressor = RandomK(ratio, seed=seed)

    def default_graph(self, world_size: int) -> GraphManager:
        """See `Gossiper`."""
        return CompleteGraph(world_size, peers_per_itr=max(world_size - 1, 1))

    def init_state(self, x: Tensor) -> State:
        """See `BroadcastGossiper`: nothing."""
        return {}

    def message_like(self, x: Tensor) -> Tensor:
        """See `BroadcastGossiper`."""
        return self.compressor.message_like(x)

    def compress(self, x: Tensor, state: State, message: Tensor) -> None:
        """message <- x on M."""
        self.compressor.compress(x, message, t=self.num_messages)

    def apply(self, target: Tensor, state: State, messages: Sequence[tuple[Tensor, float]]) -> None:
        """target <- target + sum_j (W - I)_ij q_j."""
        for message, weight in messages:
            self.compressor.add_decompressed(message, target, alpha=weight)

    def __repr__(self) -> str:
        return f"Sparta({self.compressor.ratio}, seed={self.compressor.seed})"

"""The static exponential graph: every rank sends along all powers of two at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .base import as_count
from .shift_graph import ShiftGraph


class StaticExponentialGraph(ShiftGraph):
    """Peers at distances 1, 2, 4, ... below n, all tau = ceil(log2 n) of them in every round; directed.

    With uniform weights 1/(tau + 1), a round multiplies the distance from the average by at most (tau - 1)/(tau + 1),
    the second largest singular value of W if n is even; that of an odd n is smaller. From Ying, Yuan, Chen, Hu, Pan,
    Yin, "Exponential Graph is Provably Efficient for Decentralized Deep Training", NeurIPS 2021, arXiv:2110.13363.
    Their one-peer graph, one distance after the other, is `NPeerDynamicDirectedExponentialGraph`.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: None: all tau peers in every round. Fewer peers, or a schedule of them, take turns.

    Raises:
        ValueError: more than tau peers.

    >>> StaticExponentialGraph(8).out_peers(rank=0, t=5)
    (1, 2, 4)
    """

    def __init__(self, world_size: int, peers_per_itr: int | Mapping[int, int] | None = None) -> None:
        if peers_per_itr is None:
            peers_per_itr = max(1, (as_count("world_size", world_size) - 1).bit_length())
        super().__init__(world_size, peers_per_itr=peers_per_itr)

    def shifts(self, num_peers: int) -> Sequence[int]:
        return tuple(1 << i for i in range((self.world_size - 1).bit_length()))

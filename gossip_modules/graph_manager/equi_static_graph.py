"""EquiStatic: a static graph of a few random shifts, whose gap does not close as the number of ranks grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from math import gcd

import numpy as np

from .base import as_count
from .random_graph import as_seed, distinct_below, random_bits
from .shift_graph import ShiftGraph
from .weighted_graph import WeightedGraph


class EquiStaticGraph(ShiftGraph, WeightedGraph):
    """EquiStatic: the same k random shifts in all rounds; with k of the order of ln n its gap does not depend on n.

    From Song, Li, Jin, Shi, Yan, Yin, Yuan, "Communication-Efficient Topologies for Decentralized Learning with O(1)
    Consensus Rate", NeurIPS 2022, arXiv:2210.07881. With P_u the shift i -> i + u modulo n:

        A_u = ((n-1)/n) P_u + (1/n) I,  u = 1..n-1         their mean is the exact average J
        directed (D-EquiStatic):     W = (1/k) sum of A_u over k random u
        undirected (U-EquiStatic):   W = (1/k) sum of A_u over k/2 random u and their negatives

    So a link weighs (n-1)/(nk), a rank keeps 1/n, and all k = n-1 shifts give J. For k >= (8/3) ln(2n/p) / rho^2 the
    second largest singular value is at most rho with probability 1 - p. Shifts are drawn without repeats here, so that
    a rank has exactly k peers; the bound holds all the more. They are drawn again if they leave ranks unconnected. With
    an odd k, an undirected graph has the shift n/2 too, and n must be even. A query takes O(k). With as few shifts as
    by default, seeds differ much: compare them by `GraphMixing(graph).spectral_gap()`.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: k, the number of peers in every round, or a schedule of it; each entry has shifts of its own.
            None: the least whole number from log2(n) on, undirected rounded up to an even one; at most n - 1.
        directed: whether links are used in one direction.
        seed: the seed of the shifts, the same on all ranks; at least 0.

    Raises:
        ValueError: there is no such number of peers, or the seed is no integer of at least 0.

    >>> EquiStaticGraph(16).out_peers(rank=0, t=0), EquiStaticGraph(16, directed=False).out_peers(rank=0, t=0)
    ((2, 5, 11, 12), (3, 6, 10, 13))
    """

    def __init__(
        self,
        world_size: int,
        peers_per_itr: int | Mapping[int, int] | None = None,
        *,
        directed: bool = True,
        seed: int = 0,
    ) -> None:
        self.directed = directed
        self.seed = as_seed(seed)
        super().__init__(
            world_size, peers_per_itr=self._default_peers(world_size) if peers_per_itr is None else peers_per_itr
        )

    def link_weights(self, rank: int, t: int) -> Mapping[int, float]:
        peers = self.in_peers(rank, t)
        return dict.fromkeys(peers, (self.world_size - 1) / (self.world_size * len(peers))) if peers else {}

    def shifts(self, num_peers: int) -> Sequence[int]:
        n = self.world_size
        is_odd = num_peers % 2 == 1
        if not self.directed and is_odd and (n % 2 == 1 or num_peers == 1 < n - 1):
            raise ValueError(
                f"EquiStaticGraph: got peers_per_itr={num_peers} and directed=False for {n} ranks, expected an even "
                f"number, or, from 3 on and for even n, an odd one. Take {num_peers + 1} peers."
            )
        for attempt in count():
            drawn = self._drawn_shifts(num_peers, attempt)
            if gcd(n, *drawn) == 1:
                return drawn
        raise AssertionError("unreachable: some shift leads everywhere")

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, seed={self.seed}, directed={self.directed})"

    def _drawn_shifts(self, num_peers: int, attempt: int) -> tuple[int, ...]:
        n = self.world_size
        num_drawn = num_peers if self.directed else num_peers // 2
        bits = random_bits(self.seed, attempt, num_drawn).reshape(1, num_drawn)
        drawn = 1 + distinct_below(bits, n - 1 if self.directed else (n - 1) // 2)[0]
        if not self.directed:
            drawn = np.concatenate([drawn, n - drawn, [n // 2] * (num_peers % 2)])
        return tuple(sorted(map(int, drawn)))

    def _default_peers(self, world_size: int) -> int:
        peers = (as_count("world_size", world_size) - 1).bit_length()
        return max(1, min(peers if self.directed else peers + peers % 2, world_size - 1))

"""EquiDyn: every round sends along random shifts of the ranks, as likely one as the other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from .random_graph import RandomGraph, distinct_below, random_bits, unit_interval
from .weighted_graph import WeightedGraph


class EquiDynGraph(RandomGraph, WeightedGraph):
    """EquiDyn: in each round all ranks send by the same random shift; it agrees as fast for every number of ranks n.

    The one-peer graphs of Song, Li, Jin, Shi, Yan, Yin, Yuan, "Communication-Efficient Topologies for Decentralized
    Learning with O(1) Consensus Rate", NeurIPS 2022, arXiv:2210.07881. With P_u the shift i -> i + u modulo n:

        directed (OD-EquiDyn):    u uniform in 1..n-1                        W = (I + P_u) / 2
        undirected (OU-EquiDyn):  u uniform in 1..n-1, s uniform in 0..n-1
            for i = s, s+1, ..., s+n-1 (mod n):
                if neither i nor i + u is in a pair: i, i + u are one        W_ii = W_ij = 1/2 for a pair i, j

    The paper writes W = (1 - eta) I + eta A_u, where A_u = ((n-1)/n) P_u + (1/n) I; here eta = n / (2 (n-1)), so that
    a rank keeps one half. With k peers per round, a directed round has k distinct shifts: W = (I + P_u1 + ... + P_uk) /
    (k + 1). The squared distance from the average shrinks per round, in expectation and for every start, by exactly

        rho = (1 - k/(n-1)) / (k + 1)    directed;

    undirected rounds leave some ranks without a peer, and rho, which is for the worst start then, is above that. All
    rounds are doubly stochastic. A query takes O(k) time and memory.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: k, the number of peers per round, or a schedule of it; undirected: 1.
        directed: whether shifts are used in one direction, or in both by pairs.
        seed: the seed of all rounds, the same on all ranks; at least 0.

    Raises:
        ValueError: there are not as many peers, or the seed is no integer of at least 0.

    >>> graph = EquiDynGraph(8)
    >>> [(graph.out_peers(0, t), graph.in_peers(0, t)) for t in range(3)]
    [((7,), (1,)), ((5,), (3,)), ((6,), (2,))]
    """

    def __init__(
        self, world_size: int, peers_per_itr: int | Mapping[int, int] = 1, *, directed: bool = True, seed: int = 0
    ) -> None:
        self.directed = directed
        super().__init__(world_size, peers_per_itr=peers_per_itr, seed=seed)
        if not directed and peers_per_itr != 1:
            raise ValueError(
                f"EquiDynGraph: got peers_per_itr={peers_per_itr} and directed=False, expected 1 peer: undirected "
                f"rounds are pairs. Leave directed out, or take EquiStaticGraph with directed=False."
            )

    @property
    def rho(self) -> float:
        """See `RandomGraph`. Takes O(n log n) for an undirected graph."""
        n, k = self.world_size, self._last_num_peers
        if n == 1:
            return 0.0
        if self.directed:
            return (1 - k / (n - 1)) / (k + 1)
        # A pair subtracts (e_i - e_j)(e_i - e_j)^T / 2, and i is uniform: E[W] is circulant, and W^T W = W.
        shares = np.array([0.0] + [_num_paired(n, u) / (2 * n * (n - 1)) for u in range(1, n)])
        return float(1 - (shares.sum() - np.fft.fft(shares).real[1:]).min())

    def link_weights(self, rank: int, t: int) -> Mapping[int, float]:
        peers = self.in_peers(rank, t)
        return dict.fromkeys(peers, 1 / (self.num_peers(t) + 1))

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self._peers(rank, t, sign=-1)

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self._peers(rank, t, sign=1)

    def out_degree(self, rank: int, t: int) -> int:
        return self.num_peers(t) if self.directed else super().out_degree(rank, t)

    @cached_property
    def is_regular(self) -> bool:
        # With more ranks, some shift leaves a rank without a peer.
        return self.directed or self.world_size in (1, 2, 4)

    @cached_property
    def is_symmetric(self) -> bool:
        # Random shifts are symmetric only if there is no other choice: all ranks with all.
        return not self.directed or all(map(self._is_certain, self._segments.values()))

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, directed={self.directed})"

    def _is_certain(self, num_peers: int) -> bool:
        return num_peers >= self.world_size - 1 if self.directed else self.world_size <= 2

    def _draw(self, t: int) -> tuple[int, ...]:
        """The shifts, ascending, of a directed round; the shift and the start of an undirected one."""
        n, k = self.world_size, self.num_peers(t)
        if self.directed:
            return tuple(sorted((1 + distinct_below(random_bits(self.seed, t, k)[None], n - 1)[0]).tolist()))
        shift, start = unit_interval(random_bits(self.seed, t, 2)).tolist()
        return 1 + int(shift * (n - 1)), int(start * n)

    def _peers(self, rank: int, t: int, *, sign: int) -> tuple[int, ...]:
        self._check_rank(rank)
        drawn, n = self._drawn(t), self.world_size
        if self.directed:
            return tuple((rank + sign * shift) % n for shift in drawn)
        if n == 1:
            return ()
        shift, start = drawn
        peer = _paired(n, shift, (rank - start) % n)
        return () if peer is None else ((start + peer) % n,)


def _paired(n: int, shift: int, place: int) -> int | None:
    """Whom the place is paired with by the walk over the places 0, 1, ..., n-1, or None."""
    if shift <= n - shift:
        return _paired_in_line(n, shift, place)
    # The first places and the last ones are paired around the end; what is left is a line with the step n - shift.
    step = n - shift
    if place < step:
        return place + shift
    if place >= shift:
        return place - shift
    peer = _paired_in_line(shift - step, step, place - step)
    return None if peer is None else peer + step


def _paired_in_line(length: int, step: int, place: int) -> int | None:
    """Blocks of `step` places are paired: the first with the second, the third with the fourth, and so on."""
    if place // step % 2:
        return place - step
    return place + step if place + step < length else None


def _num_paired(n: int, shift: int) -> int:
    """How many places have a peer in the walk."""
    if shift <= n - shift:
        around, length, step = 0, n, shift
    else:
        around, length, step = 2 * (n - shift), 2 * shift - n, n - shift
    return around + length // (2 * step) * 2 * step + 2 * max(0, length % (2 * step) - step)

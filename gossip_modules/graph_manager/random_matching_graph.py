"""Random pairs: in each round a new perfect matching of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .random_graph import RandomGraph, random_bits, unit_interval
from .weighted_graph import WeightedGraph

_MAX_KEPT_RANKS = 2**13  # up to here a round is drawn for all ranks at once and kept; beyond it, for one rank only


class RandomMatchingGraph(RandomGraph, WeightedGraph):
    """Each round pairs all ranks anew, uniformly at random; the two of a pair average. Undirected, for every n.

        pi = a random permutation of the ranks, from (seed, t)
        the ranks that pi takes to 2 j and 2 j + 1 are a pair;  W_ij = W_ii = 1/2 for a pair i, j

    If n is odd, one rank has no peer. This is the randomised gossip of Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip
    algorithms", IEEE Transactions on Information Theory, 2006, with all pairs of a round at once. W is a projection, so
    E[W^T W] = E[W], and in expectation a round shrinks the squared distance from the average by exactly

        rho = (1 - 1/(n-1)) / 2    for even n,        rho = 1/2    for odd n

    So it does not slow down with n; but unlike on `BaseGraph`, no number of rounds makes the average exact.

    pi is the swap-or-not shuffle of Hoang, Morris, Rogaway, "An enciphering scheme based on a card shuffle", CRYPTO
    2012: a query takes O(log n) time and memory. Up to 8192 ranks the pairs of all ranks are computed at once and kept
    until another round is asked for.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: 1, since a matching has pairs.
        seed: the seed of all rounds, the same on all ranks; at least 0.

    Raises:
        ValueError: peers_per_itr is not 1, or the seed is no integer of at least 0.

    >>> graph = RandomMatchingGraph(4)
    >>> [graph.out_peers(0, t) for t in range(6)]
    [(3,), (1,), (3,), (3,), (1,), (2,)]
    """

    def __init__(self, world_size: int, peers_per_itr: int = 1, *, seed: int = 0) -> None:
        super().__init__(world_size, peers_per_itr=peers_per_itr, seed=seed)
        if peers_per_itr != 1:
            raise ValueError(
                f"RandomMatchingGraph: got peers_per_itr={peers_per_itr}, expected 1: it makes pairs. For more peers "
                f"per round take EquiDynGraph or BaseGraph."
            )

    @property
    def rho(self) -> float:
        """See `RandomGraph`."""
        n = self.world_size
        if n == 1:
            return 0.0
        return 0.5 if n % 2 else (1 - 1 / (n - 1)) / 2

    def link_weights(self, rank: int, t: int) -> Mapping[int, float]:
        self._check_rank(rank)
        peer = int(self._drawn(t)[rank]) if self.world_size <= _MAX_KEPT_RANKS else self._partner(rank, t)
        return {} if peer == rank else {peer: 0.5}

    def out_degree(self, rank: int, t: int) -> int:
        return 1 if self.world_size % 2 == 0 else super().out_degree(rank, t)

    @cached_property
    def is_regular(self) -> bool:
        return self.world_size == 1 or self.world_size % 2 == 0

    def _is_certain(self, num_peers: int) -> bool:
        return self.world_size == 2

    def _draw(self, t: int) -> npt.NDArray[np.int64]:
        """The peer of each rank; that of a rank without a peer is itself."""
        n = self.world_size
        place = self._shuffle(t, np.arange(n), is_inverse=False)
        rank_at = np.empty(n, dtype=np.int64)
        rank_at[place] = np.arange(n)
        return rank_at[np.minimum(place ^ 1, n - 1)]

    def _partner(self, rank: int, t: int) -> int:
        """`_draw(t)[rank]`, without the others."""
        self._segment(t)  # refuses t < 0
        place = self._shuffle(t, np.array([rank]), is_inverse=False) ^ 1
        return int(self._shuffle(t, np.minimum(place, self.world_size - 1), is_inverse=True)[0])

    def _shuffle(self, t: int, ranks: npt.NDArray[np.int64], *, is_inverse: bool) -> npt.NDArray[np.int64]:
        """pi of each rank, or its inverse: a step swaps x and (key - x) mod n where a coin for the two says so."""
        n = self.world_size
        num_steps = 32 + 3 * n.bit_length()
        bits = random_bits(self.seed, t, 3 * num_steps).reshape(num_steps, 3)
        keys = (unit_interval(bits[:, 0]) * n).astype(np.int64)
        steps = list(zip(keys.tolist(), *bits[:, 1:].view(np.int64).T.tolist(), strict=True))
        x = ranks
        for key, factor, offset in reversed(steps) if is_inverse else steps:
            other = (key - x) % n
            has_coin = np.maximum(x, other) * factor + offset < 0  # the highest bit; the product is modulo 2^64
            x = np.where(has_coin, other, x)
        return x

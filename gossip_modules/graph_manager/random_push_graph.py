"""Epidemic gossip: each rank pushes to some ranks that it chooses at random, whoever else does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .random_graph import RandomGraph, distinct_below, random_bits


class RandomPushGraph(RandomGraph):
    """Each rank sends to s random others per round, each independently; directed, for push-sum.

        rank j: targets = s distinct ranks other than j, uniformly at random, from (seed, t, j)
        W_ij = 1/(s+1) if i is a target of j,  W_jj = 1/(s+1)

    How many messages a rank gets varies, so columns of W sum to one and rows do not: values and weights are mixed
    alike, and x_i / w_i is the estimate (push-sum: Kempe, Dobra, Gehrke, "Gossip-based computation of aggregate
    information", FOCS 2003). Who sends to whom is that of EL-Local: de Vos, Farhadkhani, Guerraoui, Kermarrec, Pires,
    Sharma, "Epidemic Learning: Boosting Decentralized Learning with Randomized Communication", NeurIPS 2023,
    arXiv:2310.01972, which averages what arrives instead, and so lets the mean drift. The sum of the squared distances
    of the shares W(t-1) ... W(0) from equal ones shrinks per round, in expectation, by exactly

        rho = 1/(s+1) - (2a + (n-2) a^2) / (s+1)^2,    a = s/(n-1).

    The peers that a rank sends to take O(s); those that send to it O(n s), as any may: they are found for all ranks at
    once, and kept until another round is asked for.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: s, the number of peers per round, or a schedule of it.
        seed: the seed of all rounds, the same on all ranks; at least 0.

    Raises:
        ValueError: a rank has fewer than s others, or the seed is no integer of at least 0.

    >>> graph = RandomPushGraph(4)
    >>> [graph.out_peers(rank, t=0) for rank in range(4)], graph.in_peers(3, t=0)
    ([(3,), (0,), (3,), (0,)], (0, 2))
    """

    def __init__(self, world_size: int, peers_per_itr: int | Mapping[int, int] = 1, *, seed: int = 0) -> None:
        super().__init__(world_size, peers_per_itr=peers_per_itr, seed=seed)

    @property
    def rho(self) -> float:
        """See `RandomGraph`; W is not doubly stochastic, and the distance is that of push-sum's shares."""
        n, s = self.world_size, self._last_num_peers
        if n == 1:
            return 0.0
        a = s / (n - 1)
        return 1 / (s + 1) - (2 * a + (n - 2) * a**2) / (s + 1) ** 2

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        s, last = self.num_peers(t), self._last
        if last is not None and last[0] == t:
            return tuple(last[1][rank].tolist())
        return tuple(self._targets(rank, random_bits(self.seed, t, s, start=rank * s)[None])[0].tolist())

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        return tuple(np.flatnonzero((self._drawn(t) == rank).any(axis=1)).tolist())

    def out_degree(self, rank: int, t: int) -> int:
        return self.num_peers(t)

    @cached_property
    def is_regular(self) -> bool:
        return all(map(self._is_certain, self._segments.values()))

    @cached_property
    def is_symmetric(self) -> bool:
        return self.is_regular

    def _is_certain(self, num_peers: int) -> bool:
        return num_peers >= self.world_size - 1

    def _draw(self, t: int) -> npt.NDArray[np.int64]:
        """The peers that each rank sends to, int64 [n, s]."""
        n, s = self.world_size, self.num_peers(t)
        return self._targets(np.arange(n)[:, None], random_bits(self.seed, t, n * s).reshape(n, s))

    def _targets(self, ranks: int | npt.NDArray[np.int64], bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        chosen = np.sort(distinct_below(bits, self.world_size - 1), axis=1)
        return chosen + (chosen >= ranks)

"""RandomPairs: in each round every rank meets one other, drawn at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

import numpy as np

from ..graph_manager.base import GraphManager


class RandomPairs(GraphManager):
    """Random pairs: round t is a perfect matching of all ranks, drawn uniformly by seed and t; undirected.

    In a world of an odd number of ranks one of them, drawn as well, is without a peer. A pure function of (seed, t), so
    ranks agree without a word.

    Args:
        world_size: the number of ranks n.
        seed: of the pairs, the same on all ranks.

    >>> graph = RandomPairs(4, seed=1)
    >>> all(graph.out_peers(graph.out_peers(0, t)[0], t) == (0,) for t in range(9))
    True
    """

    def __init__(self, world_size: int, *, seed: int = 0) -> None:
        super().__init__(world_size)
        self.seed = seed

    def phone_book(self, rank: int) -> Sequence[int]:
        self._check_rank(rank)
        return [peer for peer in range(self.world_size) if peer != rank]

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        self._segment(t)
        peer = _partners(self.world_size, self.seed, t)[rank]
        return () if peer == rank else (peer,)

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self.out_peers(rank, t)

    @property
    def period(self) -> int:
        return 1 if self.world_size < 3 else 0

    @cached_property
    def is_symmetric(self) -> bool:
        return True

    @cached_property
    def is_regular(self) -> bool:
        return self.world_size % 2 == 0 or self.world_size == 1

    def canonical_round(self, t: int) -> int:
        return t if self.period == 0 else 0

    def distinct_rounds(self) -> Iterator[int]:
        yield from range(self.period or 2**31)

    def __repr__(self) -> str:
        return f"RandomPairs({self.world_size}, seed={self.seed})"


@lru_cache(maxsize=16)  # a rank asks for its peers, in and out, of one round
def _partners(world_size: int, seed: int, t: int) -> tuple[int, ...]:
    """The partner of each rank in round t; itself where it has none."""
    order = np.random.default_rng((seed, t)).permutation(world_size).tolist()
    partners = list(range(world_size))
    for one, other in zip(order[::2], order[1::2]):
        partners[one], partners[other] = other, one
    return tuple(partners)

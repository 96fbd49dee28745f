"""Graphs whose peers change every round: exponential and linear, directed and bipartite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import GraphManager
from .shift_graph import LazySequence, MirroredGraph, ShiftGraph, distinct


class DynamicDirectedExponentialGraph(ShiftGraph):
    """Peers at distances +1, -1, +2, -2, +4, -4, ... below n; directed, for push-sum.

    From Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
    arXiv:1811.10792.

    >>> DynamicDirectedExponentialGraph(8).phone_book(0)
    (1, 7, 2, 6, 4)
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        n = self.world_size
        return distinct(sign * 2**i % n for i in range((n - 1).bit_length()) for sign in (1, -1))


class NPeerDynamicDirectedExponentialGraph(ShiftGraph):
    """Peers at distances j (p+1)^i, j = 1..p, for p peers per round: round i takes digit i of the distance in base p+1.

    For p = 1 this is the one-peer exponential graph: when n is a power of two, log2(n) rounds of uniform averaging
    give the exact average (Ying, Yuan, Chen, Hu, Pan, Yin, "Exponential Graph is Provably Efficient for Decentralized
    Deep Training", NeurIPS 2021, arXiv:2110.13363), and so does n = (p+1)^k. The row depends on p: a
    schedule has one per segment.

    >>> graph = NPeerDynamicDirectedExponentialGraph(8)
    >>> [graph.out_peers(rank=0, t=t) for t in range(graph.period)]
    [(1,), (2,), (4,)]
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        distances, power = [], 1
        while power < self.world_size:  # integers only: a floating-point logarithm is off by one at exact powers
            distances += [j * power % self.world_size for j in range(1, num_peers + 1)]
            power *= num_peers + 1
        return distinct(distances)


class DynamicBipartiteExponentialGraph(MirroredGraph):
    """Pairs at distances 1, then 1 + 2^i: 3, 5, 9, ..., forward then backward; n even. For D-PSGD and AD-PSGD.

    >>> graph = DynamicBipartiteExponentialGraph(8)
    >>> graph.phone_book(0), graph.phone_book(1)
    ((7, 1, 5, 3), (2, 0, 4, 6))
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        n = self.world_size
        distances = (1 + 2**i if i else 1 for i in range((n - 1).bit_length()))
        return distinct(sign * distance % n for distance in distances for sign in (1, -1))


class DynamicDirectedLinearGraph(ShiftGraph):
    """Peers at every odd distance: +1, -1, +3, -3, ...

    >>> tuple(DynamicDirectedLinearGraph(8).phone_book(0))
    (1, 7, 3, 5)
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        return OddShifts(self.world_size)


class DynamicBipartiteLinearGraph(MirroredGraph):
    """Pairs at every odd distance, 1, 3, 5, ..., forward then backward; n even.

    >>> tuple(DynamicBipartiteLinearGraph(8).phone_book(1))
    (2, 0, 4, 6)
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        return OddShifts(self.world_size)


class DynamicBipartiteCompleteGraph(GraphManager):
    """Every active (odd) rank meets every passive (even) one in turn; any n. For AD-PSGD with an odd world.

    In round t active rank 2 a + 1 and passive rank 2 ((a + s(t)) mod m) are a pair, m the number of passive ranks; for
    odd n one passive rank has no peer. s(t) is t mod p with its bits reversed, p the next power of two from m on. Where
    p > m some pairs meet twice in these p rounds. Taken in order, the shifts would mix no faster than a ring.

    >>> graph = DynamicBipartiteCompleteGraph(5)
    >>> [graph.out_peers(1, t) for t in range(4)], [graph.out_peers(4, t) for t in range(4)]
    ([(0,), (4,), (2,), (0,)], [(), (1,), (3,), ()])
    """

    def __init__(self, world_size: int, *, peers_per_itr: int = 1) -> None:
        super().__init__(world_size, peers_per_itr=peers_per_itr)
        if peers_per_itr != 1:
            raise ValueError(f"got peers_per_itr={peers_per_itr}, expected 1: {type(self).__name__} makes pairs")

    @property
    def is_bipartite(self) -> bool:
        return True

    def phone_book(self, rank: int) -> Sequence[int]:
        self._check_rank(rank)
        peers = (peer for t in range(self._segment_period(1)) for peer in self.out_peers(rank, t))
        return tuple(dict.fromkeys(peers))

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        self._segment(t)  # refuses t < 0
        num_passive, num_active = (self.world_size + 1) // 2, self.world_size // 2
        shift = self._shift(t)
        if rank % 2:
            return (2 * ((rank // 2 + shift) % num_passive),)
        index = (rank // 2 - shift) % num_passive
        return (2 * index + 1,) if index < num_active else ()

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self.out_peers(rank, t)

    def _segment_period(self, num_peers: int) -> int:
        return 1 << self._num_bits

    @property
    def _num_bits(self) -> int:
        return ((self.world_size + 1) // 2 - 1).bit_length()

    def _shift(self, t: int) -> int:
        shift = 0
        for bit in range(self._num_bits):
            shift = shift << 1 | t >> bit & 1
        return shift


@dataclass(frozen=True)
class OddShifts(LazySequence):
    """+1, -1, +3, -3, ... modulo n without repeats: for even n up to n / 2, for odd n all of 1..n-1."""

    world_size: int

    def __len__(self) -> int:
        return self.world_size - 1 if self.world_size % 2 else self.world_size // 2

    def item(self, index: int) -> int:
        distance = index // 2 * 2 + 1
        return self.world_size - distance if index % 2 else distance

"""Graphs in which the peers of all ranks are the same shifts of the rank, so one short row describes them all.

Rings, tori, hypercubes and complete graphs, and the exponential and linear graphs whose peers change every round. All
but the ring walk through their row when `peers_per_itr` is less than the length of the row, and are static when it is
the whole row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate
from math import gcd, isqrt

from ..checks import checked_integer
from ..old_names import takes_old_arguments
from .base import GraphManager, LazyRow, row_period, window


class ShiftGraph(GraphManager):
    """A graph in which every rank r sends to `r + s`, with the same few shifts s for all ranks of a round.

    Ranks are the elements of a finite abelian group with 0 as its neutral element (a Cayley graph); `add` and
    `negate` are its operations, here on the integers modulo n. So every round is a union of permutations: it is
    regular, the in-peers are `r - s`, and uniform weights are doubly stochastic.

    >>> class EveryOther(ShiftGraph):
    ...     def shifts(self, num_peers: int) -> Sequence[int]:
    ...         return range(1, self.world_size, 2)
    >>> EveryOther(7).out_peers(rank=6, t=1)
    (2,)
    """

    is_regular = True

    @takes_old_arguments()
    def __init__(self, world_size: int, *, peers_per_itr: int | Mapping[int, int] = 1) -> None:
        super().__init__(world_size, peers_per_itr=peers_per_itr)
        self._rows = {p: self.shifts(p) if p else () for p in self._segments.values()}
        for num_peers, row in self._rows.items():
            if num_peers > len(row):
                raise self._too_many_peers(num_peers, len(row))
        start, num_peers = [*self._segments.items()][-1]
        last_rounds = range(start, start + self._segment_period(num_peers))
        if self.world_size > 1 and not self._connects(s for t in last_rounds for s in self._round_shifts(t)):
            raise ValueError(
                f"{self!r}: got shifts that never lead from some ranks to others, expected a graph that is strongly "
                f"connected over a period. Add shifts, e.g. 1, or peers_per_itr."
            )

    @abstractmethod
    def shifts(self, num_peers: int) -> Sequence[int]:
        """The row of rank 0 for rounds with `num_peers` peers: distinct, in 1..n-1. A lazy sequence if it is long."""

    def add(self, rank: int, shift: int) -> int:
        """The rank that `shift` leads to from `rank`."""
        return (rank + shift) % self.world_size

    def negate(self, shift: int) -> int:
        """The shift in the opposite direction."""
        return -shift % self.world_size

    def phone_book(self, rank: int) -> Sequence[int]:
        self._check_rank(rank)
        shifts, *others = self._rows.values()
        if any(row != shifts for row in others):  # a row per segment: their union, in the order of time
            shifts = tuple(dict.fromkeys(shift for row in self._rows.values() for shift in row))
        book = LazyRow(len(shifts), lambda index: self._send_to(rank, shifts[index]))
        return tuple(book) if isinstance(shifts, tuple) else book

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        return tuple(self._send_to(rank, shift) for shift in self._round_shifts(t))

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        return tuple(self.add(rank, self.negate(shift)) for shift in self._round_shifts(t))

    def out_degree(self, rank: int, t: int) -> int:
        return self.num_peers(t)

    @cached_property
    def is_symmetric(self) -> bool:
        """See `GraphManager`."""
        # All ranks use the same shifts, so a round costs O(peers) whatever n: no limit as in the scan of the base.
        rounds = map(self._round_shifts, self.distinct_rounds())
        return all(set(shifts) == set(map(self.negate, shifts)) for shifts in rounds)

    def _send_to(self, rank: int, shift: int) -> int:
        return self.add(rank, shift)

    def _round_shifts(self, t: int) -> tuple[int, ...]:
        start, num_peers = self._segment(t)
        return window(self._rows[num_peers], num_peers, t - start)

    def _segment_period(self, num_peers: int) -> int:
        return row_period(len(self._rows[num_peers]), num_peers)

    def _connects(self, shifts: Iterable[int]) -> bool:
        """Whether sums of `shifts` reach every rank: modulo n, they reach the multiples of their gcd."""
        return any(divisor == 1 for divisor in accumulate(shifts, gcd, initial=self.world_size))


class MirroredGraph(ShiftGraph):
    """A shift graph of two classes: odd (active) ranks add the odd shifts, even (passive) ranks subtract them.

    Two ranks always send to each other: in every round the edges are undirected, and each joins an active and a passive
    rank. With one peer per round they are a perfect matching, so ranks exchange in pairs.
    """

    is_bipartite = True
    is_symmetric = True

    def _check_world_size(self) -> None:
        if self.world_size % 2 and self.world_size > 1:
            raise ValueError(
                f"{type(self).__name__}: got world_size={self.world_size}, expected an even number: ranks alternate "
                f"between active and passive. Start one rank more or less, or take RingGraph with peers_per_itr=2, or "
                f"a directed graph."
            )

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self.out_peers(rank, t)

    def _send_to(self, rank: int, shift: int) -> int:
        return self.add(rank, shift if rank % 2 else self.negate(shift))

    def _connects(self, shifts: Iterable[int]) -> bool:
        # Two hops lead from a rank to others of its class, by differences of shifts; one hop changes the class.
        rest = iter(shifts)
        first = next(rest)
        divisors = accumulate((shift - first for shift in rest), gcd, initial=self.world_size)
        return any(divisor == 2 for divisor in divisors)


class RingGraph(ShiftGraph):
    """A ring that never changes: one peer per round is the directed ring (always +1), two are both neighbours.

    >>> RingGraph(5, peers_per_itr=2).out_peers(rank=0, t=7)
    (1, 4)
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        return distinct((1, self.world_size - 1))

    def _round_shifts(self, t: int) -> tuple[int, ...]:
        return tuple(self._rows[self.num_peers(t)][: self.num_peers(t)])

    def _segment_period(self, num_peers: int) -> int:
        return 1


class TorusGraph(ShiftGraph):
    """A grid of ranks, row by row, whose sides are glued: peers to the right, left, below and above.

    `peers_per_itr=4` is the static torus; fewer peers take turns, all ranks in the same direction. A side of length
    1 or 2 has fewer distinct neighbours.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: the number of peers per round, or a schedule of it.
        shape: (rows, columns) with `rows * columns == world_size`; by default the most square one.

    >>> TorusGraph(12).phone_book(0)  # 3 x 4
    (1, 3, 4, 8)
    """

    def __init__(
        self,
        world_size: int,
        *,
        peers_per_itr: int | Mapping[int, int] = 1,
        shape: tuple[int, int] | None = None,
    ) -> None:
        n = checked_integer("world_size", world_size, 1, "give the number of ranks")
        rows = next(r for r in range(isqrt(n), 0, -1) if n % r == 0)
        if shape is None and rows == 1 and n > 3:
            raise ValueError(
                f"TorusGraph: got world_size={n}, a prime, expected a product of two sides >= 2. Take RingGraph({n}), "
                f"a torus of one row, or start one rank more or less."
            )
        self.shape = shape or (rows, n // rows)
        if len(self.shape) != 2 or min(self.shape) < 1 or self.shape[0] * self.shape[1] != n:
            raise ValueError(
                f"TorusGraph: got shape={shape}, expected (rows, columns) with rows * columns == world_size == {n}, "
                f"e.g. {(rows, n // rows)}."
            )
        super().__init__(world_size, peers_per_itr=peers_per_itr)

    def shifts(self, num_peers: int) -> Sequence[int]:
        # The shift that leads to the cell (row, column) is the rank of that cell.
        rows, columns = self.shape
        return distinct((1 % columns, columns - 1, 1 % rows * columns, (rows - 1) * columns))

    def add(self, rank: int, shift: int) -> int:
        rows, columns = self.shape
        row = (rank // columns + shift // columns) % rows
        return row * columns + (rank + shift) % columns

    def negate(self, shift: int) -> int:
        rows, columns = self.shape
        return -(shift // columns) % rows * columns + -shift % columns

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, shape={self.shape})"

    def _connects(self, shifts: Iterable[int]) -> bool:
        return True  # one period visits the whole row, and one step along each side leads everywhere


class HypercubeGraph(ShiftGraph):
    """Ranks whose binary digits differ in one place are neighbours: `rank XOR 2^i`; n is a power of two.

    `peers_per_itr=log2(n)` is the static hypercube. With one peer, round t exchanges along dimension `t mod
    log2(n)` in pairs, and log2(n) rounds of uniform averaging give the exact average: the dimension exchange of
    Cybenko, "Dynamic load balancing for distributed memory multiprocessors", Journal of Parallel and Distributed
    Computing, 1989.

    >>> HypercubeGraph(8).phone_book(5)
    (4, 7, 1)
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        return tuple(1 << i for i in range(self.world_size.bit_length() - 1))

    def add(self, rank: int, shift: int) -> int:
        return rank ^ shift

    def negate(self, shift: int) -> int:
        return shift

    def _check_world_size(self) -> None:
        n = self.world_size
        if n & (n - 1):
            below = 1 << (n.bit_length() - 1)
            raise ValueError(
                f"HypercubeGraph: got world_size={n}, expected a power of two. Start {below} or {2 * below} ranks, or "
                f"take NPeerDynamicDirectedExponentialGraph, which works for every size."
            )

    def _connects(self, shifts: Iterable[int]) -> bool:
        return True  # one period visits the whole row, which has every dimension


class CompleteGraph(ShiftGraph):
    """All ranks with all: `peers_per_itr=n-1` is static and averages exactly; fewer peers take turns: +1, +2, +3, ...

    >>> CompleteGraph(4, peers_per_itr=3).out_peers(rank=1, t=0)
    (2, 3, 0)
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        return range(1, self.world_size)


class StaticExponentialGraph(ShiftGraph):
    """Peers at distances 1, 2, 4, ... below n, all tau = ceil(log2 n) of them in every round; directed.

    With uniform weights 1/(tau + 1), a round multiplies the distance from the average by at most (tau - 1)/(tau + 1),
    the second largest singular value of W if n is even; the value of an odd n is smaller. From Ying, Yuan, Chen, Hu,
    Pan, Yin, "Exponential Graph is Provably Efficient for Decentralized Deep Training", NeurIPS 2021, arXiv:2110.13363.
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
            n = checked_integer("world_size", world_size, 1, "give the number of ranks")
            peers_per_itr = max(1, (n - 1).bit_length())
        super().__init__(world_size, peers_per_itr=peers_per_itr)

    def shifts(self, num_peers: int) -> Sequence[int]:
        return tuple(1 << i for i in range((self.world_size - 1).bit_length()))


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
        return odd_shifts(self.world_size)


class DynamicBipartiteLinearGraph(MirroredGraph):
    """Pairs at every odd distance, 1, 3, 5, ..., forward then backward; n even.

    >>> tuple(DynamicBipartiteLinearGraph(8).phone_book(1))
    (2, 0, 4, 6)
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        return odd_shifts(self.world_size)


class DynamicBipartiteCompleteGraph(GraphManager):
    """Every active (odd) rank meets every passive (even) one in turn; any n. For AD-PSGD with an odd world.

    In round t active rank 2 a + 1 and passive rank 2 ((a + s(t)) mod m) are a pair, m the number of passive ranks; for
    odd n one passive rank has no peer. s(t) is t mod p with its bits reversed, p the next power of two from m on. Where
    p > m some pairs meet twice in these p rounds. Taken in order, the shifts would mix no faster than a ring.

    >>> graph = DynamicBipartiteCompleteGraph(5)
    >>> [graph.out_peers(1, t) for t in range(4)], [graph.out_peers(4, t) for t in range(4)]
    ([(0,), (4,), (2,), (0,)], [(), (1,), (3,), ()])
    """

    is_bipartite = True
    is_symmetric = True
    makes_pairs = True

    def phone_book(self, rank: int) -> Sequence[int]:
        return tuple(dict.fromkeys(peer for t in self.distinct_rounds() for peer in self.out_peers(rank, t)))

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        num_passive, num_active = (self.world_size + 1) // 2, self.world_size // 2
        shift = self._shift(self.canonical_round(t))
        if rank % 2:
            return (2 * ((rank // 2 + shift) % num_passive),)
        index = (rank // 2 - shift) % num_passive
        return (2 * index + 1,) if index < num_active else ()

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self.out_peers(rank, t)

    def _segment_period(self, num_peers: int) -> int:
        num_passive = (self.world_size + 1) // 2
        return 1 << (num_passive - 1).bit_length()

    def _shift(self, t: int) -> int:
        """`t`, which is below the period, with its bits reversed."""
        num_bits = self.period.bit_length() - 1
        return int(f"{t:0{num_bits}b}"[::-1], 2) if num_bits else 0


def distinct(shifts: Iterable[int]) -> tuple[int, ...]:
    """`shifts` in order, without repeats and without 0 (a message to oneself)."""
    return tuple(dict.fromkeys(shift for shift in shifts if shift))


@cache
def odd_shifts(world_size: int) -> LazyRow:
    """+1, -1, +3, -3, ... modulo n without repeats: for even n up to n / 2, for odd n all of 1..n-1."""
    length = world_size - 1 if world_size % 2 else world_size // 2
    return LazyRow(length, partial(_odd_shift, world_size))


def _odd_shift(world_size: int, index: int) -> int:
    distance = index // 2 * 2 + 1
    return world_size - distance if index % 2 else distance

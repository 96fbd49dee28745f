"""Graphs in which the peers of all ranks are the same shifts of the rank, so one short row describes them all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from operator import eq
from typing import overload

from ..old_calls import GRAPH_ARGUMENTS, old_arguments
from .base import GraphManager, row_period, window


class ShiftGraph(GraphManager):
    """A graph in which every rank r sends to `r + s`, with the same few shifts s for all ranks of a round.

    Ranks are the elements of a finite abelian group with 0 as its neutral element (a Cayley graph); `add` and
    `negate` are its operations, here those of the integers modulo n. So every round is a union of permutations: it is
    regular, the in-peers are `r - s`, and uniform weights are doubly stochastic.

    >>> class EveryOther(ShiftGraph):
    ...     def shifts(self, num_peers: int) -> Sequence[int]:
    ...         return range(1, self.world_size, 2)
    >>> EveryOther(7).out_peers(rank=6, t=1)
    (2,)
    """

    @old_arguments(GRAPH_ARGUMENTS, leading="rank")
    def __init__(self, world_size: int, *, peers_per_itr: int | Mapping[int, int] = 1) -> None:
        super().__init__(world_size, peers_per_itr=peers_per_itr)
        self._rows = {p: self.shifts(p) if p else () for p in self._segments.values()}
        for num_peers, row in self._rows.items():
            if num_peers > len(row):
                raise self._too_many_peers(num_peers, len(row))
        last_start = self._starts[-1]
        last_rounds = range(last_start, last_start + self._segment_period(self._segments[last_start]))
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
        rows = list(self._rows.values())
        if any(row != rows[0] for row in rows):  # a row per segment: their union, in the order of time
            return tuple(dict.fromkeys(self._send_to(rank, shift) for row in rows for shift in row))
        lazy = _PhoneBookRow(self, rank, rows[0])
        return tuple(lazy) if isinstance(rows[0], tuple) else lazy

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        return tuple(self._send_to(rank, shift) for shift in self._round_shifts(t))

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        return tuple(self.add(rank, self.negate(shift)) for shift in self._round_shifts(t))

    def out_degree(self, rank: int, t: int) -> int:
        return self.num_peers(t)

    @cached_property
    def is_regular(self) -> bool:
        return True

    @cached_property
    def is_symmetric(self) -> bool:
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
        divisor = self.world_size
        for shift in shifts:
            divisor = gcd(divisor, shift)
            if divisor == 1:
                return True
        return False


class MirroredGraph(ShiftGraph):
    """A shift graph of two classes: odd (active) ranks add the odd shifts, even (passive) ranks subtract them.

    Two ranks always send to each other: in every round the edges are undirected, and each joins an active and a passive
    rank. With one peer per round they are a perfect matching, so ranks exchange in pairs.
    """

    def _check_world_size(self) -> None:
        if self.world_size % 2 and self.world_size > 1:
            raise ValueError(
                f"{type(self).__name__}: got world_size={self.world_size}, expected an even number: ranks alternate "
                f"between active and passive. Start one rank more or less, or take RingGraph with peers_per_itr=2, or "
                f"a directed graph."
            )

    @property
    def is_bipartite(self) -> bool:
        return True

    @cached_property
    def is_symmetric(self) -> bool:
        return True

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self.out_peers(rank, t)

    def _send_to(self, rank: int, shift: int) -> int:
        return self.add(rank, shift if rank % 2 else self.negate(shift))

    def _connects(self, shifts: Iterable[int]) -> bool:
        # Two hops lead from a rank to others of its class, by differences of shifts; one hop changes the class.
        divisor, first = self.world_size, None
        for shift in shifts:
            first = shift if first is None else first
            divisor = gcd(divisor, shift - first)
            if divisor == 2:
                return True
        return False


class LazySequence(Sequence[int]):
    """A sequence that computes its items on demand: n ranks in O(1) memory. It equals the tuple of its items."""

    @abstractmethod
    def item(self, index: int) -> int:
        """The item at `index`, 0 <= index < len(self)."""

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        positions = range(len(self))[index]  # resolves negative indices and slices, and raises the IndexError
        return self.item(positions) if isinstance(positions, int) else tuple(map(self.item, positions))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))


@dataclass(frozen=True, eq=False)
class _PhoneBookRow(LazySequence):
    graph: ShiftGraph
    rank: int
    shifts: Sequence[int]

    def __len__(self) -> int:
        return len(self.shifts)

    def item(self, index: int) -> int:
        return self.graph._send_to(self.rank, self.shifts[index])


def distinct(shifts: Iterable[int]) -> tuple[int, ...]:
    """`shifts` in order, without repeats and without 0 (a message to oneself)."""
    return tuple(dict.fromkeys(shift for shift in shifts if shift))

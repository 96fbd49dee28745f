"""Communication graphs as pure functions of (rank, t): the peers of each rank in round t.

Each rank has one ordered row of distinct out-peers, its phone book. Round t uses a window of `peers_per_itr`
consecutive entries of that row, and the next round uses the next window, wrapping around. Nothing is stored per round:
every rank can compute the peers of any rank in any round, so a rank knows the senders of its messages without asking.

This file has the abstract bases; the graphs are in `shift_graphs`, `networkx_graphs`, `random_graphs` and `base_graph`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import eq
from typing import Any

from ..checks import checked_integer
from ..old_names import OldNames

MAX_PERIOD = 2**31  # a longer period counts as "never repeats"
_MAX_SCANNED_RANKS = 2**18  # limit on rounds x ranks in a scan of the schedule, which takes about a second


class GraphManager(OldNames, ABC):
    """A directed communication graph that may change every round, in a regular pattern.

    A new graph has to write `phone_book` only; the other methods are computed from it, `in_peers` in O(n). If the rows
    of all ranks are shifts of one another, derive from `ShiftGraph` instead: it needs one list of shifts, and every
    query takes O(peers).

    Args:
        world_size: the number of ranks n, at least 1. A world of one has no peers and accepts any `peers_per_itr`.
        peers_per_itr: the number of peers per rank and round, or a schedule `{first round: peers}`, the same on all
            ranks. `{0: 2, 3000: 1}` sends to two peers in rounds 0..2999 and to one from round 3000 on. Each entry of
            the schedule starts at the beginning of the row.

    Raises:
        ValueError: there is no graph of this size or with this schedule.
    """

    is_bipartite = False
    """Whether the ranks form two classes, active and passive, and every edge joins an active and a passive rank."""
    makes_pairs = False
    """Whether a rank has at most one peer per round, so that `peers_per_itr` must be 1."""

    def __init__(self, world_size: int, *, peers_per_itr: int | Mapping[int, int] = 1) -> None:
        self.world_size = checked_integer("world_size", world_size, 1, "give the number of ranks")
        self._peers_per_itr = as_peer_schedule(peers_per_itr)
        if self.makes_pairs and self._peers_per_itr != {0: 1}:
            raise ValueError(
                f"{type(self).__name__}: got peers_per_itr={peers_per_itr}, expected 1: it makes pairs. For more peers "
                f"per round take BaseGraph, or another graph."
            )
        self._check_world_size()
        most = max(self._peers_per_itr.values())
        if self.world_size > 1 and most >= self.world_size:
            raise self._too_many_peers(most, self.world_size - 1)
        self._segments = self._peers_per_itr if self.world_size > 1 else {0: 0}

    @abstractmethod
    def phone_book(self, rank: int) -> Sequence[int]:
        """All peers of `rank` in any round: ordered, distinct, never `rank` itself."""

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        """The receivers of `rank` in round `t`."""
        start, num_peers = self._segment(t)
        return window(self.phone_book(rank), num_peers, t - start)

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        """The senders to `rank` in round `t`: always the transpose of `out_peers`."""
        self._check_rank(rank)
        return tuple(j for j in range(self.world_size) if j != rank and rank in self.out_peers(j, t))

    def num_peers(self, t: int) -> int:
        """`peers_per_itr` in round `t`; 0 in a world of one. A rank with a shorter row sends to all its entries."""
        return self._segment(t)[1]

    def out_degree(self, rank: int, t: int) -> int:
        """`len(out_peers(rank, t))`."""
        return len(self.out_peers(rank, t))

    def is_passive(self, rank: int) -> bool:
        """Whether `rank` is in the passive class of a bipartite graph."""
        self._check_rank(rank)
        return self.is_bipartite and rank % 2 == 0

    @property
    def is_dynamic(self) -> bool:
        """Whether some round has other edges than round 0."""
        return self.period != 1

    @property
    def period(self) -> int:
        """The number of rounds until the peers repeat; 0: never (`peers_per_itr` is a schedule), or more than 2**31."""
        return 0 if len(self._segments) > 1 else self._segment_period(self._segments[0])

    @cached_property
    def is_regular(self) -> bool:
        """Whether in each round all ranks have the same in- and out-degree. See `in_every_round` for its limit."""
        return self.in_every_round(self._is_regular_round)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether in every round i sends to j exactly if j sends to i. See `in_every_round` for its limit."""
        return self.in_every_round(self._is_symmetric_round)

    def canonical_round(self, t: int) -> int:
        """The first round with the peers of round `t` in the same entry of the schedule; `t` if it has no period."""
        start, num_peers = self._segment(t)
        period = self._segment_period(num_peers)
        return start + (t - start) % period if period else t

    def distinct_rounds(self) -> Iterator[int]:
        """The canonical rounds, ascending; together they have every set of edges that the schedule ever uses."""
        for start, period, length in self._entries():
            yield from range(start, start + int(min(period or MAX_PERIOD, length)))

    def cycles(self) -> list[range]:
        """For each entry of `peers_per_itr` the rounds until its peers repeat, empty if they never do.

        Entries that are over before their peers repeat are left out.
        """
        entries = self._entries()
        return [range(t, t + period) for t, period, length in entries if 0 < period <= length or length == math.inf]

    def in_every_round(self, predicate: Callable[[int], bool]) -> bool:
        """Whether `predicate(t)` is true in all rounds; also False if there are too many rounds to check.

        False is the safe answer: push-sum then sends a weight that it could have left out, and algorithms that need a
        symmetric graph raise an error. The limit is a function of the graph, so all ranks get the same answer.
        """
        for num_scanned, t in enumerate(self.distinct_rounds()):
            if num_scanned * self.world_size > _MAX_SCANNED_RANKS or not predicate(t):
                return False
        return True

    def __repr__(self) -> str:
        """Complete: graphs with the same repr have the same peers in all rounds; ranks compare it at the start."""
        segments = self._peers_per_itr
        return (
            f"{type(self).__name__}({self.world_size}, peers_per_itr={segments if len(segments) > 1 else segments[0]})"
        )

    def _check_world_size(self) -> None:
        """Raise a ValueError if there is no graph of this kind with `self.world_size` ranks."""

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"got rank {rank}, expected 0 to {self.world_size - 1}: {self!r} has {self.world_size} ranks"
            )

    def _segment(self, t: int) -> tuple[int, int]:
        """The first round of the entry of `peers_per_itr` that applies in round `t`, and its number of peers."""
        if t < 0:
            raise ValueError(f"got round t={t}, expected t >= 0: rounds count from 0")
        start = max(first for first in self._segments if first <= t)
        return start, self._segments[start]

    def _entries(self) -> list[tuple[int, int, float]]:
        """For each entry of `peers_per_itr` the first round, the period (0: never), and the number of rounds."""
        ends = [*self._segments, math.inf][1:]
        entries = zip(self._segments.items(), ends, strict=True)
        return [(start, self._segment_period(num_peers), end - start) for (start, num_peers), end in entries]

    def _segment_period(self, num_peers: int) -> int:
        """The number of rounds until windows of `num_peers` entries repeat on all ranks; 0 if it is more than 2**31."""
        period = math.lcm(*(row_period(row_length, num_peers) for row_length in self._row_lengths))
        return period if period <= MAX_PERIOD else 0

    @cached_property
    def _row_lengths(self) -> frozenset[int]:
        return frozenset(len(self.phone_book(rank)) for rank in range(self.world_size))

    def _edges(self, t: int) -> set[tuple[int, int]]:
        return {(rank, peer) for rank in range(self.world_size) for peer in self.out_peers(rank, t)}

    def _is_regular_round(self, t: int) -> bool:
        edges = self._edges(t)
        degrees = Counter(rank for rank, _ in edges), Counter(peer for _, peer in edges)
        return len({degree[rank] for degree in degrees for rank in range(self.world_size)}) == 1

    def _is_symmetric_round(self, t: int) -> bool:
        edges = self._edges(t)
        return all((peer, rank) in edges for rank, peer in edges)

    def _too_many_peers(self, num_peers: int, row_length: int) -> ValueError:
        return ValueError(
            f"{type(self).__name__}: got peers_per_itr={num_peers}, expected 1 to {row_length}: with "
            f"world_size={self.world_size} a rank has at most {row_length} distinct peers. Lower peers_per_itr or "
            f"start more ranks."
        )


class WeightedGraph(GraphManager):
    """A graph that prescribes the weight of each of its links, in every round; W(t) is doubly stochastic.

    `GraphMixing` mixes with these weights, and wrappers choose it for such a graph. The weights of a rank sum to at
    most 1; the rest is the rank's own weight. The graph is undirected with W[i, j] = W[j, i]; a directed one overrides
    `out_peers`, `in_peers` and `is_symmetric`, and the weights of the links that leave a rank must sum to the same as
    the weights of the links that enter it.
    """

    @abstractmethod
    def link_weights(self, rank: int, t: int) -> Mapping[int, float]:
        """The weight W[rank, j] of each rank j that `rank` receives from in round `t`."""

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return tuple(self.link_weights(rank, t))

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self.out_peers(rank, t)

    @cached_property
    def is_symmetric(self) -> bool:
        """See `GraphManager`."""
        return True


@dataclass(frozen=True, eq=False)
class LazyRow(Sequence[int]):
    """A sequence whose items are computed on demand, so that a row of n ranks takes O(1) memory.

    It equals the tuple of its items.

    Args:
        length: the number of items.
        item: the item at an index, 0 <= index < length.
    """

    length: int
    item: Callable[[int], int]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        positions = range(self.length)[index]  # resolves negative indices and slices, and raises the IndexError
        return self.item(positions) if isinstance(positions, int) else tuple(map(self.item, positions))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other)))


def window(row: Sequence[int], num_peers: int, step: int) -> tuple[int, ...]:
    """The entries of `row` that round `step` uses: `num_peers` consecutive ones, or all if there are fewer."""
    length = len(row)
    if num_peers >= length:
        return tuple(row)
    return tuple(row[(num_peers * step + i) % length] for i in range(num_peers))


def row_period(row_length: int, num_peers: int) -> int:
    """The number of rounds until the `window` is back at the start of a row."""
    return 1 if num_peers >= row_length else row_length // math.gcd(row_length, num_peers)


def as_peer_schedule(peers_per_itr: int | Mapping[int, int]) -> dict[int, int]:
    """`{first round: peers}`, ascending, from 0."""
    remedy = "give a number of peers, or a schedule such as {0: 2, 3000: 1}"
    if not isinstance(peers_per_itr, Mapping):
        return {0: checked_integer("peers_per_itr", peers_per_itr, 1, remedy)}
    rounds = [r for r in peers_per_itr if not isinstance(r, int) or isinstance(r, bool) or r < 0]
    if rounds or 0 not in peers_per_itr:
        raise ValueError(
            f"got peers_per_itr={dict(peers_per_itr)!r}, expected {{first round: peers}} with rounds >= 0, among them "
            f"round 0. Write e.g. {{0: 2, 3000: 1}}."
        )
    return {r: checked_integer(f"peers_per_itr[{r}]", peers_per_itr[r], 1, remedy) for r in sorted(peers_per_itr)}

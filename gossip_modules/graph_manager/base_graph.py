"""The Base-(k+1) graph: the exact average over any number of ranks in a few rounds of at most k peers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from math import isqrt, prod

from .weighted_graph import WeightedGraph


class BaseGraph(WeightedGraph):
    """Base-(k+1): exact average in finite time for every number of ranks n, with at most k peers per round; undirected.

    One period of rounds W(T-1) ... W(0) is the exact average J, and T is at most 2 log_{k+1}(n) + 2. From Takezawa,
    Sato, Bao, Niwa, Yamada, "Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized Learning
    via Finite-time Convergence", NeurIPS 2023, arXiv:2305.11420. A period is made of these rules, of which the first
    that fits is used, or the shorter of the last two:

        n has no prime factor above k+1:    write ranks in digits below k+2; round i averages over digit i
        n = p q, the same for p:            p groups of q ranks average each by itself, then over the groups
        n = a_1 (k+1)^p_1 + a_2 (k+1)^p_2 + ...,  p_1 > p_2 > ...: a set of ranks for each term, a_l parts in each
            first                           each set averages over itself
            then, for l = 1, 2, ...         each rank of the sets after l exchanges with one rank in each part of set l
            and after its exchange          each part of set l averages over itself

    The weight of a link in such an exchange is (k+1)^p_l / (ranks in set l and after it); in all other rounds ranks
    average in groups of g with weights 1/g. So weights are not uniform, and `GraphMixing` takes them from here. Some
    ranks have fewer than k peers in some rounds, or none. A query takes O(k + log n).

    Args:
        world_size: the number of ranks n.
        peers_per_itr: k, the most peers of a rank per round, or a schedule of it.

    >>> graph = BaseGraph(3)
    >>> [graph.link_weights(1, t) for t in range(graph.period)]
    [{0: 0.5}, {2: 0.6666666666666666}, {0: 0.5}]
    """

    def __init__(self, world_size: int, peers_per_itr: int | Mapping[int, int] = 1) -> None:
        super().__init__(world_size, peers_per_itr=peers_per_itr)
        self._plans = {k: _plan(self.world_size, k + 1) for k in set(self._segments.values())}

    def link_weights(self, rank: int, t: int) -> Mapping[int, float]:
        self._check_rank(rank)
        start, k = self._segment(t)
        plan = self._plans[k]
        return plan.links(rank, (t - start) % plan.num_rounds) if plan.num_rounds else {}

    def phone_book(self, rank: int) -> Sequence[int]:
        """All peers of `rank` over a period of each entry of the schedule, in the order in which it meets them."""
        self._check_rank(rank)
        plans = (self._plans[k] for k in self._segments.values())
        return tuple(
            dict.fromkeys(peer for plan in plans for t in range(plan.num_rounds) for peer in plan.links(rank, t))
        )

    @cached_property
    def is_regular(self) -> bool:
        # In an exchange between sets, ranks of the first set are left without a peer.
        return all(isinstance(plan, _Digits) for plan in self._plans.values())

    def _segment_period(self, num_peers: int) -> int:
        return max(1, self._plans[num_peers].num_rounds)


class _Plan(ABC):
    """Rounds after which ranks 0, 1, ... have their exact average."""

    num_rounds: int

    @abstractmethod
    def links(self, rank: int, t: int) -> dict[int, float]:
        """The weight of each peer in round `t` of `num_rounds`."""


class _Digits(_Plan):
    """Ranks in digits, of mixed bases if need be: round i averages over all ranks that differ in digit i only."""

    def __init__(self, bases: Sequence[int]) -> None:
        self.bases = tuple(bases)
        self.num_rounds = len(self.bases)
        self._strides = tuple(accumulate(self.bases, int.__mul__, initial=1))

    def links(self, rank: int, t: int) -> dict[int, float]:
        base, stride = self.bases[t], self._strides[t]
        first = rank - rank // stride % base * stride
        return {peer: 1 / base for peer in range(first, first + base * stride, stride) if peer != rank}


class _Groups(_Plan):
    """Groups of q consecutive ranks average by themselves; then each rank with those at its place in other groups."""

    def __init__(self, inside: _Plan, size: int, across: _Digits) -> None:
        self._inside, self._size, self._across = inside, size, across
        self.num_rounds = inside.num_rounds + across.num_rounds

    def links(self, rank: int, t: int) -> dict[int, float]:
        group, place = divmod(rank, self._size)
        if t < self._inside.num_rounds:
            return {group * self._size + peer: w for peer, w in self._inside.links(place, t).items()}
        across = self._across.links(group, t - self._inside.num_rounds)
        return {peer * self._size + place: w for peer, w in across.items()}


class _Sets(_Plan):
    """A set of ranks for each digit of n in base k+1, the largest first: `digits[l]` parts of `sizes[l]` ranks."""

    def __init__(self, world_size: int, base: int) -> None:
        powers = [base**i for i in range(world_size.bit_length()) if base**i <= world_size]
        terms = [(world_size // power % base, power) for power in reversed(powers)]
        self._digits, self._sizes = zip(*(term for term in terms if term[0]), strict=True)
        counts = [digit * size for digit, size in zip(self._digits, self._sizes, strict=True)]
        self._starts = tuple(accumulate(counts, initial=0))  # the last one is n
        self._of_sets = [_Digits(fewest_factors(count, base)) for count in counts]
        self._of_parts = [_Digits(fewest_factors(size, base)) for size in self._sizes]
        self._first_exchange = self._of_sets[0].num_rounds
        self.num_rounds = self._first_exchange + 1 + self._of_parts[0].num_rounds

    def links(self, rank: int, t: int) -> dict[int, float]:
        mine = bisect_right(self._starts, rank) - 1
        exchange = t - self._first_exchange
        if exchange < 0:
            return self._average(self._of_sets[mine], rank, self._starts[mine], t)
        last = len(self._sizes) - 1
        if exchange < last and exchange <= mine:
            return self._exchange(rank, exchange, is_giver=exchange == mine)
        step = exchange - min(mine + 1, last)
        part = rank - (rank - self._starts[mine]) % self._sizes[mine]
        return self._average(self._of_parts[mine], rank, part, step)

    def _average(self, plan: _Digits, rank: int, first: int, step: int) -> dict[int, float]:
        """Round `step` among the ranks from `first` on; small sets start again while larger ones are not yet done."""
        if not plan.num_rounds:
            return {}
        return {first + peer: w for peer, w in plan.links(rank - first, step % plan.num_rounds).items()}

    def _exchange(self, rank: int, index: int, *, is_giver: bool) -> dict[int, float]:
        """Set `index` with all sets after it: each rank there meets the same place at the end of every part."""
        start, after, end = self._starts[index], self._starts[index + 1], self._starts[-1]
        size = self._sizes[index]
        weight = size / (end - start)
        unmatched = size - (end - after)  # ranks at the beginning of each part
        if is_giver:
            place = (rank - start) % size - unmatched
            return {after + place: weight} if place >= 0 else {}
        place = unmatched + rank - after
        return {start + part * size + place: weight for part in range(self._digits[index])}


def _plan(world_size: int, base: int) -> _Plan:
    """The shorter one of the two ways where n has some prime factors up to `base` and others above it."""
    smooth = _smooth_part(world_size, base)
    if smooth == world_size:
        return _Digits(fewest_factors(world_size, base))
    sets = _Sets(world_size, base)
    if smooth == 1:
        return sets
    size = world_size // smooth
    groups = _Groups(_Sets(size, base), size, _Digits(fewest_factors(smooth, base)))
    return groups if groups.num_rounds <= sets.num_rounds else sets


def _smooth_part(number: int, base: int) -> int:
    """The largest divisor of `number` whose prime factors are at most `base`."""
    rest = number
    for factor in range(2, min(base, isqrt(number)) + 1):
        while rest % factor == 0:
            rest //= factor
    return number if rest <= base else number // rest


@lru_cache(maxsize=1024)
def fewest_factors(number: int, largest: int) -> tuple[int, ...]:
    """As few factors of 2..`largest` as have the product `number`, descending; it has no prime factor above `largest`.

    >>> fewest_factors(72, 6)
    (6, 6, 2)
    """
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    best: dict[int, tuple[int, ...]] = {1: ()}
    for divisor in divisors[1:]:
        tails = [
            (f, best[divisor // f]) for f in divisors[1:] if f <= largest and divisor % f == 0 and divisor // f in best
        ]
        if tails:
            best[divisor] = min(((f, *tail) for f, tail in tails), key=lambda factors: (len(factors), sorted(factors)))
    assert prod(best[number]) == number
    return tuple(sorted(best[number], reverse=True))

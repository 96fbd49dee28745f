"""The Base-(k+1) graph: the exact average over any number of ranks in a few rounds of at most k peers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from math import factorial, gcd
from typing import TypeAlias

from .base import WeightedGraph

_Round: TypeAlias = Callable[[int], dict[int, float]]
"""The links of a rank in one round: its peers with their weights."""


class BaseGraph(WeightedGraph):
    """Base-(k+1): exact average in finite time for every number of ranks n, with at most k peers per round; undirected.

    One period of rounds W(T-1) ... W(0) is the exact average J, and T is at most 2 log_{k+1}(n) + 2. From Takezawa,
    Sato, Bao, Niwa, Yamada, "Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized Learning
    via Finite-time Convergence", NeurIPS 2023, arXiv:2305.11420. A period follows the first of these rules that fits,
    or the shorter of the last two:

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
        return plan[(t - start) % len(plan)](rank) if plan else {}

    def phone_book(self, rank: int) -> Sequence[int]:
        """All peers of `rank` over a period of each entry of the schedule, in the order in which it meets them."""
        self._check_rank(rank)
        plans = (self._plans[k] for k in self._segments.values())
        return tuple(dict.fromkeys(peer for plan in plans for links in plan for peer in links(rank)))

    @cached_property
    def is_regular(self) -> bool:
        """See `GraphManager`."""
        # In an exchange between sets, ranks of the first set are left without a peer.
        return all(_smooth_part(self.world_size, k + 1) == self.world_size for k in self._plans)

    def _segment_period(self, num_peers: int) -> int:
        return max(1, len(self._plans[num_peers]))


def _plan(world_size: int, base: int) -> list[_Round]:
    """The rounds of a period, by the rule that fits."""
    smooth = _smooth_part(world_size, base)
    if smooth == world_size:
        return _over_digits(world_size, base)
    in_sets = _over_sets(world_size, base)
    if smooth == 1:
        return in_sets
    size = world_size // smooth
    in_groups = _over_sets(size, base) + _over_digits(smooth, base, stride=size)
    return in_groups if len(in_groups) <= len(in_sets) else in_sets


def _smooth_part(number: int, base: int) -> int:
    """The largest divisor of `number` whose prime factors are at most `base`."""
    return gcd(number, factorial(base) ** number.bit_length())


def _over_digits(size: int, base: int, *, stride: int = 1) -> list[_Round]:
    """The average over `size` ranks at distances of `stride`, written in digits; `size` has no factor above `base`."""
    digits = fewest_factors(size, base)
    strides = accumulate(digits, int.__mul__, initial=stride)
    return [partial(_over_digit, base=digit, stride=step) for digit, step in zip(digits, strides, strict=False)]


def _over_digit(rank: int, *, base: int, stride: int) -> dict[int, float]:
    """Links to all ranks that differ from `rank` in one digit only, which is below `base` and counts `stride`."""
    first = rank - rank // stride % base * stride
    return {peer: 1 / base for peer in range(first, first + base * stride, stride) if peer != rank}


def _over_sets(size: int, base: int) -> list[_Round]:
    sets = _Sets(size, base)
    return [partial(sets.links, t=t) for t in range(sets.num_rounds)]


class _Sets:
    """The third rule for `size` ranks, and for each further `size` ranks alike.

    There is a set for each digit of `size` in base k+1, the largest first: `digits[l]` parts of `part_sizes[l]` ranks.
    """

    def __init__(self, size: int, base: int) -> None:
        self._size = size
        powers = [base**i for i in range(size.bit_length()) if base**i <= size]
        terms = [(size // power % base, power) for power in reversed(powers)]
        self._digits, self._part_sizes = zip(*(term for term in terms if term[0]), strict=True)
        counts = [digit * part for digit, part in zip(self._digits, self._part_sizes, strict=True)]
        self._starts = tuple(accumulate(counts, initial=0))  # the last one is `size`
        self._in_sets = [_over_digits(count, base) for count in counts]
        self._in_parts = [_over_digits(part, base) for part in self._part_sizes]
        self.num_rounds = len(self._in_sets[0]) + 1 + len(self._in_parts[0])

    def links(self, rank: int, *, t: int) -> dict[int, float]:
        place = rank % self._size
        mine = bisect_right(self._starts, place) - 1
        start, last = self._starts[mine], len(self._part_sizes) - 1
        exchange = t - len(self._in_sets[0])
        if exchange < 0:
            links = _shifted(self._in_sets[mine], t, place, start)
        elif exchange < last and exchange <= mine:
            links = self._exchange(place, exchange, is_giver=exchange == mine)
        else:
            first = place - (place - start) % self._part_sizes[mine]
            links = _shifted(self._in_parts[mine], exchange - min(mine + 1, last), place, first)
        return {rank - place + peer: weight for peer, weight in links.items()}

    def _exchange(self, place: int, index: int, *, is_giver: bool) -> dict[int, float]:
        """Set `index` with all sets after it: each rank there meets the same place at the end of every part."""
        start, after, end = self._starts[index], self._starts[index + 1], self._size
        size = self._part_sizes[index]
        weight = size / (end - start)
        unmatched = size - (end - after)  # ranks at the beginning of each part
        if is_giver:
            met = (place - start) % size - unmatched
            return {after + met: weight} if met >= 0 else {}
        met = unmatched + place - after
        return {start + part * size + met: weight for part in range(self._digits[index])}


def _shifted(rounds: Sequence[_Round], step: int, place: int, first: int) -> dict[int, float]:
    """Round `step` among the ranks from `first` on; small sets start again while larger ones are not yet done."""
    if not rounds:
        return {}
    return {first + peer: weight for peer, weight in rounds[step % len(rounds)](place - first).items()}


@lru_cache(maxsize=1024)
def fewest_factors(number: int, largest: int) -> tuple[int, ...]:
    """As few factors of 2..`largest` as have the product `number`, descending; it has no prime factor above `largest`.

    >>> fewest_factors(72, 6)
    (6, 6, 2)
    """
    if number == 1:
        return ()
    factors = (factor for factor in range(2, min(number, largest) + 1) if number % factor == 0)
    products = (sorted((factor, *fewest_factors(number // factor, largest))) for factor in factors)
    _, best = min((len(product), product) for product in products)
    return tuple(reversed(best))

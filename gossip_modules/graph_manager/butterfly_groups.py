"""Butterfly groups: disjoint groups of ranks that change every round, so that few rounds average over all ranks."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple


class Phase(NamedTuple):
    """One exchange of a group average, as one rank sees it.

    Attributes:
        out_peer: the rank that receives the mean that this rank has so far; None: nothing is sent.
        in_peer: the rank whose mean is received; None: nothing is received.
        is_first: whether the mean of this rank is the first of the two; the partner has it the other way round, so that
            all members compute the same expression.
        weight: the weight of the second mean in the mean of both; 1 for a received result.
    """

    out_peer: int | None
    in_peer: int | None
    is_first: bool = True
    weight: float = 0.5


class ButterflyGroups:
    """Disjoint groups of `group_size` ranks that change from round to round: a window that walks over a butterfly.

    A butterfly sums over P = 2^p ranks in p phases, in which rank r exchanges with r XOR 1, r XOR 2, r XOR 4, ...
    Round t uses g = log2 S of these phases, from where round t - 1 ended, wrapping around: masks
    1 << ((t g + i) mod p) for i < g. So groups of S ranks get the same sum in a round, and after ceil(log_S P) rounds
    in a row every rank has the average over all ranks.

    [Note: other worlds] If P is not a power of two, the butterfly is over the largest P' = 2^p < P, and P - P' ranks
    are left over. Each of them sends its vector to one rank of the butterfly before the first phase and receives the
    sum after the last, so some groups have more than S members. Ranks rotate by P - P' places per round, so that other
    ranks are left over each time. A round has two more messages on these ranks. Averages are exact within groups, but
    over all ranks only in the limit.

    All methods are pure functions that return the same on all ranks.

    Li et al., "Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group Averaging",
    IEEE TPDS 2021, arXiv 2005.00124, section III-B.

    Args:
        world_size: the number of ranks P.
        group_size: the number of ranks S of a group, a power of two, at most P; with 1 every rank is alone. None:
            `default_group_size(world_size)`.

    Raises:
        ValueError: the group size is not as above.

    Example:
        >>> groups = ButterflyGroups(8, group_size=4)
        >>> [groups.members(0, t) for t in range(3)]
        [(0, 1, 2, 3), (0, 1, 4, 5), (0, 2, 4, 6)]
    """

    def __init__(self, world_size: int, *, group_size: int | None = None) -> None:
        if world_size < 1:
            raise ValueError(f"got world_size={world_size}, expected at least 1")
        self.world_size = world_size
        self.group_size = default_group_size(world_size) if group_size is None else group_size
        self._num_bits = world_size.bit_length() - 1
        self._core = 1 << self._num_bits  # P'
        is_whole = isinstance(self.group_size, Integral)
        if not is_whole or self.group_size.bit_count() != 1 or not 1 <= self.group_size <= self._core:
            raise ValueError(
                f"got group_size={group_size!r} for {world_size} ranks, expected a power of two from 1 to "
                f"{self._core}; leave it out for the square root of the world"
            )
        self._num_masks = self.group_size.bit_length() - 1

    def masks(self, t: int) -> tuple[int, ...]:
        """The XOR masks of the phases of round t, which give the partners of a position of the butterfly."""
        first = t * self._num_masks
        return tuple(1 << (first + i) % self._num_bits for i in range(self._num_masks))

    def members(self, rank: int, t: int) -> tuple[int, ...]:
        """The group of `rank` in round t, itself included, ascending."""
        self._check(rank, t)
        if self.group_size == 1:
            return (rank,)
        positions = [self._position(rank, t) % self._core]
        for mask in self.masks(t):
            positions += [position ^ mask for position in positions]
        extras = [position + self._core for position in positions if position + self._core < self.world_size]
        return tuple(sorted(self._rank(position, t) for position in positions + extras))

    def num_members(self, rank: int, t: int) -> int:
        """`len(members(rank, t))`: `group_size`, or more if ranks are left over."""
        return len(self.members(rank, t))

    def phases(self, rank: int, t: int) -> tuple[Phase, ...]:
        """The exchanges of `rank` in round t for the mean of its group, equal bits everywhere: recursive doubling."""
        self._check(rank, t)
        if self.group_size == 1:
            return ()
        position = self._position(rank, t)
        if position >= self._core:
            partner = self._rank(position - self._core, t)
            return Phase(partner, None), Phase(None, partner, weight=1.0)
        butterfly, positions = [], [position]
        for mask in self.masks(t):
            others, partner = [position ^ mask for position in positions], self._rank(position ^ mask, t)
            is_first = not position & mask
            first, second = (positions, others) if is_first else (others, positions)
            num_first, num_second = (sum(1 + (p + self._core < self.world_size) for p in x) for x in (first, second))
            butterfly.append(Phase(partner, partner, is_first, num_second / (num_first + num_second)))
            positions += others
        if position + self._core >= self.world_size:
            return tuple(butterfly)
        extra = self._rank(position + self._core, t)
        return Phase(None, extra), *butterfly, Phase(extra, None)

    @property
    def num_rounds_to_mix(self) -> int:
        """ceil(log_S P): this many rounds in a row give the exact average over all ranks, if P is a power of two."""
        return -(-self._num_bits // self._num_masks) if self._num_masks else 0

    def __repr__(self) -> str:
        """Complete: with the same repr, groups are the same in all rounds; ranks compare it at the start."""
        return f"{type(self).__name__}({self.world_size}, group_size={self.group_size})"

    def _position(self, rank: int, t: int) -> int:
        """The place of a rank in round t: see [Note: other worlds]."""
        return (rank - t * (self.world_size - self._core)) % self.world_size

    def _rank(self, position: int, t: int) -> int:
        return (position + t * (self.world_size - self._core)) % self.world_size

    def _check(self, rank: int, t: int) -> None:
        if not 0 <= rank < self.world_size or t < 0:
            raise ValueError(f"got rank={rank}, t={t}, expected rank 0 to {self.world_size - 1} and t >= 0")


def default_group_size(world_size: int) -> int:
    """The square root of the world as a power of two, rounded up: 2, 2, 4, 4, 8, 8 for 2, 4, 8, 16, 32, 64 ranks.

    It is rounded up because in the paper smaller groups cost accuracy and larger ones gain nothing. If world_size is
    not a power of two, it is the value for the largest power of two below it.
    """
    num_bits = world_size.bit_length() - 1
    return 1 << (num_bits + 1) // 2

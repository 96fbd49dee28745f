"""Butterfly groups: who averages with whom in round t, such that few rounds mix everyone."""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    """One exchange of a group sum, as one rank sees it.

    Attributes:
        out_peer: who gets what this rank has summed so far; None = nobody.
        in_peer: whose message arrives; None = nobody's.
        is_result: the message is the sum of the group and takes the place of what is here, else it is added to it.
    """

    out_peer: int | None
    in_peer: int | None
    is_result: bool = False


class ButterflyGroups:
    """Disjoint groups of `group_size` ranks that change from round to round: a window that walks over a butterfly.

    A butterfly sums over P = 2^p ranks in p phases, in which rank r meets r XOR 1, r XOR 2, r XOR 4, ... Round t takes
    g = log2 S of these phases, starting where round t - 1 ended and going around: masks 1 << ((t g + i) mod p) for
    i < g. So S ranks get the same sum in a round, and after ceil(log_S P) rounds in a row everyone has a share of
    everyone.

    [Note: other worlds] Where P is no power of two the butterfly is over the largest P' = 2^p < P, and P - P' ranks
    are left over. Each gives its vector to one rank of the butterfly before the first phase and gets the sum after
    the last, so some groups have more than S members. Ranks rotate by P - P' places per round, so that it is others
    who are left over each time. One round has two messages more on these ranks; averages are exact within groups, but
    over the world only in the limit.

    All methods are pure functions, equal on all ranks.

    Li et al., "Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group Averaging",
    IEEE TPDS 2021, arXiv 2005.00124, section III-B.

    Args:
        world_size: P.
        group_size: S, a power of two, at most P; 1 = every rank alone. None = `default_group_size(world_size)`.

    Raises:
        ValueError: no such group size in this world.

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
        if self.group_size.bit_count() != 1 or not 1 <= self.group_size <= self._core:
            raise ValueError(
                f"got group_size={group_size} for {world_size} ranks, expected a power of two from 1 to {self._core}; "
                "leave it out for the square root of the world"
            )
        self._num_masks = self.group_size.bit_length() - 1

    def masks(self, t: int) -> tuple[int, ...]:
        """What a position of the butterfly differs by from those it meets in round t, in the order of phases."""
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
        extras = [position + self._core for position in positions if self._has_extra(position)]
        return tuple(sorted(self._rank(position, t) for position in positions + extras))

    def num_members(self, rank: int, t: int) -> int:
        """`len(members(rank, t))`: `group_size`, and more where ranks are left over."""
        return len(self.members(rank, t))

    def phases(self, rank: int, t: int) -> tuple[Phase, ...]:
        """What `rank` does in round t for its group's sum: recursive doubling, so that all members get equal bits."""
        self._check(rank, t)
        if self.group_size == 1:
            return ()
        position = self._position(rank, t)
        if position >= self._core:
            partner = self._rank(position - self._core, t)
            return Phase(partner, None), Phase(None, partner, is_result=True)
        partners = [self._rank(position ^ mask, t) for mask in self.masks(t)]
        butterfly = [Phase(partner, partner) for partner in partners]
        if not self._has_extra(position):
            return tuple(butterfly)
        extra = self._rank(position + self._core, t)
        return Phase(None, extra), *butterfly, Phase(extra, None)

    @property
    def num_rounds_to_mix(self) -> int:
        """ceil(log_S P): after so many rounds in a row the average over the world is exact, if P is a power of two."""
        return -(-self._num_bits // self._num_masks) if self._num_masks else 0

    def __repr__(self) -> str:
        """Complete: equal reprs mean equal groups in all rounds (ranks compare it at start)."""
        return f"{type(self).__name__}({self.world_size}, group_size={self.group_size})"

    def _position(self, rank: int, t: int) -> int:
        """[Note: other worlds]"""
        return (rank - t * (self.world_size - self._core)) % self.world_size

    def _rank(self, position: int, t: int) -> int:
        return (position + t * (self.world_size - self._core)) % self.world_size

    def _has_extra(self, position: int) -> bool:
        return position + self._core < self.world_size

    def _check(self, rank: int, t: int) -> None:
        if not 0 <= rank < self.world_size or t < 0:
            raise ValueError(f"got rank={rank}, t={t}, expected rank 0 to {self.world_size - 1} and t >= 0")


def default_group_size(world_size: int) -> int:
    """The square root of the world as a power of two, rounded up: 2, 2, 4, 4, 8, 8 for 2, 4, 8, 16, 32, 64 ranks.

    Rounded up, as the accuracy of the paper suffers from smaller groups and gains nothing from larger ones. For a
    world that is no power of two, that of the largest power of two below it.
    """
    num_bits = world_size.bit_length() - 1
    return 1 << (num_bits + 1) // 2

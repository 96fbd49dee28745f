"""Regions: the ranks that are close to each other; declared by the user, or found from measured round trips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

INSIDE_SECONDS = 1e-3
"""Round trips up to this long are inside a region: light needs them for 100 km of fibre and back."""
MIN_RATIO = 4.0
"""The smallest ratio of a round trip between regions to a round trip inside."""
_EXPECTED = "expected regions of ranks, each rank from 0 on once, such as '0-3,4-7', or '0+2,1+3' for other orders"


@dataclass(frozen=True)
class Regions:
    """Groups of ranks.

    Args:
        members: the ranks of each region; each rank from 0 to n - 1 is in one region.

    Raises:
        ValueError: a rank is missing, or is in two regions.

    Example:
        >>> regions = Regions.of("0-1,2-3")
        >>> regions.members, regions.of_rank(2), str(regions)
        (((0, 1), (2, 3)), 1, '0-1,2-3')
    """

    members: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for region in self.members for rank in region)
        if not all(self.members) or not ranks or ranks != list(range(len(ranks))):
            raise ValueError(f"got regions with the ranks {[list(region) for region in self.members]}, {_EXPECTED}")

    @classmethod
    def of(cls, given: str | Regions | Sequence[Sequence[int]]) -> Regions:
        """Return the regions that a text or lists of ranks describe.

        Args:
            given: such as "0-3,4-7" or [[0, 1, 2, 3], [4, 5, 6, 7]]. In a text, "," separates regions, "a-b" is a range
                and "+" joins ranges of one region.

        Raises:
            ValueError: the text describes no regions; see also the class.
        """
        if isinstance(given, Regions):
            return given
        if not isinstance(given, str):
            return cls(tuple(tuple(region) for region in given))
        try:
            return cls(tuple(tuple(_ranks(region)) for region in given.split(",")))
        except ValueError as error:
            raise ValueError(f"got regions={given!r} ({error}), {_EXPECTED}") from error

    @property
    def num_ranks(self) -> int:
        """The number of ranks in all regions."""
        return sum(map(len, self.members))

    def of_rank(self, rank: int) -> int:
        """Return the number of the region of a rank."""
        return self._numbers[rank]

    @cached_property
    def _numbers(self) -> Mapping[int, int]:
        """The number of the region of each rank."""
        return {rank: number for number, region in enumerate(self.members) for rank in region}

    def separate(self, u: int, v: int) -> bool:
        """Return whether two ranks, u and v, are in different regions.

        Args:
            u: a rank.
            v: another rank.
        """
        return self.of_rank(u) != self.of_rank(v)

    @property
    def size(self) -> int:
        """The number of ranks of each region: `nprocs_per_node` where a region is a node.

        Raises:
            ValueError: regions have different sizes, or the ranks of a region do not follow each other.
        """
        size = len(self.members[0])
        if sorted(self.members) != [tuple(range(k, k + size)) for k in range(0, self.num_ranks, size)]:
            raise ValueError(
                f"got regions {self}, expected equally many consecutive ranks in each, such as 0-1,2-3; start the "
                "processes in this order, or train with a graph of your own"
            )
        return size

    def arguments(self) -> dict[str, int]:
        """Return the arguments of `GossipDataParallel` that make each region one worker.

        Its processes average gradients in every step, and the algorithm runs between regions.

        Raises:
            ValueError: see `size`.
        """
        return {"nprocs_per_node": self.size}

    def mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of all ranks with the dimensions "between" and "inside" regions; collective.

        Pass `mesh["between"]` as `device_mesh` of a wrapper, and shard over `mesh["inside"]`, or average gradients over
        it.

        Args:
            device_type: of the tensors, such as "cuda" or "cpu".

        Raises:
            ValueError: see `size`, or the world has another number of ranks.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        shape = len(self.members), self.size
        if dist.get_world_size() != self.num_ranks:
            raise ValueError(f"got regions {self} in a world of {dist.get_world_size()} ranks, expected all of them")
        return init_device_mesh(device_type, shape, mesh_dim_names=("between", "inside"))

    def __str__(self) -> str:
        """The text from which `of` makes these regions."""
        return ",".join("+".join(_ranges(region)) for region in self.members)


class FoundRegions(NamedTuple):
    """Regions from measurements, and the round trips that separate them.

    regions: the regions, in the order of their lowest ranks.
    inside: the longest round trip that joins ranks of one region, in seconds; None: no pair inside was measured.
    between: the shortest round trip between two regions; None: there is one region.
    """

    regions: Regions
    inside: float | None
    between: float | None


def find_regions(round_trips: Mapping[tuple[int, int], float], hosts: Sequence[str]) -> FoundRegions:
    """Group hosts whose round trips are short beside all others, by single linkage.

    Hosts are joined from the shortest round trip on. The steps of this order have one largest ratio; if it is at least
    `MIN_RATIO`, hosts that are joined after it are in different regions. Round trips below `INSIDE_SECONDS` count as
    that long, so that two machines in one room are one region. Ranks of one host are in one region.

    Args:
        round_trips: seconds by pair of ranks. Pairs may be missing; the shortest one of two hosts counts.
        hosts: the host of each rank.

    Example:
        >>> trips = {(0, 1): 0.0002, (2, 3): 0.0004, (0, 2): 0.02, (1, 3): 0.021}
        >>> found = find_regions(trips, ["a", "b", "c", "d"])
        >>> str(found.regions), found.inside, found.between
        ('0-1,2-3', 0.0004, 0.02)
    """
    shortest: dict[frozenset[str], float] = {}
    for (u, v), seconds in round_trips.items():
        pair = frozenset((hosts[u], hosts[v]))
        shortest[pair] = min(seconds, shortest.get(pair, seconds))
    order = sorted((seconds, pair) for pair, seconds in shortest.items() if len(pair) == 2)
    every = {host: {host} for host in hosts}
    joins = [(seconds, pair) for seconds, pair in order if _join(every, pair)]
    heights = [max(seconds, INSIDE_SECONDS) for seconds, _ in joins]
    gaps = [after / before for before, after in zip([INSIDE_SECONDS, *heights], heights)]
    first = max(range(len(gaps)), key=gaps.__getitem__, default=0)
    is_one = not gaps or gaps[first] < MIN_RATIO
    near = {host: {host} for host in hosts}
    for _, pair in joins if is_one else joins[:first]:
        _join(near, pair)
    groups = list({id(near[host]): near[host] for host in hosts}.values())
    regions = Regions(tuple(tuple(rank for rank, host in enumerate(hosts) if host in group) for group in groups))
    inside = [seconds for seconds, _ in (joins if is_one else joins[:first])]
    inside += [seconds for pair, seconds in shortest.items() if len(pair) == 1]
    return FoundRegions(regions, max(inside, default=None), None if is_one else joins[first][0])


def _join(groups: dict[str, set[str]], pair: frozenset[str]) -> bool:
    """Join the groups of two hosts; returns whether they were apart."""
    one, other = (groups[host] for host in sorted(pair))
    if one is other:
        return False
    one |= other
    groups.update(dict.fromkeys(other, one))
    return True


def _ranks(text: str) -> list[int]:
    ranks: list[int] = []
    for part in text.split("+"):
        first, dash, last = part.partition("-")
        ranks += range(int(first), int(last if dash else first) + 1)
    return ranks


def _ranges(ranks: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]

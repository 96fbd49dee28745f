"""Graphs whose rounds are drawn at random, by all ranks alike, from a seed that they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .base import GraphManager
from .shift_graph import LazySequence


class RandomGraph(GraphManager):
    """A graph whose round t is drawn at random: a pure function of (seed, t), so all ranks draw the same.

    Rounds never repeat, so `period` is 0 and `in_every_round` is False: whatever holds of all rounds has to be known
    from the law of the graph. How fast ranks agree is `rho`, an expectation. Any two ranks may meet.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: the number of peers that a rank sends to per round, or a schedule of it.
        seed: the seed of all rounds, the same on all ranks; at least 0.
    """

    def __init__(self, world_size: int, *, peers_per_itr: int | Mapping[int, int] = 1, seed: int = 0) -> None:
        self.seed = as_seed(seed)
        self._last: tuple[int, Any] | None = None
        super().__init__(world_size, peers_per_itr=peers_per_itr)

    @property
    @abstractmethod
    def rho(self) -> float:
        """The factor by which a round shrinks the squared distance from the average, in expectation.

        The largest eigenvalue of E[W^T W] on vectors that sum to zero, with the weights that wrappers choose. Rounds
        are independent, so t rounds shrink it by rho^t. With a schedule: in the rounds of its last entry.
        """

    def phone_book(self, rank: int) -> Sequence[int]:
        """All other ranks, ascending."""
        self._check_rank(rank)
        return _Others(self.world_size, rank)

    def in_every_round(self, predicate: Callable[[int], bool]) -> bool:
        """See `GraphManager`; False where rounds are random, as they are too many to check."""
        is_random = any(self._segment_period(num_peers) == 0 for num_peers in self._segments.values())
        return not is_random and super().in_every_round(predicate)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, seed={self.seed})"

    @abstractmethod
    def _is_certain(self, num_peers: int) -> bool:
        """Whether all draws of a round with so many peers give the same edges."""

    def _segment_period(self, num_peers: int) -> int:
        return int(num_peers == 0 or self._is_certain(num_peers))

    @abstractmethod
    def _draw(self, t: int) -> Any:
        """What all ranks draw for round `t`."""

    def _drawn(self, t: int) -> Any:
        """`_draw(t)`, which is kept for the next query: do not change it."""
        last = self._last
        if last is None or last[0] != t:
            self._segment(t)  # refuses t < 0
            last = self._last = (t, self._draw(t))
        return last[1]

    @property
    def _last_num_peers(self) -> int:
        return self._segments[self._starts[-1]]


def as_seed(seed: int) -> int:
    """`seed` as a Python int; raises a ValueError if it is not an integer of at least 0."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"got seed={seed!r}, expected an int of at least 0, the same on all ranks.")
    return int(seed)


def random_bits(seed: int, t: int, count: int, *, start: int = 0) -> npt.NDArray[np.uint64]:
    """The words `start` to `start + count - 1` of the random 64-bit words of round `t`, in O(count + log start)."""
    # Raw output of the bit generator: numpy promises that it never changes, unlike what Generator makes of it.
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(t,)))
    if start:
        generator.advance(start)
    return np.asarray(generator.random_raw(count))


def unit_interval(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniform in [0, 1)."""
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53)


def distinct_below(bits: npt.NDArray[np.uint64], bound: int) -> npt.NDArray[np.int64]:
    """In each row of `bits` [m, k] k distinct integers of 0..bound-1, all sets alike likely: Floyd's algorithm."""
    uniform = unit_interval(bits)
    num_drawn = bits.shape[1]
    chosen = np.empty(bits.shape, dtype=np.int64)
    for column in range(num_drawn):
        largest = bound - num_drawn + column
        draws = (uniform[:, column] * (largest + 1)).astype(np.int64)
        is_taken = (chosen[:, :column] == draws[:, None]).any(axis=1)
        chosen[:, column] = np.where(is_taken, largest, draws)
    return chosen


@dataclass(frozen=True, eq=False)
class _Others(LazySequence):
    world_size: int
    rank: int

    def __len__(self) -> int:
        return self.world_size - 1

    def item(self, index: int) -> int:
        return index + (index >= self.rank)

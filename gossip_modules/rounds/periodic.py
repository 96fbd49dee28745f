"""Periodic: an algorithm whose rounds run every H steps, in pieces of the model and under training if it is told so."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import ClassVar

import torch

from .algorithm import Algorithm
from .fragment import Fragments, is_fragments


@dataclass(frozen=True)
class Periodic(Algorithm):
    """An algorithm with a round every `sync_every` optimizer steps.

    [Note: Fragments and delays] Fragment p of P has its rounds at the steps p H / P, p H / P + H, ..., with a memory of
    its own, as if it were a model. With a delay the round is resumed `delay` steps after it began: until then its first
    request is answered in a thread, under training, and then `v.x` is the model as it is by that time.

    Args:
        sync_every: H, the number of optimizer steps from one round to the next, at least 1.
        fragments: the parts of the model that have rounds at different times, evenly spread over the H steps: their
            number, for equal runs in the order of the module; or for each a list of names of modules or parameters,
            which have each trained tensor once. Where there are more than H, several have theirs in one step, one after
            the other.
        delay: tau, the number of optimizer steps for which a round travels in a thread, less than H; 0: training waits
            for it.
        own_weight: alpha, what a rank keeps of its model where a round ends: x <- alpha x + (1 - alpha) phi;
            0 <= alpha < 1. None: 1/2 with a delay, else 0. At 0 the steps taken under way are lost.
        anchor_device: "cpu" keeps the memory of the algorithm in the host's memory, and rounds are computed there: see
            [Note: Memory of the host] of `Pieces`. None: beside the model. Ranks may differ in it.

    Raises:
        ValueError: one of these is out of its range.
    """

    sync_every: int
    _: KW_ONLY
    fragments: Fragments = 1
    delay: int = 0
    own_weight: float | None = None
    anchor_device: torch.device | str | None = field(default=None, repr=False)

    has_own_times: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(self.sync_every, bool) or not isinstance(self.sync_every, int) or self.sync_every < 1:
            raise ValueError(
                f"{name}: got sync_every={self.sync_every!r}, expected a whole number of at least 1, the optimizer "
                "steps between two outer steps; 30 to 500 are usual"
            )
        if self.anchor_device is not None and str(self.anchor_device) != "cpu":
            raise ValueError(
                f"{name}: got anchor_device={self.anchor_device!r}, expected 'cpu', or None for the device of the model"
            )
        if not is_fragments(self.fragments):
            raise ValueError(
                f"{name}: got fragments={self.fragments!r}, expected their number, at least 1, or for each of them a "
                "list of names of modules, as in [['embed', 'layers.0'], ['layers.1', 'head']]; one name in a fragment "
                "is a list too: [['embed'], ['head']]"
            )
        most = self.sync_every - 1
        if isinstance(self.delay, bool) or not isinstance(self.delay, int) or not 0 <= self.delay <= most:
            raise ValueError(
                f"{name}: got delay={self.delay!r} with sync_every={self.sync_every}, expected 0 <= delay <= {most} "
                "optimizer steps, since an outer step must be over when that fragment takes its next"
            )
        if not (is_number(self.kept) and 0 <= self.kept < 1):
            raise ValueError(
                f"{name}: got own_weight={self.own_weight!r}, expected 0 <= own_weight < 1; 0 takes the anchor as it is"
            )

    @property
    def is_in_pieces(self) -> bool:
        """Whether rounds need the driver `Pieces`."""
        return self.num_fragments > 1 or self.delay > 0 or self.anchor_device is not None

    @property
    def num_fragments(self) -> int:
        """The number of fragments."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    @property
    def kept(self) -> float:
        """alpha: `own_weight`, or its default."""
        return (0.5 if self.delay else 0.0) if self.own_weight is None else self.own_weight

    def is_due(self, k: int) -> bool:
        """See `Algorithm`."""
        return bool(self.starting_at(k))

    def averages_at(self, k: int) -> bool:
        """See `Algorithm`."""
        return self.averages_exactly and bool(self.starting_at(k))

    def starting_at(self, k: int) -> list[int]:
        """The fragments that begin a round after k optimizer steps."""
        return [
            p for p in range(self.num_fragments) if k >= self._first(p) and (k - self._first(p)) % self.sync_every == 0
        ]

    def number_of(self, fragment: int, k: int) -> int:
        """The number of rounds of that fragment before step k, at which it begins one."""
        return (k - self._first(fragment)) // self.sync_every

    def _first(self, fragment: int) -> int:
        return fragment * self.sync_every // self.num_fragments or self.sync_every


def is_number(value: object) -> bool:
    """Whether it is one: not a string, None or True."""
    return isinstance(value, Real) and not isinstance(value, bool)

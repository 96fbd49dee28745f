"""Periodic: an algorithm whose rounds run every H steps, in pieces of the model and under training if it is told so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from ..flat.layout import FlatLayout
from ..flat.slots import TensorPlace
from ..flat.vector import FlatVector
from .algorithm import Algorithm


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


Fragments: TypeAlias = int | Sequence[Sequence[str]]
"""How a model is cut: into so many equal runs of its elements, or into the modules named, a list for each fragment."""

_GRAIN = 64  # elements: where equal runs are cut


class Range(NamedTuple):
    """Elements [first, last) of a segment of a flat vector."""

    segment: int
    first: int
    last: int


@dataclass(frozen=True)
class Fragment:
    """Which elements of a flat vector, and what they are side by side.

    Args:
        ranges: in ascending order, without neighbours that touch.
        layout: their layout side by side, in the dtypes of the vector; one segment for each that has some.
    """

    ranges: tuple[Range, ...]
    layout: FlatLayout

    @classmethod
    def of(cls, layout: FlatLayout, ranges: Iterable[Range]) -> Fragment:
        """The fragment of these elements of vectors of that layout."""
        merged: list[Range] = []
        for new in sorted(ranges):
            if merged and merged[-1].segment == new.segment and merged[-1].last == new.first:
                merged[-1] = merged[-1]._replace(last=new.last)
            elif new.first < new.last:
                merged.append(new)
        sizes = []
        for k, segment in enumerate(layout.segments):
            specs = [spec for r in merged if r.segment == k for spec in segment.cut(r.first, r.last)]
            if specs:
                sizes.append((segment.dtype, specs))
        return cls(tuple(merged), FlatLayout.of(sizes))

    def read(self, x: FlatVector, device: torch.device) -> FlatVector:
        """A copy of the elements in x."""
        own = FlatVector.zeros(self.layout, device)
        for place, part in self.pairs(x, own):
            part.copy_(place)
        return own

    def write(self, own: FlatVector, x: FlatVector) -> None:
        """The elements in x <- a vector of this fragment alone."""
        for place, part in self.pairs(x, own):
            place.copy_(part)

    def pairs(self, x: FlatVector, own: FlatVector) -> list[tuple[Tensor, Tensor]]:
        """Each range in x beside the same elements in `own`, a vector of this fragment alone; views."""
        segments, offsets = iter(own.segments), dict.fromkeys((r.segment for r in self.ranges), 0)
        flat = {k: next(segments) for k in offsets}
        pairs = []
        for k, first, last in self.ranges:
            start = offsets[k]
            offsets[k] = stop = start + last - first
            pairs.append((x.segments[k][first:last], flat[k][start:stop]))
        return pairs


def cut(layout: FlatLayout, fragments: Fragments, places: Sequence[TensorPlace] | None) -> list[Fragment]:
    """The fragments of a model, which have each of its elements once.

    Args:
        layout: of the flat vector.
        fragments: how it is cut; see `Periodic`.
        places: of the model's tensors in the vector, in the model's order; None: not known, equal runs are then those
            of the vector.

    Raises:
        ValueError: a tensor that is in no fragment, or in two of them.
    """
    if not isinstance(fragments, int):
        assert places is not None, "modules are named, and nobody knows where they are"
        return [Fragment.of(layout, ranges) for ranges in _by_name(places, fragments)]
    if places is None:
        places = [TensorPlace("", k, 0, segment.numel) for k, segment in enumerate(layout.segments)]
    return [Fragment.of(layout, ranges) for ranges in _evenly(places, fragments)]


def is_fragments(fragments: object) -> bool:
    """Whether it says how a model is cut: their number, or a list of names for each; one list of names is neither."""
    if isinstance(fragments, int):
        return not isinstance(fragments, bool) and fragments >= 1
    return _is_list(fragments) and all(
        _is_list(names) and all(isinstance(name, str) for name in names) for names in fragments
    )


def check_names(fragments: Fragments, module: nn.Module) -> None:
    """Raise ValueError where fragments name what the model does not have.

    Args:
        fragments: how it is cut; see `Periodic`.
        module: the model.
    """
    if isinstance(fragments, int):
        return
    known = [name for name, _ in (*module.named_modules(), *module.named_parameters(), *module.named_buffers()) if name]
    if unknown := [name for names in fragments for name in names if name not in known]:
        raise ValueError(
            f"got fragments={fragments!r}, of which {unknown} are names of no module, parameter or buffer of the "
            f"model, expected names such as {[name for name, _ in module.named_children()]}; see module.named_modules()"
        )


def _evenly(places: Sequence[TensorPlace], num_fragments: int) -> list[list[Range]]:
    """Runs of equally many elements, in the order of the places."""
    total = sum(place.last - place.first for place in places)
    stops = [min(-(-total * p // num_fragments // _GRAIN) * _GRAIN, total) for p in range(num_fragments)] + [total]
    cuts: list[list[Range]] = [[] for _ in range(num_fragments)]
    start = 0
    for place in places:
        stop = start + place.last - place.first
        for p, ranges in enumerate(cuts):
            first, last = max(start, stops[p]), min(stop, stops[p + 1])
            if first < last:
                ranges.append(Range(place.segment, place.first + first - start, place.first + last - start))
        start = stop
    return cuts


def _by_name(places: Sequence[TensorPlace], fragments: Sequence[Sequence[str]]) -> list[list[Range]]:
    """The tensors of the modules that each fragment names."""
    cuts: list[list[Range]] = [[] for _ in fragments]
    for place in places:
        owners = [p for p, names in enumerate(fragments) if any(f"{place.name}.".startswith(f"{n}.") for n in names)]
        if len(owners) != 1:
            raise ValueError(
                f"got fragments={fragments!r}, of which {len(owners)} have '{place.name}', expected each trained "
                "tensor in exactly one; name whole modules, as in [['embed', 'layers.0'], ['layers.1', 'head']], "
                "or give the number of fragments"
            )
        cuts[owners[0]].append(Range(*place[1:]))
    return cuts


def _is_list(x: object) -> TypeGuard[Sequence[Any]]:
    """Whether it is a list or its like, with something in it; a string is not."""
    return isinstance(x, Sequence) and not isinstance(x, str) and len(x) > 0

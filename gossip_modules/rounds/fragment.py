"""Fragment: the part of a model that takes one outer step at a time, so that not all of it travels at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from ..flat.layout import FlatLayout
from ..flat.slots import TensorPlace
from ..flat.vector import FlatVector

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

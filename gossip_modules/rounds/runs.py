"""Runs: views of a vector by tensor names, to copy values between vectors with different trained tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from .vector import widened


def layout_of(model: FlatLayout) -> FlatLayout:
    """Return the layout of the parameters of a model, in float32 at least."""
    return widened(model, has_buffers=False)


Places: TypeAlias = list[tuple[str, int, int, int, int]]
"""For each tensor or piece of one: its name, first element in the tensor, part of the vector, first there, size."""
Run: TypeAlias = tuple[str, int, Tensor]
"""Elements of a tensor: the name of the tensor, the first element, and a view of the elements."""


def places_of(layout: FlatLayout | None) -> Places | None:
    """Return the places of a layout; None for no layout."""
    if layout is None:
        return None
    return [
        (spec.name, spec.first, k, start, spec.numel)
        for k, segment in enumerate(layout.segments)
        for start, spec in segment.places()
    ]


def runs(places: Places | None, parts: Sequence[Tensor]) -> list[Run]:
    """Return the elements of a vector, tensor by tensor; part by part if the places are not known."""
    if places is None:
        return [(str(k), 0, part) for k, part in enumerate(parts)]
    return [(name, first, parts[k][start : start + numel]) for name, first, k, start, numel in places]


def sizes_of(places: Places | None) -> Counter[str]:
    """Return the number of elements of each tensor, by its name."""
    sizes = Counter[str]()
    for name, _, _, _, numel in places or ():
        sizes[name] += numel
    return sizes


def carry(old: Sequence[Run], new: Sequence[Run]) -> None:
    """Copy the old values of all tensors that both sides have with the same size."""
    before, after = ([(name, first, len(x)) for name, first, x in side] for side in (old, new))
    if before == after:
        for (*_, x), (*_, y) in zip(new, old, strict=True):
            x.copy_(y)
        return
    sizes, own_sizes = Counter[str](), Counter[str]()
    by_name = defaultdict[str, list[tuple[int, Tensor]]](list)
    for name, start, y in old:
        by_name[name].append((start, y))
        sizes[name] += len(y)
    for name, _, x in new:
        own_sizes[name] += len(x)
    for name, first, x in new:
        for start, y in by_name[name] if sizes[name] == own_sizes[name] else ():
            a, b = max(first, start), min(first + len(x), start + len(y))
            if a < b:
                x[a - first : b - first].copy_(y[a - start : b - start])


def tensors_beyond(known: Places | None, x: FlatVector) -> list[Tensor]:
    """Return views of the parameters of x that are not among these places."""
    there = {(name, first): numel for name, first, _, _, numel in known or ()}
    own = runs(places_of(layout_of(x.layout)), x.parameters)
    return [part for name, first, part in own if there.get((name, first)) != len(part)]

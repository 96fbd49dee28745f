"""Carrying over: what anchors of other tensors know of those that are still there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from .anchor import Anchor, parameters_of


def carry_over(old: Sequence[Anchor], new: Sequence[Anchor]) -> None:
    """Tensors that `old` had keep their anchor, their outer momentum and what a method remembers of them.

    Takes two more vectors of the size of the model while it runs.

    Args:
        old: the anchors of all fragments of a vector.
        new: those of another vector, which were just made; mutated.
    """
    _move(old, new, lambda anchor: anchor.phi.segments)
    for name in {name for anchor in old for name in anchor._memory}:
        _move(old, new, lambda anchor, name=name: anchor.memory(name))  # type: ignore[misc]
    for name in {name for anchor in old for name in _state_names(anchor)}:
        _move(old, new, lambda anchor, name=name: _state(anchor, name))  # type: ignore[misc]
    for k, anchor in enumerate(new):
        _go_on_as(anchor, old[min(k, len(old) - 1)])


def new_tensors(x: FlatVector, old: FlatLayout) -> list[Tensor]:
    """The tensors of x that vectors of the layout `old` do not have; views."""
    known = {name: last - first for name, _, first, last in _places(old)}
    return [x.segments[k][a:b] for name, k, a, b in _places(x.layout) if known.get(name) != b - a]


def _places(layout: FlatLayout) -> Iterator[tuple[str, int, int, int]]:
    """For each tensor its name, its segment and its elements [first, last) there."""
    for k, segment in enumerate(layout.segments):
        for first, spec in segment.places():
            yield spec.name, k, first, first + spec.numel


def _move(old: Sequence[Anchor], new: Sequence[Anchor], tensors_of: Callable[[Anchor], Sequence[Tensor]]) -> None:
    """What `new` has of the tensors that `old` has too <- what `old` has; with buffers or without."""
    before = _whole(old, tensors_of)
    after = _whole(new, tensors_of)
    places = {name: (k, a, b) for name, k, a, b in _places(before.layout)}
    for name, k, a, b in _places(after.layout):
        if name in places and places[name][2] - places[name][1] == b - a:
            segment, first, last = places[name]
            after.segments[k][a:b].copy_(before.segments[segment][first:last])
    for anchor in new:
        part = anchor.phi.like()
        for whole, own in anchor.fragment.pairs(after, part):
            own.copy_(whole)
        for own, moved in zip(tensors_of(anchor), _like(part, tensors_of(anchor)), strict=True):
            own.copy_(moved)


def _whole(anchors: Sequence[Anchor], tensors_of: Callable[[Anchor], Sequence[Tensor]]) -> FlatVector:
    """One vector of the tensors of all fragments."""
    layout = anchors[0].cut_from.with_dtypes(lambda dtype: dtype if dtype.itemsize >= 4 else torch.float32)
    whole = FlatVector.zeros(layout, anchors[0].phi.raw.device)
    for anchor in anchors:
        part, tensors = anchor.phi.like(), tensors_of(anchor)
        for own, tensor in zip(_like(part, tensors), tensors, strict=True):
            own.copy_(tensor)
        for place, own in anchor.fragment.pairs(whole, part):
            place.copy_(own)
    return whole


def _like(part: FlatVector, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The segments of a vector, or its parameters without buffers: as those of `tensors`."""
    has_buffers = [x.numel() for x in part.segments] == [x.numel() for x in tensors]
    return part.segments if has_buffers else parameters_of(part)


def _state_names(anchor: Anchor) -> list[str]:
    """What the outer optimizer keeps for each element."""
    if anchor.optimizer is None:
        return []
    return [
        name
        for parameter in anchor.parameters
        for name, value in anchor.optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    ]


def _state(anchor: Anchor, name: str) -> list[Tensor]:
    """That state of each parameter of the anchor; zeros where there is none yet."""
    if anchor.optimizer is None:
        return [torch.zeros_like(parameter) for parameter in anchor.parameters]
    for parameter in anchor.parameters:
        if not isinstance(anchor.optimizer.state[parameter].get(name), Tensor):
            anchor.optimizer.state[parameter][name] = torch.zeros_like(parameter)
    return [anchor.optimizer.state[parameter][name] for parameter in anchor.parameters]


def _go_on_as(anchor: Anchor, before: Anchor) -> None:
    """Counters, and the settings of the outer optimizer as they are by now."""
    anchor._num_compressed = before._num_compressed
    if anchor.optimizer is None or before.optimizer is None:
        return
    for group, theirs in zip(anchor.optimizer.param_groups, before.optimizer.param_groups, strict=False):
        group |= {name: copy.deepcopy(value) for name, value in theirs.items() if name != "params"}
    for parameter, counterpart in zip(anchor.parameters, before.parameters, strict=False):
        state, kept = anchor.optimizer.state[parameter], before.optimizer.state.get(counterpart)
        for name, value in (kept or {}).items():
            state.setdefault(name, copy.deepcopy(value))

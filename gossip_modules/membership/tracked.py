"""Tracked: the objects of `Membership.track`, as workers compare them, and their state for a newcomer at its entry."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..flat.sharded import local_of, with_shards
from ..transport.state_tree import bytes_of, copied, decode, encode, entries

_MOST = 1 << 16  # elements of a tensor of whole numbers that is sent again
_MAX_TEXT = 4 << 20  # characters; a TCPStore takes twice as many


def described(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The class of each object, and the shapes of the parameters in each group of an optimizer; plain values."""
    return {
        name: [type(x).__name__, [[list(p.shape) for p in group["params"]] for group in getattr(x, "param_groups", ())]]
        for name, x in objects.items()
    }


def check_alike(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError if a worker and its donor track different objects.

    Args:
        own, theirs: the results of `described` for the worker and its donor.
    """
    for name in sorted({*own, *theirs}):
        if own.get(name) != theirs.get(name):
            raise ValueError(
                f"got {name}={_text(own.get(name))} in track() of this worker, expected {_text(theirs.get(name))}, as "
                f"the workers of the job have it; call membership.track({', '.join(f'{x}={x}' for x in theirs)}) with "
                "the same objects before the first training step"
            )


def _text(description: Any) -> str:
    if description is None:
        return "nothing"
    kind, groups = description
    return f"{kind} of parameters {'; '.join(', '.join(map(str, group)) for group in groups):.200}" if groups else kind


class TrackedCounts:
    """The tracked state of a member at the first step of a generation, without moments and averages.

    [Note: state at entry] A donor copies the state some steps before the newcomer's first one. For parameters and
    moments this difference is harmless. A schedule of learning rates, a count of steps or a sampler would stay behind
    for ever. So at the first step each member posts its tracked state in the store, and the newcomer takes the first
    one that it finds. Members wait for nothing, and the newcomer waits until a member is at that step, which its first
    round would do too. Floating-point tensors with several elements, such as moments, and tensors with more than 65,536
    elements stay as the donor has given them. All-reduce needs them too: see `GradientEngine`.

    Args:
        clock: the step of the clock of the member.
        objects: the tracked objects of the member.

    Raises:
        Exception: of the object's `state_dict`, or a TypeError of `encode`.
    """

    def __init__(self, clock: int, objects: Mapping[str, Any]) -> None:
        self.clock = clock
        self._states: dict[str, tuple[Any, list[Tensor | None]]] = {}
        for name, x in objects.items():
            header, tensors = encode(copied(x.state_dict(), local_of))
            self._states[name] = header, [_kept(x) for x in tensors]

    def dumps(self) -> str:
        """The text for the store.

        Raises:
            ValueError: it is too long.
        """
        objects = {name: [header, list(map(_packed, tensors))] for name, (header, tensors) in self._states.items()}
        text = json.dumps([self.clock, objects])
        if len(text) > _MAX_TEXT:
            raise ValueError(f"got a tracked state of {len(text)} characters, expected {_MAX_TEXT} at most")
        return text


def load_counts(text: str, objects: Mapping[str, Any]) -> int:
    """Load the tracked state of `TrackedCounts.dumps`, and return its clock; tensors that it lacks stay as they are.

    Args:
        text: the text.
        objects: the tracked objects of a newcomer, mutated. The state of a parameter in an optimizer starts anew if the
            donor's optimizer had not stepped it.

    Raises:
        Exception: one of `GARBAGE`, or of the object's `load_state_dict`: the text is of something else.
    """
    clock, states = json.loads(text)
    for name, (header, packed) in states.items():
        own_header, own_tensors = encode(copied(objects[name].state_dict(), local_of))
        own = {place: own_tensors[i] for place, i in _places(own_header)}
        tensors: dict[int, Tensor] = {}
        for place, i in _places(header):
            if packed[i] is not None:
                tensors[i] = _unpacked(*packed[i])
            elif place in own:
                tensors[i] = own[place]
        state = decode(_without_missing(header, tensors), tensors)
        objects[name].load_state_dict(with_shards(state, objects[name]))
    return int(clock)


def _kept(x: Tensor) -> Tensor | None:
    """A copy of a tensor; None: it is not sent again, see [Note: state at entry]."""
    is_large = x.numel() > (1 if x.is_floating_point() or x.is_complex() else _MOST)
    return None if is_large else x.detach().cpu().clone()


def _packed(x: Tensor | None) -> list[Any] | None:
    if x is None:
        return None
    text = base64.b64encode(bytes_of(x).numpy().tobytes()).decode()
    return [str(x.dtype).removeprefix("torch."), list(x.shape), text]


def _unpacked(dtype: str, shape: list[int], text: str) -> Tensor:
    kind, content = getattr(torch, dtype), bytearray(base64.b64decode(text))
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"got a tensor of dtype {dtype!r}, expected one of torch")
    x = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8, device="cpu")
    return x.view(kind).reshape(shape)


def _places(header: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """The place of each tensor in a header of `encode`, and its index."""
    kind, value = header
    if kind == "tensor":
        yield place, value
    for key, child in entries(header):
        yield from _places(child, (*place, key))


def _without_missing(header: Any, tensors: Collection[int]) -> Any:
    """A header without the dicts in which a tensor is missing, such as the state of one parameter."""
    kind, value = header
    if kind not in ("dict", "OrderedDict"):
        return header
    kept = [[key, _without_missing(child, tensors)] for key, child in value if not _is_missing(child, tensors)]
    return [kind, kept]


def _is_missing(header: Any, tensors: Collection[int]) -> bool:
    return any(child[0] == "tensor" and child[1] not in tensors for _, child in entries(header))

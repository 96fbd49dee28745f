"""State trees, such as state dicts, as JSON and tensors, so that ranks exchange them without pickle."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Containers keep their types: schedulers count milestones in a Counter. A type of the user's own, such as a named
# tuple, would have to be imported by a name in the message, as pickle does it; it is refused.
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter", defaultdict: "defaultdict"}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "Size"}
_TYPES: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in (_MAPPINGS | _SEQUENCES).items()}
_FACTORIES: dict[Any, str] = {None: "", **{kind: kind.__name__ for kind in (bool, dict, float, int, list, str)}}
_MAKES = {name: factory for factory, name in _FACTORIES.items()}  # by which a defaultdict is filled

_DTYPES = {  # quantized tensors have more than numbers
    str(kind).removeprefix("torch."): kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype) and not str(kind).startswith("torch.q")
}
_MAX_DIMENSIONS, _MAX_NUMBERS = 64, 1 << 48


def encode(state: Any) -> tuple[Any, list[Tensor]]:
    """A tree of dicts, lists, tuples, numbers, strings and tensors as JSON values, and its tensors, as they are.

    An OrderedDict, a Counter, a torch.Size and a defaultdict of plain values keep their types.

    Raises:
        TypeError: a value of another type, also a derived one; or a special tensor, such as a sparse one. Names it and
            its place.
    """
    tensors: list[Tensor] = []
    return _encode(state, tensors, "state"), tensors


def decode(header: Any, tensors: Sequence[Tensor] | Mapping[int, Tensor]) -> Any:
    """The argument of `encode`; tensors: the tensors of the header, by index."""
    kind, value = header
    if kind == "tensor":
        return tensors[value]
    if kind == "defaultdict":
        factory, pairs = value
        return defaultdict(_MAKES[factory], _decoded_pairs(pairs, tensors))
    if kind in _MAPPINGS.values():
        return _TYPES[kind](_decoded_pairs(value, tensors))
    if kind in _SEQUENCES.values():
        return _TYPES[kind]([decode(item, tensors) for item in value])
    return value


def _decoded_pairs(pairs: Any, tensors: Sequence[Tensor] | Mapping[int, Tensor]) -> dict[Any, Any]:
    return {decode(key, tensors): decode(item, tensors) for key, item in pairs}


def _encode(value: Any, tensors: list[Tensor], place: str) -> Any:
    if isinstance(value, Tensor):
        _check_plain(value, place)
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if kind := _MAPPINGS.get(type(value)):
        pairs = [[_encode(k, tensors, place), _encode(v, tensors, f"{place}[{k!r}]")] for k, v in value.items()]
        if kind != "defaultdict":
            return [kind, pairs]
        if value.default_factory in _FACTORIES:
            return [kind, [_FACTORIES[value.default_factory], pairs]]
    if kind := _SEQUENCES.get(type(value)):
        return [kind, [_encode(item, tensors, f"{place}[{i}]") for i, item in enumerate(value)]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    raise TypeError(
        f"got a {type(value).__name__} in {place}, expected tensors, numbers, strings, None, lists, tuples and dicts: "
        "a worker that joins gets the state without pickle; give state_dict() of plain values"
    )


def _check_plain(x: Tensor, place: str) -> None:
    """Raise TypeError for a tensor with more, or less, than the numbers in its storage."""
    refused = {
        type(x).__name__: type(x) not in (Tensor, nn.Parameter),
        "nested tensor": x.is_nested,
        f"tensor of layout {x.layout}": x.layout != torch.strided,
        "quantized tensor": x.is_quantized,
        "meta tensor, which has no numbers,": x.is_meta,
    }
    kind = next((kind for kind, is_it in refused.items() if is_it), None)
    if kind:
        raise TypeError(
            f"got a {kind} in {place}, expected a plain tensor, whose numbers are all there is to send; give "
            "state_dict() of such, for instance x.to_dense() or x.dequantize()"
        )


def entries(header: Any) -> list[tuple[str, Any]]:
    """The entries of a container in a header of `encode`, with their keys as text; empty for a tensor or a value."""
    kind, value = header
    if kind in _SEQUENCES.values():
        return [(str(i), child) for i, child in enumerate(value)]
    if kind not in _MAPPINGS.values():
        return []
    return [(json.dumps(key), child) for key, child in (value[1] if kind == "defaultdict" else value)]


def pack(state: Any) -> tuple[Tensor, list[Tensor]]:
    """The JSON of a state, uint8, with the sizes of its tensors, and the tensors as they are.

    Raises:
        TypeError: see `encode`.
    """
    header, tensors = encode(state)
    text = json.dumps([header, specs_of(tensors)])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), tensors


def unpack(text: Tensor, *, max_bytes: int = 1 << 40) -> tuple[Any, list[Tensor]]:
    """The header of a state, for `decode`, and new tensors of the sizes in it, of at most `max_bytes` bytes.

    Raises:
        ValueError: `pack` has not made it.
    """
    header, specs = json.loads(bytes(text.tolist()))
    if num_bytes_of(specs) > max_bytes:
        raise ValueError(f"got a state of more than {max_bytes} bytes, expected less: it is of another job")
    return header, empty_tensors(specs)


def specs_of(tensors: Sequence[Tensor]) -> list[tuple[str, list[int]]]:
    """The dtypes and shapes of tensors, for JSON."""
    return [(str(x.dtype).removeprefix("torch."), list(x.shape)) for x in tensors]


def num_bytes_of(specs: Any) -> int:
    """The bytes of tensors of these dtypes and shapes together.

    Raises:
        ValueError: `specs_of` has not made them.
    """
    total = 0
    try:
        for name, shape in specs:
            is_shape = len(shape) <= _MAX_DIMENSIONS and all(type(size) is int and size >= 0 for size in shape)
            if not is_shape or math.prod(max(size, 1) for size in shape) > _MAX_NUMBERS:  # [2^60, 0] has large strides
                raise ValueError("no shape")
            total += math.prod(shape) * _DTYPES[name].itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"got {error!r}, expected dtypes and shapes of tensors") from error
    return total


def empty_tensors(specs: Any) -> list[Tensor]:
    """New tensors of these dtypes and shapes, which `num_bytes_of` has checked."""
    return [torch.empty(shape, dtype=_DTYPES[name], device="cpu") for name, shape in specs]


def bytes_of(x: Tensor) -> Tensor:
    """Its bytes, uint8; share memory where it is contiguous."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def copied(state: Any, copy: Callable[[Tensor], Tensor] = lambda x: x.detach().clone()) -> Any:
    """A copy of a state, unchanged by training; values of types unknown to `encode` are not copied.

    copy: makes the copy of each tensor.
    """
    if isinstance(state, Tensor):
        return copy(state)
    if type(state) in _MAPPINGS:
        copies = {key: copied(value, copy) for key, value in state.items()}
        return defaultdict(state.default_factory, copies) if type(state) is defaultdict else type(state)(copies)
    if type(state) in _SEQUENCES:
        return type(state)([copied(value, copy) for value in state])
    return state

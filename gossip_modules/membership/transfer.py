"""The state of training on its way to a worker that joins: tensors, and JSON for the rest; nothing is unpickled."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 4 << 20
_MAX_HEADER = 64 << 20


def encode(state: Any) -> tuple[Any, list[Tensor]]:
    """A tree of dicts, lists, tuples, numbers, strings and tensors as JSON values, and its tensors, as they are.

    Raises:
        TypeError: a value of another type; names it and its place.
    """
    tensors: list[Tensor] = []
    return _encode(state, tensors, "state"), tensors


def decode(header: Any, tensors: list[Tensor]) -> Any:
    """What `encode` was given."""
    kind, value = header
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {decode(key, tensors): decode(item, tensors) for key, item in value}
    if kind == "list":
        return [decode(item, tensors) for item in value]
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in value)
    return value


def _encode(value: Any, tensors: list[Tensor], place: str) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, dict):
        return [
            "dict",
            [[_encode(k, tensors, place), _encode(v, tensors, f"{place}[{k!r}]")] for k, v in value.items()],
        ]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_encode(item, tensors, f"{place}[{i}]") for i, item in enumerate(value)]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    raise TypeError(
        f"got a {type(value).__name__} in {place}, expected tensors, numbers, strings, None, lists, tuples and dicts: "
        "a worker that joins gets the state without pickle; give state_dict() of plain values"
    )


def send(group: dist.ProcessGroup, state: Any, *, timeout: timedelta) -> int:
    """Send a state to rank 1 of a group of two, in chunks; returns the bytes sent.

    Raises:
        RuntimeError: the other one is gone, or late.
        TypeError: see `encode`.
    """
    header, tensors = encode(state)
    tensors = [x.detach() for x in tensors]
    specs = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors]
    text = torch.frombuffer(bytearray(json.dumps([header, specs]).encode()), dtype=torch.uint8)
    total = 0
    for chunk in (torch.tensor([text.numel()]), text, *(chunk for x in tensors for chunk in _chunks(_bytes(x.cpu())))):
        group.send([chunk], 1, 0).wait(timeout)
        total += chunk.nbytes
    return total


def receive(group: dist.ProcessGroup, *, timeout: timedelta, max_bytes: int = 1 << 40) -> Any:
    """The state that rank 0 sends, of at most so many bytes.

    Raises:
        RuntimeError: the other one is gone, or late.
        ValueError: it has sent something else.
    """
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], 0, 0).wait(timeout)
    if not 0 < int(size) <= _MAX_HEADER:
        raise ValueError(f"got a state with a header of {int(size)} bytes, expected 1 to {_MAX_HEADER}")
    text = torch.empty(int(size), dtype=torch.uint8)
    group.recv([text], 0, 0).wait(timeout)
    header, specs = json.loads(bytes(text.tolist()))
    tensors, total = [], 0
    for name, shape in specs:
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"got a tensor of dtype {name!r}, expected one of torch")
        total += math.prod(shape) * dtype.itemsize
        if total > max_bytes:
            raise ValueError(f"got a state of more than {max_bytes} bytes, expected less: it is of another job")
        x = torch.empty(shape, dtype=dtype)
        for chunk in _chunks(_bytes(x)):
            group.recv([chunk], 0, 0).wait(timeout)
        tensors.append(x)
    return decode(header, tensors)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(CHUNK_BYTES) if x.numel() else ()

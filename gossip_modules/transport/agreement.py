"""Before the first round: do all ranks train the same model over the same graph with the same options?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Transport
from .state_tree import bytes_of, decode, pack, unpack

_NOTE_BYTES = 512  # of each rank's finding: enough to name one difference


def check_agreement(
    transport: Transport,
    description: Mapping[str, str | Sequence[str]],
    *,
    what: str = "comparing model and options",
    remedy: str = "wrap the same model with the same options on every rank",
) -> None:
    """Compare this rank's description with rank 0's; collective.

    Args:
        transport: over the ranks that must agree.
        description: what must be equal, by name; a list is compared item by item.
        what: is compared, for errors of the transport.
        remedy: for the error.

    Raises:
        ValueError: on every rank, naming each rank that differs and its first difference.
    """
    if transport.world_size == 1:
        return
    mine = json.dumps(description).encode()
    length = torch.tensor([len(mine)], device=transport.device)
    transport.broadcast(length, source=0, what=what)
    buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=transport.device)
    if transport.rank == 0:
        buffer.copy_(_bytes(mine))
    transport.broadcast(buffer, source=0, what=what)
    note = _difference(json.loads(bytes(buffer.tolist())), json.loads(mine))
    notes = torch.zeros(transport.world_size * _NOTE_BYTES, dtype=torch.uint8, device=transport.device)
    padded = _bytes(note.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")).to(transport.device)
    transport.all_gather(notes, padded, what=what)
    found = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in notes.view(-1, _NOTE_BYTES)]
    differing = [f"rank {transport.names[i]}: {text}" for i, text in enumerate(found) if text]
    if differing:
        raise ValueError(f"ranks do not agree with rank {transport.names[0]}: {'; '.join(differing)}; {remedy}")


def broadcast_tensors(transport: Transport, tensors: Sequence[Tensor], *, chunk_bytes: int = 1 << 26) -> None:
    """Every tensor <- its value on rank 0, in place, a chunk of several tensors at a time; collective."""
    chunk: list[Tensor] = []
    num_bytes = 0
    for i, tensor in enumerate(tensors):
        chunk.append(tensor)
        num_bytes += _num_bytes(tensor)
        is_last = i == len(tensors) - 1
        if is_last or num_bytes >= chunk_bytes or tensors[i + 1].device != tensor.device:
            flat = torch.cat([x.detach().contiguous().view(-1).view(torch.uint8) for x in chunk])
            transport.broadcast(flat, source=0, what="broadcasting the model of rank 0")
            for x, value in zip(chunk, flat.split([_num_bytes(x) for x in chunk]), strict=True):
                x.detach().copy_(value.clone().view(x.dtype).view(x.shape))
            chunk, num_bytes = [], 0


def broadcast_state(transport: Transport, state: Any, *, source: int, what: str) -> Any:
    """The state tree of rank `source`, on all ranks: tensors, and JSON for the rest; collective.

    Args:
        transport: over the ranks.
        state: see `encode`; of the source only.
        source: whose it is.
        what: for errors.

    Returns:
        `state` itself on the source, elsewhere one of new tensors on the CPU.

    Raises:
        TypeError: (on the source) see `encode`.
        TimeoutError, ConnectionError: a rank is late or gone.
    """
    is_source = transport.rank == source
    text, tensors = pack(state) if is_source else (torch.empty(0, dtype=torch.uint8, device="cpu"), [])
    size = torch.tensor([text.numel()], device="cpu")
    transport.broadcast(size, source=source, what=what)
    if not is_source:
        text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    transport.broadcast(text, source=source, what=what)
    header, tensors = (None, tensors) if is_source else unpack(text)
    for x in tensors:
        if x.numel():
            transport.broadcast(bytes_of(x.detach().cpu()), source=source, what=what)
    return state if is_source else decode(header, tensors)


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _difference(expected: Mapping[str, str | Sequence[str]], got: Mapping[str, str | Sequence[str]]) -> str:
    """The first thing that differs, in words; empty when nothing does."""
    for key in dict.fromkeys([*expected, *got]):
        ours, theirs = got.get(key), expected.get(key)
        if ours == theirs:
            continue
        if isinstance(ours, list) and isinstance(theirs, list):
            for mine, other in zip(ours, theirs, strict=False):
                if mine != other:
                    return f"{key}: got {mine}, expected {other}"
            longer, shorter = (ours, theirs) if len(ours) > len(theirs) else (theirs, ours)
            first = longer[len(shorter)]
            return f"{key}: got {len(ours)} entries, expected {len(theirs)}; only one rank has {first}"
        return f"{key}: got {ours}, expected {theirs}"
    return ""

"""Before the first round: do all ranks train the same model over the same graph with the same options?"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .base import Transport
from .state_tree import bytes_of, decode, pack, unpack

REMEDY = "wrap the same model with the same options on every rank"
_NOTE_BYTES = 1024  # of each rank's finding: enough to name one difference


def check_agreement(
    transport: Transport,
    description: Mapping[str, str | Sequence[str]],
    *,
    what: str = "comparing model and options",
    remedy: str = REMEDY,
) -> None:
    """Compare this rank's description with rank 0's; collective.

    Args:
        transport: over the ranks that must agree.
        description: what must be equal, by name; a list is compared item by item.
        what: is compared, for errors of the transport.
        remedy: for the error.

    Raises:
        ValueError: some rank differs; raised on every rank, with each differing rank and its first difference.
    """
    if found := find_difference(transport, description, what=what):
        raise ValueError(f"{found}; {remedy}")


_OPENING = "ranks do not agree with rank"


def find_difference(
    transport: Transport,
    description: Mapping[str, str | Sequence[str]],
    *,
    what: str = "comparing model and options",
    found: str = "",
) -> str:
    """Return the disagreement of these ranks in words, "" if all agree; collective.

    Args:
        transport: over the ranks that must agree.
        description: see `check_agreement`.
        what: the name of the compared settings, for errors of the transport.
        found: a disagreement of this rank with ranks of another group; all ranks of this group then return it.
    """
    if transport.world_size == 1:
        return found
    if _is_equal(transport, json.dumps(description, sort_keys=True), is_wanted=not found, what=what):
        return ""
    text = json.dumps(description)  # in this order differences are named
    expected = broadcast_state(transport, text, source=0, what=what)
    note = found or _difference(json.loads(expected), json.loads(text))
    padded = note.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    notes = rows_of_all(transport, mine, what=what)
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in notes]
    if elsewhere := [text for text in texts if text.startswith(_OPENING)]:
        return elsewhere[0]
    differing = [f"rank {transport.names[i]}: {text}" for i, text in enumerate(texts) if text]
    return f"{_OPENING} {transport.names[0]}: {'; '.join(differing)}"


def rows_of_all(transport: Transport, own: Tensor, *, what: str) -> Tensor:
    """Return a few numbers of all ranks, [number of ranks, number of numbers]; collective.

    Args:
        transport: over the ranks.
        own: the numbers of this rank, [number of numbers].
        what: the name of the numbers, for errors of the transport.
    """
    rows = own.new_empty(transport.world_size * own.numel())
    transport.all_gather(rows, own, what=what)
    return rows.view(transport.world_size, -1)


def broadcast_tensors(transport: Transport, tensors: Sequence[Tensor], *, chunk_bytes: int = 1 << 26) -> None:
    """Every tensor <- its value on rank 0, in place, a chunk of several tensors at a time; collective."""
    ends = itertools.accumulate(x.nbytes for x in tensors)
    places = [(x.device, end // chunk_bytes) for x, end in zip(tensors, ends, strict=True)]
    for _, pairs in itertools.groupby(zip(places, tensors, strict=True), key=itemgetter(0)):
        chunk = [x.detach() for _, x in pairs]
        flat = torch.cat([bytes_of(x) for x in chunk])
        transport.broadcast(flat, source=0, what="broadcasting the model of rank 0")
        for x, value in zip(chunk, flat.split([x.nbytes for x in chunk]), strict=True):
            x.copy_(value.clone().view(x.dtype).view(x.shape))


def broadcast_state(transport: Transport, state: Any, *, source: int, what: str) -> Any:
    """The state tree of rank `source`, on all ranks: tensors, and JSON for the rest; collective.

    Args:
        transport: over the ranks.
        state: see `encode`; of the source only.
        source: the owner.
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
        text = text.new_empty(int(size))
    transport.broadcast(text, source=source, what=what)
    header, tensors = (None, tensors) if is_source else unpack(text)
    for x in tensors:
        if x.numel():
            transport.broadcast(bytes_of(x.detach().cpu()), source=source, what=what)
    return state if is_source else decode(header, tensors)


def _is_equal(transport: Transport, text: str, *, is_wanted: bool, what: str) -> bool:
    """Whether all ranks have this text, and want it; collective, one sum.

    [Note: agreement in one sum] n numbers h are equal if and only if n sum h^2 = (sum h)^2. So the sums of the bytes of
    a hash, and of their squares, tell each rank whether the hashes of all ranks are equal.
    """
    h = torch.tensor(list(hashlib.sha256(text.encode()).digest()), device="cpu")
    sums = torch.cat([h, h * h, h.new_tensor([not is_wanted])])
    transport.all_reduce(sums, what=what)
    first, second, num_unwilling = sums.split([len(h), len(h), 1])
    return bool((transport.world_size * second == first * first).all()) and not num_unwilling


def _difference(expected: Mapping[str, str | Sequence[str]], got: Mapping[str, str | Sequence[str]]) -> str:
    """The first difference, in words; empty where nothing differs."""
    for key in dict.fromkeys([*expected, *got]):
        ours, theirs = got.get(key), expected.get(key)
        if ours == theirs:
            continue
        if isinstance(ours, list) and isinstance(theirs, list):
            mine, other = next(pair for pair in itertools.zip_longest(ours, theirs) if pair[0] != pair[1])
            if mine is not None and other is not None:
                return f"{key}: got {mine}, expected {other}"
            return f"{key}: got {len(ours)} entries, expected {len(theirs)}; only one rank has {mine or other}"
        return f"{key}: got {ours}, expected {theirs}"
    return ""

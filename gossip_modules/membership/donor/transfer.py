"""The state of training on its way to a worker that joins: tensors, and JSON for the rest; nothing is unpickled."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...transport.deadline import Deadline
from ...transport.state_tree import bytes_of, decode, pack, unpack
from ...transport.threads import Waits

CHUNK_BYTES = 4 << 20
_MAX_HEADER = 64 << 20


def send(group: dist.ProcessGroup, state: Any, *, timeout: timedelta) -> int:
    """Send a state to rank 1 of a group of two, in chunks; returns the bytes sent.

    Raises:
        RuntimeError: the other one is gone, or late.
        TypeError: see `encode`.
    """
    text, tensors = pack(state)
    contents = (bytes_of(x.detach().cpu()) for x in tensors)
    total = 0
    for chunk in (torch.tensor([text.numel()], device="cpu"), text, *(chunk for x in contents for chunk in _chunks(x))):
        group.send([chunk], 1, 0).wait(timeout)
        total += chunk.nbytes
    return total


def receive(
    group: dist.ProcessGroup, *, deadline: Deadline, max_bytes: int = 1 << 40, waits: Waits | None = None
) -> Any:
    """The state that rank 0 sends.

    Args:
        group: of two ranks.
        deadline: of all waits; each piece that has come extends it by the time that it took.
        max_bytes: of the state.
        waits: by which another thread ends the wait for it.

    Raises:
        RuntimeError: the other one is gone, or late.
        ValueError: it has sent something else.
    """

    def await_chunk(chunk: Tensor) -> None:
        work, before = group.recv([chunk], 0, 0), deadline.passed
        if waits is None:
            work.wait(deadline.left_for_gloo)
        else:
            waits.wait(work, deadline.left_for_gloo)
        deadline.extend(deadline.passed - before)

    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    await_chunk(size)
    if not 0 < int(size) <= _MAX_HEADER:
        raise ValueError(f"got a state with a header of {int(size)} bytes, expected 1 to {_MAX_HEADER}")
    text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    await_chunk(text)
    header, tensors = unpack(text, max_bytes=max_bytes)
    for x in tensors:
        for chunk in _chunks(bytes_of(x)):
            await_chunk(chunk)
    return decode(header, tensors)


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(CHUNK_BYTES) if x.numel() else ()

"""What a compressed message is made of: its header, its buffer, and the runs of tensors that it describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..flat.layout import FlatLayout, TensorSpec, align
from ..flat.vector import FlatVector

_ALIGNMENT = 8  # bytes; a tensor of any dtype may start there
WORD = 1 << 32  # the numbers in a header are unsigned and have 32 bits


class MessageBuffer:
    """The memory of one message: fields of any dtype in one uint8 tensor, each aligned to 8 bytes.

    Args:
        sizes: the dtype and the number of elements of each field.
        device: the device of the memory.

    Attributes:
        raw: the whole message, uint8 [number of bytes]; zero at first.
        fields: a view of each field.
    """

    def __init__(self, sizes: Sequence[tuple[torch.dtype, int]], device: torch.device) -> None:
        starts, stop = [], 0
        for dtype, numel in sizes:
            starts.append(stop)
            stop = align(stop + numel * dtype.itemsize, _ALIGNMENT)
        self.sizes = tuple(sizes)
        self.raw = torch.zeros(stop, dtype=torch.uint8, device=device)
        self.fields = tuple(
            self.raw[start : start + numel * dtype.itemsize].view(dtype)
            for start, (dtype, numel) in zip(starts, sizes, strict=True)
        )


class Header:
    """The 8 bytes that are sent ahead of a message: its number and a checksum, both modulo 2**32.

    Args:
        number: the number of the message among those of its sender.
        checksum: a number that the receiver computes as well and compares.
        device: the device of the 8 bytes.
    """

    def __init__(self, number: int = 0, checksum: int = 0, *, device: torch.device) -> None:
        words = torch.tensor([number % WORD, checksum % WORD], dtype=torch.int64)
        # Stored as int32 with the same bits, since torch has few operations on unsigned numbers.
        self.raw = torch.where(words < WORD // 2, words, words - WORD).to(device, torch.int32)

    def read(self) -> tuple[int, int]:
        """The number and the checksum. Waits for the device."""
        number, checksum = self.raw.tolist()
        return number % WORD, checksum % WORD


class TensorRun(NamedTuple):
    """Neighbouring tensors of one segment of a flat vector.

    Attributes:
        segment: the index of the segment.
        first, last: the run is the elements [first, last) of that segment.
        specs: the tensors, in order.
    """

    segment: int
    first: int
    last: int
    specs: tuple[TensorSpec, ...]

    def of(self, vector: FlatVector) -> Tensor:
        """These elements of a vector; shares its memory."""
        return vector.segments[self.segment][self.first : self.last]


def tensor_runs(layout: FlatLayout, predicate: Callable[[TensorSpec], bool]) -> list[TensorRun]:
    """The tensors of a layout for which `predicate` is true, in as few runs as possible."""
    return list(_joined(layout, predicate))


def _joined(layout: FlatLayout, predicate: Callable[[TensorSpec], bool]) -> Iterator[TensorRun]:
    for index, segment in enumerate(layout.segments):
        run: list[TensorSpec] = []
        start = 0
        for first, spec in segment.places():
            if spec.numel and predicate(spec):
                start = start if run else first
                run.append(spec)
            elif run and spec.numel:
                yield TensorRun(index, start, first, tuple(run))
                run = []
        if run:
            yield TensorRun(index, start, start + sum(spec.numel for spec in run), tuple(run))

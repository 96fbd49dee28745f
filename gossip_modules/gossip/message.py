"""A compressed message: its header, its pieces, and which part of a vector is which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..flat.layout import FlatLayout, Part, align
from ..flat.vector import FlatVector

_ALIGNMENT = 8  # bytes; any dtype may be viewed there
_WORD = 1 << 32  # header words are unsigned 32-bit numbers


class Envelope:
    """One message: pieces of any dtype in one uint8 run, each aligned to 8 bytes.

    Args:
        sizes: dtype and number of elements of each piece.
        device: where it lives.
    """

    def __init__(self, sizes: Sequence[tuple[torch.dtype, int]], device: torch.device) -> None:
        starts, stop = [], 0
        for dtype, numel in sizes:
            starts.append(stop)
            stop = align(stop + numel * dtype.itemsize, _ALIGNMENT)
        self.sizes = tuple(sizes)
        self.raw = torch.zeros(stop, dtype=torch.uint8, device=device)
        self.pieces = tuple(
            self.raw[start : start + numel * dtype.itemsize].view(dtype)
            for start, (dtype, numel) in zip(starts, sizes, strict=True)
        )


class Header:
    """What goes before a message, 8 bytes: its number among those of its sender, and a checksum; both modulo 2**32.

    Args:
        number: of the message.
        checksum: whose meaning is the algorithm's.
        device: where it lives.
    """

    def __init__(self, number: int = 0, checksum: int = 0, *, device: torch.device) -> None:
        words = torch.tensor([number % _WORD, checksum % _WORD], dtype=torch.int64)
        # The bits of unsigned words as int32, since torch has few operations on unsigned numbers.
        self.raw = torch.where(words < _WORD // 2, words, words - _WORD).to(device, torch.int32)

    def read(self) -> tuple[int, int]:
        """Number and checksum. Waits for the device."""
        number, checksum = self.raw.tolist()
        return number % _WORD, checksum % _WORD


class Section(NamedTuple):
    """Elements [first, last) of segment `segment`, and the tensors they are."""

    segment: int
    first: int
    last: int
    parts: tuple[Part, ...]

    def of(self, vector: FlatVector) -> Tensor:
        """These elements of a vector; shares memory."""
        return vector.segments[self.segment][self.first : self.last]


def sections(layout: FlatLayout, predicate: Callable[[Part], bool]) -> list[Section]:
    """The parts of a layout for which `predicate` holds, in as few sections as possible."""
    return list(_joined(layout, predicate))


def _joined(layout: FlatLayout, predicate: Callable[[Part], bool]) -> Iterator[Section]:
    for index, segment in enumerate(layout.segments):
        run: list[Part] = []
        start = 0
        for first, part in segment.places():
            if part.numel and predicate(part):
                start = start if run else first
                run.append(part)
            elif run and part.numel:
                yield Section(index, start, first, tuple(run))
                run = []
        if run:
            yield Section(index, start, start + sum(part.numel for part in run), tuple(run))

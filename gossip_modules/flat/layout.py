"""FlatLayout: the places of tensors in a flat vector, in segments of one dtype.

Three words mean part of a vector. A *segment* has all elements of one dtype, tensor after tensor. A *chunk* is sent or
mixed at once; see [Note: chunks]. A *shard* is the share of one process; see `FlatVector.shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; every segment and every shard starts on a cache line, so any dtype may be viewed there
CHUNK_BYTES = 16 << 20  # 140 ms of a link of 1 Gbit/s, 14 ms at 10 Gbit/s
CHUNK_ALIGNMENT = 256  # bytes from the start of a segment; see [Note: chunks]


class TensorSpec(NamedTuple):
    """The shape of one tensor of a segment. A buffer is a statistic, which no lossy code may touch, or it `takes_code`.

    The name makes layouts of different tensors with equal shapes differ, because memory of one must not be applied to
    the other. For a part of a tensor, `first` is its first element there, for the same reason.
    """

    shape: tuple[int, ...]
    is_buffer: bool = False
    name: str = ""
    first: int = 0
    takes_code: bool = False

    @classmethod
    def of(cls, x: Tensor, *, is_buffer: bool = False, name: str = "", takes_code: bool = False) -> TensorSpec:
        """Return the spec of a tensor. A complex number counts as two: columns of a matrix, elements of a vector.

        Args:
            x: a tensor of any dtype and shape.
            is_buffer: whether it is a buffer of its module.
            name: its name in the module.
            takes_code: whether it is a buffer that averages and messages with a code send by the code.
        """
        pair = (2,) if x.is_complex() else ()
        shape = (*x.shape, *pair) if x.dim() > 1 else (x.numel() * prod(pair),)
        return cls(shape, is_buffer, name, takes_code=takes_code)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is a parameter of two or more dimensions: dim 0 by the rest."""
        return not self.is_buffer and len(self.shape) > 1

    def cut(self, first: int, last: int) -> Iterator[TensorSpec]:
        """Yield specs of elements [first, last): whole rows stay one matrix, the ends of a torn row are vectors."""
        if (first, last) == (0, self.numel):
            yield self
            return
        row = prod(self.shape[1:]) if self.is_matrix else 0
        top, bottom = (-(-first // row), last // row) if row else (0, 0)
        if top >= bottom:
            yield self._replace(shape=(last - first,), first=self.first + first)
            return
        if first < top * row:
            yield self._replace(shape=(top * row - first,), first=self.first + first)
        yield self._replace(shape=(bottom - top, *self.shape[1:]), first=self.first + top * row)
        if bottom * row < last:
            yield self._replace(shape=(last - bottom * row,), first=self.first + bottom * row)


class Segment(NamedTuple):
    """All elements of one dtype: bytes [start, start + numel * itemsize) of the vector; `specs` are its tensors."""

    dtype: torch.dtype
    start: int
    numel: int
    specs: tuple[TensorSpec, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.numel * self.dtype.itemsize

    def places(self) -> Iterator[tuple[int, TensorSpec]]:
        """Every tensor with its first element; one vector where the tensors are not known."""
        first = 0
        for spec in self.specs or (TensorSpec((self.numel,)),):
            yield first, spec
            first += spec.numel

    def coded(self) -> list[tuple[int, int, bool]]:
        """Return runs of elements [first, last) whose tensors all take a code, or all do not."""
        found: list[tuple[int, int, bool]] = []
        for first, spec in self.places():
            if found and found[-1][2] == spec.takes_code:
                found[-1] = (found[-1][0], first + spec.numel, spec.takes_code)
            else:
                found.append((first, first + spec.numel, spec.takes_code))
        return found

    def cut(self, first: int, last: int) -> tuple[TensorSpec, ...]:
        """Return the tensors, or the parts of tensors, in elements [first, last)."""
        ranges = ((spec, max(first - a, 0), min(last - a, spec.numel)) for a, spec in self.places())
        return tuple(cut for spec, start, stop in ranges if start < stop for cut in spec.cut(start, stop))


def check_chunk_bytes(num_bytes: int) -> None:
    """Raise ValueError where vectors cannot be cut into chunks of so many bytes."""
    if num_bytes <= 0 or num_bytes % CHUNK_ALIGNMENT:
        raise ValueError(
            f"got chunk_bytes={num_bytes}, expected a positive multiple of {CHUNK_ALIGNMENT}, so that every cut is "
            "between two elements of any dtype"
        )


def align(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """`num_bytes` rounded up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class FlatLayout:
    """Segments of a vector, in order of their first byte, and its padded length in bytes."""

    segments: tuple[Segment, ...]
    num_bytes: int

    @classmethod
    def of(cls, sizes: Iterable[tuple[torch.dtype, int | Sequence[TensorSpec]]], num_shards: int = 1) -> FlatLayout:
        """One segment for each (dtype, elements or tensors), padded so that `num_shards` equal shards are aligned."""
        segments, start = [], 0
        for dtype, size in sizes:
            specs = () if isinstance(size, int) else tuple(size)
            numel = size if isinstance(size, int) else sum(spec.numel for spec in specs)
            segments.append(Segment(dtype, start, numel, specs))
            start = align(segments[-1].stop)
        return cls(tuple(segments), align(start, ALIGNMENT * num_shards))

    @property
    def buffer_segments(self) -> list[Segment]:
        """The buffers of each segment that has some, in the order of `FlatVector.buffers`."""
        return [segment for segment in self.where(is_buffer=True).segments if segment.numel]

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in their order."""
        return [spec.name for segment in self.segments for spec in segment.specs]

    @lru_cache(maxsize=64)  # noqa: B019 (layouts are few, small and equal by value)
    def cut(self, start: int, stop: int) -> FlatLayout:
        """Return the layout of bytes [start, stop): the part of each segment in that range, counted from `start`."""
        segments = []
        for segment in self.segments:
            first, last = max(segment.start, start), min(segment.stop, stop)
            if first < last:
                elements = [(byte - segment.start) // segment.dtype.itemsize for byte in (first, last)]
                numel = elements[1] - elements[0]
                segments.append(Segment(segment.dtype, first - start, numel, segment.cut(*elements)))
        return FlatLayout(tuple(segments), stop - start)

    def chunks(self, num_bytes: int = CHUNK_BYTES) -> tuple[tuple[int, int], ...]:
        """Return [start, stop) in bytes of consecutive chunks of at most `num_bytes`, together the whole vector.

        [Note: chunks] Long vectors are sent and mixed in chunks, so that work on one chunk hides under the transfer of
        the next. Cuts are a pure function of the layout, so ranks need no agreement on them. Vectorised loops round
        their last elements in another way than the others. Cuts are therefore multiples of `CHUNK_ALIGNMENT` in their
        segment, twice the longest step of such a loop, and chunks give the same bits as the whole vector.

        Args:
            num_bytes: a positive multiple of CHUNK_ALIGNMENT.

        Raises:
            ValueError: `num_bytes` is something else.
        """
        check_chunk_bytes(num_bytes)
        chunks, start = [], 0
        while self.num_bytes - start > num_bytes:
            target = start + num_bytes
            begin = max((segment.start for segment in self.segments if segment.start <= target), default=0)
            stop = begin + (target - begin) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
            chunks.append((start, stop))
            start = stop
        return (*chunks, (start, self.num_bytes))

    @lru_cache(maxsize=64)  # noqa: B019 (as above)
    def where(self, *, is_buffer: bool) -> FlatLayout:
        """Return the layout of the buffers of each segment, or of the other elements, over the same bytes."""
        halves = []
        for segment in self.segments:
            num_buffers = sum(spec.numel for _, spec in segment.places() if spec.is_buffer)
            middle = segment.numel - num_buffers  # buffers are last
            first, last = (middle, segment.numel) if is_buffer else (0, middle)
            start = segment.start + first * segment.dtype.itemsize
            halves.append(Segment(segment.dtype, start, last - first, segment.cut(first, last)))
        return FlatLayout(tuple(halves), self.num_bytes)

    def with_dtypes(self, choose: Callable[[torch.dtype], torch.dtype]) -> FlatLayout:
        """The same segments in other dtypes."""
        return FlatLayout.of((choose(segment.dtype), segment.specs or segment.numel) for segment in self.segments)

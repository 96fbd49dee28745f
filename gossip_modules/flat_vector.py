"""What travels: one contiguous run of bytes with typed segments, and the push-sum weight beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; every segment and every slice starts on a cache line, so any dtype may be viewed there
CHUNK = 1 << 18  # elements mixed at a time where the storage is narrower than float32: the scratch stays in cache


class Part(NamedTuple):
    """One tensor of a segment. A buffer is a statistic, which no lossy code may touch."""

    shape: tuple[int, ...]
    is_buffer: bool = False

    @classmethod
    def of(cls, x: Tensor, *, is_buffer: bool = False) -> Part:
        """What a code may know of a tensor. Complex numbers are pairs: columns of a matrix, elements of a vector."""
        pair = (2,) if x.is_complex() else ()
        return cls((*x.shape, *pair) if x.dim() > 1 else (x.numel() * prod(pair),), is_buffer)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is a parameter of two or more dimensions: dim 0 by the rest."""
        return not self.is_buffer and len(self.shape) > 1

    def cut(self, first: int, last: int) -> Iterator[Part]:
        """Elements [first, last): the whole rows of a matrix stay one, the ends of a torn row are vectors."""
        if (first, last) == (0, self.numel):
            yield self
            return
        row = prod(self.shape[1:]) if self.is_matrix else 0
        top, bottom = (-(-first // row), last // row) if row else (0, 0)
        if top >= bottom:
            yield Part((last - first,), self.is_buffer)
            return
        if first < top * row:
            yield Part((top * row - first,))
        yield Part((bottom - top, *self.shape[1:]))
        if bottom * row < last:
            yield Part((last - bottom * row,))


class Segment(NamedTuple):
    """All elements of one dtype: bytes [start, start + numel * itemsize) of the vector; `parts` are its tensors."""

    dtype: torch.dtype
    start: int
    numel: int
    parts: tuple[Part, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.numel * self.dtype.itemsize

    def places(self) -> Iterator[tuple[int, Part]]:
        """Every part with its first element; one vector where the parts are not known."""
        first = 0
        for part in self.parts or (Part((self.numel,)),):
            yield first, part
            first += part.numel

    def cut(self, first: int, last: int) -> tuple[Part, ...]:
        """The parts of elements [first, last)."""
        pieces = ((part, max(first - a, 0), min(last - a, part.numel)) for a, part in self.places())
        return tuple(piece for part, start, stop in pieces if start < stop for piece in part.cut(start, stop))


def align(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """`num_bytes` rounded up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class FlatLayout:
    """Segments of a vector, in order of their first byte, and its padded length in bytes."""

    segments: tuple[Segment, ...]
    num_bytes: int

    @classmethod
    def of(cls, sizes: Iterable[tuple[torch.dtype, int | Sequence[Part]]], num_slices: int = 1) -> FlatLayout:
        """One segment for each (dtype, elements or parts), padded so that `num_slices` equal slices are aligned."""
        segments, start = [], 0
        for dtype, size in sizes:
            parts = () if isinstance(size, int) else tuple(size)
            numel = size if isinstance(size, int) else sum(part.numel for part in parts)
            segments.append(Segment(dtype, start, numel, parts))
            start = align(segments[-1].stop)
        return cls(tuple(segments), align(start, ALIGNMENT * num_slices))

    @lru_cache(maxsize=64)  # noqa: B019 (layouts are few, small and equal by value)
    def cut(self, start: int, stop: int) -> FlatLayout:
        """The layout of bytes [start, stop): each segment's part in that range, counted from `start`."""
        parts = []
        for segment in self.segments:
            first, last = max(segment.start, start), min(segment.stop, stop)
            if first < last:
                elements = [(byte - segment.start) // segment.dtype.itemsize for byte in (first, last)]
                numel = elements[1] - elements[0]
                parts.append(Segment(segment.dtype, first - start, numel, segment.cut(*elements)))
        return FlatLayout(tuple(parts), stop - start)

    def where(self, *, is_buffer: bool) -> FlatLayout:
        """The part of each segment that is buffers, or that is not; over the same bytes."""
        halves = []
        for segment in self.segments:
            num_buffers = sum(part.numel for _, part in segment.places() if part.is_buffer)
            middle = segment.numel - num_buffers  # buffers are last
            first, last = (middle, segment.numel) if is_buffer else (0, middle)
            start = segment.start + first * segment.dtype.itemsize
            halves.append(Segment(segment.dtype, start, last - first, segment.cut(first, last)))
        return FlatLayout(tuple(halves), self.num_bytes)

    def with_dtypes(self, choose: Callable[[torch.dtype], torch.dtype]) -> FlatLayout:
        """The same segments in other dtypes."""
        return FlatLayout.of((choose(segment.dtype), segment.parts or segment.numel) for segment in self.segments)


class FlatVector:
    """A point of R^d in one piece of memory: `raw` bytes, typed `segments` over them, and a push-sum `weight`.

    Every quantity of the law x <- x + (W - I) s is a FlatVector: the parameters x, the snapshot s, the messages, the
    correction. All dtypes travel in one message because all are bytes of `raw`. Segments narrower than float32 are
    mixed in float32.

    Args:
        layout: segments and length.
        raw: uint8 [layout.num_bytes], contiguous; shared, not copied.
        weight: float64 [1] on the device of `raw`; shared. A new weight of one by default.
    """

    def __init__(self, layout: FlatLayout, raw: Tensor, weight: Tensor | None = None) -> None:
        self.layout = layout
        self.raw = raw
        self.weight = torch.ones(1, dtype=torch.float64, device=raw.device) if weight is None else weight
        self.segments = tuple(raw[s.start : s.stop].view(s.dtype) for s in layout.segments)

    @classmethod
    def zeros(cls, layout: FlatLayout, device: torch.device) -> FlatVector:
        """A new vector of zeros with weight one."""
        return cls(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device))

    @classmethod
    def over(cls, x: Tensor) -> FlatVector:
        """A vector that shares memory with a contiguous floating-point or complex tensor of any shape.

        Raises:
            ValueError: `x` is not contiguous or not floating point or complex.
        """
        if not x.is_contiguous() or not (x.is_floating_point() or x.is_complex()):
            raise ValueError(
                f"got a tensor of {x.dtype} with strides {tuple(x.stride())}, expected a contiguous floating-point or "
                "complex tensor; pass x.contiguous(), or x.float() for integers"
            )
        flat = _as_real(x).view(-1)
        segment = Segment(flat.dtype, 0, flat.numel(), (Part.of(x),))
        layout = FlatLayout((segment,), flat.numel() * flat.element_size())
        return cls(layout, flat.view(torch.uint8))

    @classmethod
    def pack(cls, tensors: Sequence[Tensor]) -> FlatVector:
        """A new vector with copies of `tensors`, one segment per dtype, in their order."""
        numels: dict[torch.dtype, int] = {}
        for x in map(_as_real, tensors):
            numels[x.dtype] = numels.get(x.dtype, 0) + x.numel()
        vector = cls.zeros(FlatLayout.of(numels.items()), tensors[0].device)
        for x, place in vector._places(tensors):
            place.copy_(x)
        return vector

    def unpack_to(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor <- its values in a vector that `pack` made; in place, without autograd."""
        for x, place in self._places(tensors):
            x.copy_(place)

    def _places(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        offsets = {x.dtype: 0 for x in self.segments}
        segments = {x.dtype: x for x in self.segments}
        for x in map(_as_real, tensors):
            start = offsets[x.dtype]
            offsets[x.dtype] += x.numel()
            yield x, segments[x.dtype][start : offsets[x.dtype]].view(x.shape)

    def where(self, *, is_buffer: bool) -> FlatVector:
        """The elements that are buffers, or that are not; shares memory, with a weight of its own."""
        return FlatVector(self.layout.where(is_buffer=is_buffer), self.raw)

    def like(self) -> FlatVector:
        """A new vector of zeros with this layout and device, weight one."""
        return FlatVector.zeros(self.layout, self.raw.device)

    def clone(self) -> FlatVector:
        """A copy in memory of its own."""
        return FlatVector(self.layout, self.raw.clone(), self.weight.clone())

    def slice(self, index: int, num_slices: int) -> FlatVector:
        """Slice `index` of `num_slices` equal slices; shares memory and weight with this vector."""
        size = self.layout.num_bytes // num_slices
        start = index * size
        return FlatVector(self.layout.cut(start, start + size), self.raw[start : start + size], self.weight)

    def copy_(self, other: FlatVector) -> FlatVector:
        """self <- other, weight included."""
        self.raw.copy_(other.raw)
        self.weight.copy_(other.weight)
        return self

    def add_(self, other: FlatVector, *, alpha: float = 1.0) -> FlatVector:
        """self <- self + alpha * other, weight included; one pass over memory."""
        self.add_segments_(other, alpha=alpha)
        self.weight.add_(other.weight, alpha=alpha)
        return self

    def add_segments_(self, other: FlatVector, *, alpha: float) -> None:
        """As `add_`, without the weight; the segments of the other may be of narrower dtypes."""
        for x, y in zip(self.segments, other.segments, strict=True):
            add_(x, y, alpha=alpha)

    def combine_(self, scale: float, others: Sequence[FlatVector], weights: Sequence[float]) -> FlatVector:
        """self <- scale * self + sum_j weights[j] * others[j], weight included.

        One pass over memory per message where the coefficients are non-negative and sum to one (a chain of lerps,
        which also leaves equal values exactly as they are), else one more.
        """
        for k, x in enumerate(self.segments):
            _combine_(x, scale, [other.segments[k] for other in others], weights)
        _combine_(self.weight, scale, [other.weight for other in others], weights)
        return self

    def difference_(self, scale: float, others: Sequence[FlatVector], weights: Sequence[float]) -> float:
        """self <- c such that alpha * c = scale * self + sum_j weights[j] * others[j]; returns alpha.

        alpha is the largest weight, factored out, so that this takes one pass over memory per message.
        """
        if any(x.element_size() < 4 for x in self.segments) or not any(weights):
            self.combine_(scale, others, weights)  # c / alpha may leave the range of a narrow type
            return 1.0
        order = sorted(range(len(weights)), key=lambda j: -abs(weights[j]))
        alpha = weights[order[0]]
        for k, x in enumerate((*self.segments, self.weight)):
            first, *rest = [((*others[j].segments, others[j].weight)[k], weights[j] / alpha) for j in order]
            torch.add(first[0], x, alpha=scale / alpha, out=x)
            for message, ratio in rest:
                x.add_(message, alpha=ratio)
        return alpha

    def multiply_by_weight_(self) -> None:
        """x = z * w: every segment times the push-sum weight; the weight stays."""
        for x in self.segments:
            _in_float32(x, lambda piece: piece.mul_(self.weight[0]))

    def divide_by_weight_(self) -> None:
        """z = x / w: every segment over the push-sum weight; the weight stays."""
        for x in self.segments:
            _in_float32(x, lambda piece: piece.div_(self.weight[0]))


def add_(x: Tensor, y: Tensor, *, alpha: float) -> None:
    """x <- x + alpha * y in place, computed in float32 where x is narrower than that; y of any floating dtype."""
    if x.element_size() < 4:  # torch rounds alpha to the dtype of x
        _combine_(x, 1.0, [y], [alpha])
    elif x.dtype is y.dtype:
        x.add_(y, alpha=alpha)
    else:  # converted a piece at a time, which is six times as fast as torch's own addition of two dtypes
        for piece, part in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
            piece.add_(part.to(x.dtype), alpha=alpha)


def _as_real(x: Tensor) -> Tensor:
    """`x` without autograd, complex numbers as pairs; shares memory."""
    return torch.view_as_real(x.detach()) if x.is_complex() else x.detach()


def _in_float32(x: Tensor, change_: Callable[[Tensor], Tensor]) -> None:
    """`change_(x)` in place; by way of small float32 copies where `x` is narrower than that."""
    if x.element_size() >= 4:
        change_(x)
        return
    for piece in x.split(CHUNK):
        piece.copy_(change_(piece.float()))


def _combine_(x: Tensor, scale: float, messages: Sequence[Tensor], weights: Sequence[float]) -> None:
    if x.element_size() < 4:
        for piece, *parts in zip(x.split(CHUNK), *(m.split(CHUNK) for m in messages), strict=True):
            total = piece.float()
            _combine_(total, scale, [part.float() for part in parts], weights)
            piece.copy_(total)
        return
    total_weight = scale
    if scale > 0 and min(weights, default=0.0) >= 0 and abs(scale + sum(weights) - 1) < 1e-9:
        for message, weight in zip(messages, weights, strict=True):
            total_weight += weight
            x.lerp_(message, weight / total_weight)
        return
    x.mul_(scale)
    for message, weight in zip(messages, weights, strict=True):
        x.add_(message, alpha=weight)

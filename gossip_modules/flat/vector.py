"""FlatVector: one contiguous run of bytes with typed segments, and the push-sum weight beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..devices import wide_dtype
from .layout import CHUNK_BYTES, FlatLayout, Segment, TensorSpec, align

CACHED_BYTES = 1 << 18  # of each of two vectors, per thread: a chunk that is gone over twice, then from cache
_segments, _weight = attrgetter("segments"), attrgetter("push_sum_weight")
SCRATCH_NUMEL = 1 << 18  # elements that are mixed in a float32 copy at once, so that the copy stays in cache
_LARGE_SCRATCH_NUMEL = 1 << 24  # where each operation is a kernel to be launched


class FlatVector:
    """A point of R^d in contiguous memory: `raw` bytes, typed `segments` over them, and a `push_sum_weight`.

    Every quantity of the update x <- x + (W - I) s is a FlatVector: the parameters x, the snapshot s, the messages and
    the correction. One message carries all dtypes, because all are bytes of `raw`. Segments narrower than float32 are
    mixed in float32.

    Args:
        layout: segments and length.
        raw: uint8 [layout.num_bytes], contiguous; shared, not copied.
        push_sum_weight: float64 [1] on the device of `raw`, float32 if the device has no float64; shared. A new
            weight of one by default.

    Attributes:
        message: uint8, `raw` and the weight behind it, where they are one piece of memory, as in `zeros`; else None.
    """

    message: Tensor | None = None

    def __init__(self, layout: FlatLayout, raw: Tensor, push_sum_weight: Tensor | None = None) -> None:
        self.layout = layout
        self.raw = raw
        if push_sum_weight is None:
            push_sum_weight = torch.ones(1, dtype=wide_dtype(raw.device), device=raw.device)
        self.push_sum_weight = push_sum_weight
        self.segments = tuple(raw[s.start : s.stop].view(s.dtype) for s in layout.segments)
        self._views: dict[tuple[int, ...], tuple[FlatVector, ...]] = {}  # shards and chunks, made once

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": {}}  # a copy's are views of the copy

    @classmethod
    def zeros(cls, layout: FlatLayout, device: torch.device) -> FlatVector:
        """Return a new vector of zeros with weight one and a `message`.

        Args:
            layout: segments and length.
            device: the device of the vector and of its weight.
        """
        dtype = wide_dtype(device)
        start = align(layout.num_bytes, dtype.itemsize)
        message = torch.zeros(start + dtype.itemsize, dtype=torch.uint8, device=device)
        vector = cls(layout, message[: layout.num_bytes], message[start:].view(dtype).fill_(1.0))
        vector.message = message
        return vector

    @classmethod
    def over(cls, x: Tensor) -> FlatVector:
        """A vector in the memory of a contiguous floating-point or complex tensor of any shape.

        Raises:
            ValueError: `x` is not contiguous or not floating point or complex.
        """
        if not x.is_contiguous() or not (x.is_floating_point() or x.is_complex()):
            raise ValueError(
                f"got a tensor of {x.dtype} with strides {tuple(x.stride())}, expected a contiguous floating-point or "
                "complex tensor; pass x.contiguous(), or x.float() for integers"
            )
        flat = _as_real(x).view(-1)
        segment = Segment(flat.dtype, 0, flat.numel(), (TensorSpec.of(x),))
        layout = FlatLayout((segment,), flat.numel() * flat.element_size())
        return cls(layout, flat.view(torch.uint8))

    @classmethod
    def pack(cls, tensors: Sequence[Tensor], *, num_buffers: int = 0, device: torch.device | None = None) -> FlatVector:
        """A new vector with copies of `tensors`, one segment per dtype, in their order.

        Args:
            tensors: floating point or complex.
            num_buffers: the number of buffers; they are the last tensors.
            device: the device of the vector; None: the device of the first tensor.
        """
        specs: dict[torch.dtype, list[TensorSpec]] = {}
        for k, x in enumerate(tensors):
            is_buffer = k >= len(tensors) - num_buffers
            specs.setdefault(_as_real(x).dtype, []).append(TensorSpec.of(x, is_buffer=is_buffer))
        vector = cls.zeros(FlatLayout.of(specs.items()), device or tensors[0].device)
        for x, place in vector._places(tensors):
            place.copy_(x)
        return vector

    def unpack_to(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values back from a vector of `pack`, without autograd.

        Args:
            tensors: written in place; dtypes, shapes and order of the tensors of `pack`.
        """
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
        """Return the elements of buffers or of parameters; shares memory, with a weight of its own.

        Args:
            is_buffer: True: the buffers; False: the other elements.
        """
        return FlatVector(self.layout.where(is_buffer=is_buffer), self.raw)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters of each segment, without buffers; shares memory. Made once."""
        return self._made_once((-2,), lambda: (self.where(is_buffer=False),))[0].segments

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of each segment with buffers; shares memory. Made once."""
        half = self._made_once((-1,), lambda: (self.where(is_buffer=True),))[0]
        return [x for x in half.segments if x.numel()]

    def like(self) -> FlatVector:
        """A new vector of zeros with this layout and device, weight one."""
        return FlatVector.zeros(self.layout, self.raw.device)

    def clone(self) -> FlatVector:
        """A copy in memory of its own."""
        return FlatVector(self.layout, self.raw.clone(), self.push_sum_weight.clone())

    def shard(self, index: int, num_shards: int) -> FlatVector:
        """Shard `index` of `num_shards` equal shards; shares memory and weight with this vector. Made once."""

        def make() -> tuple[FlatVector, ...]:
            size = self.layout.num_bytes // num_shards
            start = index * size
            raw = self.raw[start : start + size]
            return (FlatVector(self.layout.cut(start, start + size), raw, self.push_sum_weight),)

        return self._made_once((index, num_shards), make)[0]

    def chunks(self, num_bytes: int = CHUNK_BYTES) -> tuple[FlatVector, ...]:
        """Consecutive chunks of at most `num_bytes`, in the memory of this vector; see [Note: chunks] of `FlatLayout`.
        Made once.

        The chunks of a longer vector do not have its weight. A vector of one chunk is its own chunk, weight included.
        """
        if self.layout.num_bytes <= num_bytes:
            return (self,)

        def make() -> tuple[FlatVector, ...]:
            places = self.layout.chunks(num_bytes)
            return tuple(FlatVector(self.layout.cut(start, stop), self.raw[start:stop]) for start, stop in places)

        return self._made_once((num_bytes,), make)

    def _made_once(self, key: tuple[int, ...], make: Callable[[], tuple[FlatVector, ...]]) -> tuple[FlatVector, ...]:
        """Return the vectors of `make`; called once for each key."""
        if key not in self._views:
            self._views[key] = make()
        return self._views[key]

    def copy_(self, other: FlatVector) -> FlatVector:
        """self <- other, weight included."""
        self.raw.copy_(other.raw)
        self.push_sum_weight.copy_(other.push_sum_weight)
        return self

    def add_(self, other: FlatVector, *, alpha: float = 1.0) -> FlatVector:
        """self <- self + alpha * other, weight included; one pass over memory."""
        self.add_segments_(other, alpha=alpha)
        self.push_sum_weight.add_(other.push_sum_weight, alpha=alpha)
        return self

    def add_segments_(self, other: FlatVector, *, alpha: float) -> None:
        """self <- self + alpha * other, without the weight.

        Args:
            other: segments as long as these; their dtypes may be narrower.
            alpha: the factor.
        """
        for x, y in zip(self.segments, other.segments, strict=True):
            add_(x, y, alpha=alpha)

    def add_all_segments_(self, others: Sequence[FlatVector], weights: Sequence[float]) -> None:
        """self <- self + sum_j weights[j] * others[j], without the weight, in one pass over this vector.

        Args:
            others: vectors with segments as long as these; their dtypes may be narrower.
            weights: the factor of each of `others`.
        """
        for x, *messages in zip(self.segments, *map(_segments, others), strict=True):
            for chunk, *parts in in_chunks(x, *messages):
                if x.element_size() < 4:
                    _combine_(chunk, 1.0, parts, weights)
                    continue
                for part, weight in zip(parts, weights, strict=True):
                    chunk.add_(part.to(x.dtype), alpha=weight)

    def apply_and_refresh_(self, correction: FlatVector, *, alpha: float) -> None:
        """self <- self + alpha * correction, then correction <- self, without the weights.

        The result is bit-equal to `add_segments_` and a copy. Both are done chunk by chunk, so that a chunk
        is still in the cache when it is copied.

        Args:
            correction: a vector of the same layout; written in place.
            alpha: the factor.
        """
        for x, y in zip(self.segments, correction.segments, strict=True):
            size = torch.get_num_threads() * CACHED_BYTES // x.element_size()
            for chunk, other in zip(x.split(size), y.split(size), strict=True):
                add_(chunk, other, alpha=alpha)
                other.copy_(chunk)

    def combine_(self, scale: float, others: Sequence[FlatVector], weights: Sequence[float]) -> FlatVector:
        """self <- scale * self + sum_j weights[j] * others[j], weight included.

        One pass over memory per message where the coefficients are non-negative and sum to one (a chain of lerps,
        which also leaves equal values exactly as they are), else one more.
        """
        self.combine_segments_(scale, others, weights)
        self.combine_weight_(scale, others, weights)
        return self

    def difference_(self, scale: float, others: Sequence[FlatVector], weights: Sequence[float]) -> float:
        """self <- c such that alpha * c = scale * self + sum_j weights[j] * others[j]; returns alpha.

        alpha is the largest weight, factored out, so that this takes one pass over memory per message.
        """
        alpha = self.factor(weights)
        self.combine_segments_(scale, others, weights, alpha=alpha)
        self.combine_weight_(scale, others, weights, alpha=alpha)
        return 1.0 if alpha is None else alpha

    def factor(self, weights: Sequence[float]) -> float | None:
        """Return the factor of `difference_` for these weights; None counts as 1: nothing is factored out.

        The factor depends on the whole vector: all its chunks have the same.
        """
        if any(x.element_size() < 4 for x in self.segments) or not any(weights):
            return None  # c / alpha may leave the range of a narrow type
        return max(weights, key=abs)

    def combine_segments_(
        self, scale: float, others: Sequence[FlatVector], weights: Sequence[float], *, alpha: float | None = None
    ) -> None:
        """self <- (scale * self + sum_j weights[j] * others[j]) / alpha, without the push-sum weight.

        Args:
            scale: the factor of this vector.
            others: vectors of this layout.
            weights: the factor of each of `others`.
            alpha: `factor(weights)` of the whole vector; None: 1.
        """
        for x, *messages in zip(self.segments, *map(_segments, others), strict=True):
            _combine_(x, scale, messages, weights, alpha)

    def combine_weight_(
        self, scale: float, others: Sequence[FlatVector], weights: Sequence[float], *, alpha: float | None = None
    ) -> None:
        """Combine the push-sum weights alone, with the arguments of `combine_segments_`.

        The new weight is (scale * own weight + sum_j weights[j] * weight of others[j]) / alpha.
        """
        _combine_(self.push_sum_weight, scale, list(map(_weight, others)), weights, alpha)

    def reset_weight_(self) -> None:
        """w <- 1: the segments hold an estimate, or a vector without a weight; they stay."""
        self.push_sum_weight.fill_(1.0)

    def multiply_by_weight_(self, weight: Tensor | None = None) -> None:
        """x = z * w: every segment times the push-sum weight, or another one, float [1]; the weight stays."""
        self._scale_by(weight, torch.mul)

    def divide_by_weight_(self, weight: Tensor | None = None) -> None:
        """z = x / w: every segment over the push-sum weight, or another one, float [1]; the weight stays."""
        self._scale_by(weight, torch.div)

    def _scale_by(self, weight: Tensor | None, change: Callable[..., Tensor]) -> None:
        """`change(segment, weight)` in place, computed in float32 where a segment is narrower than that."""
        w = (self.push_sum_weight if weight is None else weight)[0]
        for x in self.segments:
            if x.element_size() >= 4:
                change(x, w.to(x.dtype), out=x)  # on a GPU a weight of another dtype costs half of the bandwidth
            elif x.device.type == "cuda":
                change(x, w.float().view(1), out=x)  # one kernel; a weight of no dimension would be rounded
            else:
                for (chunk,) in in_chunks(x):
                    chunk.copy_(change(chunk.float(), w))


def in_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat tensors of one length in chunks, for work that needs a float32 copy of them."""
    size = SCRATCH_NUMEL if tensors[0].device.type == "cpu" else _LARGE_SCRATCH_NUMEL
    return zip(*(x.split(size) for x in tensors), strict=True)


def add_(x: Tensor, y: Tensor, *, alpha: float) -> None:
    """x <- x + alpha * y in place, computed in float32 where x is narrower than that; y of any floating dtype."""
    if x.element_size() < 4:  # on a CPU torch rounds alpha to the dtype of x
        _combine_(x, 1.0, [y], [alpha])
    elif x.dtype is y.dtype:
        x.add_(y, alpha=alpha)
    else:  # converted a chunk at a time, which is six times as fast as torch's own addition of two dtypes
        for chunk, other in in_chunks(x, y):
            chunk.add_(other.to(x.dtype), alpha=alpha)


def scale_and_add_(x: Tensor, y: Tensor, *, scale: float, alpha: float) -> None:
    """x <- scale * x + alpha * y in place, computed in float32 where x is narrower than that; y of the same dtype."""
    _combine_(x, scale, [y], [alpha])


def _as_real(x: Tensor) -> Tensor:
    """`x` without autograd, complex numbers as pairs; shares memory."""
    return torch.view_as_real(x.detach()) if x.is_complex() else x.detach()


def _combine_(
    x: Tensor, scale: float, messages: Sequence[Tensor], weights: Sequence[float], alpha: float | None = None
) -> None:
    """x <- (scale * x + sum_j weights[j] * messages[j]) / alpha; alpha is the largest of the weights, or None for 1."""
    is_convex = scale > 0 and min(weights, default=0.0) >= 0 and abs(scale + sum(weights) - 1) < 1e-9
    if x.element_size() < 4:
        if x.device.type == "cuda" and [message.dtype for message in messages] == [x.dtype]:
            # CUDA computes a lerp or an addition in float32, and rounds once. A power of two scales bfloat16 exactly.
            if is_convex:
                x.lerp_(messages[0], weights[0] / (scale + weights[0]))
                return
            if scale == 1 or (x.dtype is torch.bfloat16 and abs(math.frexp(scale)[0]) == 0.5):
                if scale != 1:
                    x.mul_(scale)
                x.add_(messages[0], alpha=weights[0])
                return
        for chunk, *others in in_chunks(x, *messages):
            total = chunk.float()
            _combine_(total, scale, [other.float() for other in others], weights)
            chunk.copy_(total)
        return
    if alpha is not None:
        first, *rest = sorted(range(len(weights)), key=lambda j: -abs(weights[j]))
        torch.add(messages[first], x, alpha=scale / alpha, out=x)
        for j in rest:
            x.add_(messages[j], alpha=weights[j] / alpha)
        return
    total_weight = scale
    if is_convex:
        for message, weight in zip(messages, weights, strict=True):
            total_weight += weight
            x.lerp_(message, weight / total_weight)
        return
    x.mul_(scale)
    for message, weight in zip(messages, weights, strict=True):
        x.add_(message, alpha=weight)

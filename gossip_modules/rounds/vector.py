"""Vector: the parameters of a model as one vector, with the arithmetic for algorithms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..flat.distance import distance, norm
from ..flat.layout import FlatLayout, TensorSpec
from ..flat.vector import FlatVector, add_, in_chunks


class Vector:
    """The parameters of a model as one vector, such as `v.x` or a vector of the memory of an algorithm.

    A vector has one flat tensor for each dtype of the parameters, in `parts`. Complex parameters are pairs of real
    numbers. `v.x` has the dtypes of the model. Vectors of `Memory` and of `m.scratch` have float32 at least.

    An operation with a trailing underscore changes the vector in place and returns it, so calls can be chained. It
    changes no other vector, and not the buffers of the model. The other vectors must have the same parameters on the
    same device; their dtypes may differ, unless the operation says otherwise. Vectors of other lengths raise ValueError
    or RuntimeError. Numbers such as `alpha` are Python floats.

    With overlap=True `v.x` is a copy of the model: write it once in a round, or only add to it. You
    construct no vectors: take `v.x`, `m.vector(name)` or `m.scratch(name)`.

    Args:
        parts: the tensors, [d] each; [n, d] with stacked ranks.
        flat: the flat vector that contains the tensors, the buffers and the push-sum weight; None: the vector cannot
            be mixed.

    Attributes:
        buffers: the buffers of the model in this vector, one flat tensor for each dtype; none in vectors of the memory.

    Example:
        >>> x, y = (Vector([torch.tensor([1.0, 2.0])]) for _ in range(2))
        >>> x.mul_(2.0).sub_(y, alpha=0.5).parts[0].tolist()
        [1.5, 3.0]
    """

    def __init__(self, parts: Sequence[Tensor], flat: FlatVector | None = None) -> None:
        self.parts = tuple(parts)
        self.flat, self.buffers = flat, [] if flat is None else flat.buffers

    @classmethod
    def of(cls, flat: FlatVector) -> Vector:
        """Return the parameters of a flat vector as a vector; shares memory."""
        return cls(flat.parameters, flat)

    @property
    def whole(self) -> FlatVector:
        """The flat vector that contains the tensors, for `v.x` and vectors of `m.scratch`."""
        assert self.flat is not None, "only the model and vectors of m.scratch() have buffers and can be mixed"
        return self.flat

    @property
    def layout(self) -> FlatLayout:
        """The shapes of the tensors in each part."""
        return self.whole.layout.where(is_buffer=False)

    @property
    def device(self) -> torch.device:
        """The device of the parts."""
        return self.parts[0].device if self.flat is None else self.flat.raw.device

    def begin_adding(self) -> None:
        """Declare that the round only adds to this vector from now on; `add_` and `sub_` do so themselves."""

    @contextlib.contextmanager
    def adding(self) -> Iterator[Vector]:
        """Give a context with a vector to which you add several terms; this vector has their sum after the context.

        Parts narrower than float32 collect the terms in float32 and are rounded once, at the end.
        """
        self.begin_adding()
        total = Vector([torch.zeros_like(x, dtype=torch.float32) if x.element_size() < 4 else x for x in self.parts])
        yield total
        for x, whole in zip(self.parts, total.parts, strict=True):
            if whole is not x:
                add_(x, whole, alpha=1.0)

    def set_(self, other: Vector) -> Vector:
        """self <- other, rounded to the dtypes of this vector."""
        for x, y in zip(self.parts, other.parts, strict=True):
            x.copy_(y)
        return self

    def sum_(self, a: Vector, b: Vector, alpha: float = 1.0) -> Vector:
        """self <- a + alpha b, in one kernel for each dtype. This vector must have float32 at least."""
        for x, y, z in zip(self.parts, a.parts, b.parts, strict=True):
            torch.add(y, z, alpha=alpha, out=x)
        return self

    def plus(self, other: Vector) -> Vector:
        """Return self + other as a new vector; both stay unchanged. This vector must have float32 at least."""
        return Vector([x.clone() for x in self.parts]).add_(other)

    def add_(self, other: Vector, alpha: float = 1.0) -> Vector:
        """self <- self + alpha other, computed in float32 at least and rounded once."""
        for x, y in zip(self.parts, other.parts, strict=True):
            add_(x, y, alpha=alpha)
        return self

    def sub_(self, other: Vector, alpha: float = 1.0) -> Vector:
        """self <- self - alpha other; as `add_`."""
        return self.add_(other, alpha=-alpha)

    def mul_(self, factor: float) -> Vector:
        """self <- factor self."""
        for x in self.parts:
            x.mul_(factor)
        return self

    def div_(self, factor: float) -> Vector:
        """self <- self / factor."""
        for x in self.parts:
            x.div_(factor)
        return self

    def lerp_(self, other: Vector, weight: float) -> Vector:
        """self <- self + weight (other - self). Both vectors must have the same dtypes."""
        for x, y in zip(self.parts, other.parts, strict=True):
            x.lerp_(y, weight)
        return self

    def interpolate_(self, other: Vector, own_weight: float) -> Vector:
        """self <- own_weight self + (1 - own_weight) other, computed in the dtype of `other`."""
        if not own_weight:
            return self.set_(other)
        for x, y in zip(self.parts, other.parts, strict=True):
            for chunk, theirs in in_chunks(x, y):  # a copy of all of x would take new memory
                chunk.copy_(torch.lerp(theirs, chunk.to(theirs.dtype), own_weight))
        return self

    def carry_(self, other: Vector, sent: Vector) -> Vector:
        """self <- other + (self - sent), computed in the dtype of `other`."""
        for x, y, s in zip(self.parts, other.parts, sent.parts, strict=True):
            for chunk, theirs, before in in_chunks(x, y, s):
                chunk.copy_(chunk.to(theirs.dtype, copy=True).sub_(before).add_(theirs))
        return self

    def norm(self) -> float:
        """Return the Euclidean norm over all parts; waits for the device.

        With stacked ranks it is the norm over all of them. Short rows of a part are summed in float32 at least, and
        their norms in float64.
        """
        return norm(self.parts)

    def distance_to(self, other: Vector) -> float:
        """Return the Euclidean norm of self - other, in chunks that stay in cache; waits for the device. See `norm`."""
        return distance(self.parts, other.parts)

    def zero_(self) -> Vector:
        """self <- 0."""
        for x in self.parts:
            x.zero_()
        return self


class SentVector(Vector):
    """A copy of the model that a round reads under training. The first write turns it into a correction.

    So a round needs no second copy of the model: when the algorithm writes its result, the old values are no longer
    needed, and the vector becomes the difference between new and old values.
    """

    def __init__(self, parts: Sequence[Tensor], flat: FlatVector | None = None) -> None:
        super().__init__(parts, flat)
        self.is_correction = False

    def set_(self, other: Vector) -> Vector:
        """correction <- other - self."""
        self._begin_writing()
        for x, y in zip(self.parts, other.parts, strict=True):
            torch.sub(y, x, out=x)
        return self

    def sum_(self, a: Vector, b: Vector, alpha: float = 1.0) -> Vector:
        """correction <- a + alpha b - self."""
        return self.set_(a).add_(b, alpha)

    def mul_(self, factor: float) -> Vector:
        """correction <- (factor - 1) self."""
        self._begin_writing()
        return super().mul_(factor - 1)

    def div_(self, factor: float) -> Vector:
        """correction <- self / factor - self."""
        return self.mul_(1 / factor)

    def lerp_(self, other: Vector, weight: float) -> Vector:
        """correction <- weight (other - self)."""
        return self.interpolate_(other, 1 - weight)

    def zero_(self) -> Vector:
        """correction <- -self."""
        return self.mul_(0.0)

    def add_(self, other: Vector, alpha: float = 1.0) -> Vector:
        """correction <- correction + alpha other."""
        self.begin_adding()
        return super().add_(other, alpha)

    def interpolate_(self, other: Vector, own_weight: float) -> Vector:
        """correction <- (1 - own_weight) (other - self)."""
        self.set_(other)
        return super().mul_(1 - own_weight)

    def begin_adding(self) -> None:
        """Turn the vector into a correction of zero, to which the round adds."""
        if not self.is_correction:
            self._begin_writing()
            super().zero_()

    def _begin_writing(self) -> None:
        assert not self.is_correction, "an algorithm writes x once in a round, or adds to it"
        self.is_correction = True


def tensors_of(x: Vector, like: Vector) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield each tensor of the model in a vector: its `name` and `shape`, and a view of its elements, [numel].

    Args:
        x: the model or a vector of `m.scratch`, whose layout has the tensors.
        like: a vector with the same parameters, such as `Vector(message.fields)` of a message with a whole model.

    Example:
        >>> from gossip_modules.extend import FlatVector
        >>> from gossip_modules.flat.layout import FlatLayout, TensorSpec
        >>> layout = FlatLayout.of([(torch.float32, [TensorSpec((2, 2), name="weight")])])
        >>> x = Vector.of(FlatVector.zeros(layout, torch.device("cpu")))
        >>> {spec.name: part.view(spec.shape).tolist() for spec, part in tensors_of(x, x)}
        {'weight': [[0.0, 0.0], [0.0, 0.0]]}
    """
    for segment, part in zip(x.layout.segments, like.parts, strict=True):
        for first, spec in segment.places():
            yield spec, part[first : first + spec.numel]


def widened(layout: FlatLayout, *, has_buffers: bool) -> FlatLayout:
    """Return a layout with the same parameters, in float32 at least.

    Args:
        layout: the layout of a model.
        has_buffers: whether the new layout has the buffers of the model too.
    """
    if has_buffers:
        return layout.with_dtypes(wide)
    halves = layout.where(is_buffer=False).segments
    return FlatLayout.of((wide(half.dtype), half.specs or half.numel) for half in halves)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype, or float32 for narrower dtypes."""
    return dtype if dtype.itemsize >= 4 else torch.float32

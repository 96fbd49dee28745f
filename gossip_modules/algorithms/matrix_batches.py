"""The matrices of a model in few batches, so that a product over all of them takes few operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isqrt, prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..flat.layout import FlatLayout, Segment, TensorSpec
from ..rounds import wide


class Batch(NamedTuple):
    """Neighbouring matrices with equal shapes: elements of a vector from `first` on as [num_matrices, rows, columns].

    Attributes:
        part: the index of the part of the vector that holds the matrices.
        first: the element of the part at which the first matrix begins.
        num_matrices, rows, columns: the shape of the batch.
        rank: the number of columns of the factors.
    """

    part: int
    first: int
    num_matrices: int
    rows: int
    columns: int
    rank: int

    def of(self, parts: Sequence[Tensor]) -> Tensor:
        """The matrices, [num_matrices, rows, columns]; shares memory with the part."""
        numel = self.num_matrices * self.rows * self.columns
        return parts[self.part][self.first : self.first + numel].view(self.num_matrices, self.rows, self.columns)

    def factor_shape(self, side: int) -> tuple[int, int, int]:
        """Return the shape of a factor: side 0 is the left factor, P = X Q; side 1 is the right factor, Q = X^T P."""
        return self.num_matrices, self.columns if side else self.rows, self.rank


class Exact(NamedTuple):
    """Neighbouring vectors that are sent uncompressed: elements [first, last) of a part."""

    part: int
    first: int
    last: int

    def of(self, parts: Sequence[Tensor]) -> Tensor:
        """The elements; shares memory with the part."""
        return parts[self.part][self.first : self.last]


class MatrixBatches:
    """The parameters of a model as batches of matrices, and the vectors that are sent exactly.

    Args:
        layout: the shapes of the parameters.
        rank: the number of columns of the factors, at most; a matrix with a shorter side has fewer.
        compress_vectors: whether neighbouring vectors form one nearly square matrix; otherwise they are sent exactly.

    Attributes:
        batches: the matrices; neighbours with equal shapes form one batch.
        exact: the vectors that are sent exactly.
        dtypes: the dtype of the factors of each batch, float32 at least.
        exact_sizes: the dtype and the number of elements of each of `exact`.
        num_bytes, num_exact_bytes: the bytes of the matrices, and of the vectors that are sent exactly.
    """

    def __init__(self, layout: FlatLayout, *, rank: int, compress_vectors: bool) -> None:
        self.batches: list[Batch] = []
        self.exact: list[Exact] = []
        for part, segment in enumerate(layout.segments):
            for found in _runs(part, segment, rank=rank, compress_vectors=compress_vectors):
                if isinstance(found, Batch):
                    self.batches.append(found)
                else:
                    self.exact.append(found)
        dtypes = [segment.dtype for segment in layout.segments]
        self.dtypes = [wide(dtypes[batch.part]) for batch in self.batches]
        self.exact_sizes = [(dtypes[run.part], run.last - run.first) for run in self.exact]
        self.num_bytes = sum(b.num_matrices * b.rows * b.columns * dtypes[b.part].itemsize for b in self.batches)
        self.num_exact_bytes = sum(numel * dtype.itemsize for dtype, numel in self.exact_sizes)

    def sizes(self, side: int, *, has_exact: bool) -> list[tuple[torch.dtype, int]]:
        """Return the dtype and the number of elements of each field of a message.

        Args:
            side: the side of the factors that the message makes.
            has_exact: whether the message begins with the vectors that are sent exactly.
        """
        pairs = zip(self.dtypes, self.batches, strict=True)
        return [*(self.exact_sizes if has_exact else []), *((d, prod(b.factor_shape(side))) for d, b in pairs)]


def _runs(part: int, segment: Segment, *, rank: int, compress_vectors: bool) -> Iterator[Batch | Exact]:
    """Yield neighbouring matrices with equal shapes as a batch, and neighbouring vectors as a matrix or exactly."""

    def batch(num_matrices: int, rows: int, columns: int) -> Batch:
        return Batch(part, first, num_matrices, rows, columns, min(rank, rows, columns))

    def kind(spec: TensorSpec) -> object:
        if spec.is_matrix:
            return spec.shape[0], prod(spec.shape[1:])
        return "vectors" if compress_vectors and spec.numel > 1 else "exact"

    first = 0
    for shape, group in groupby((spec for _, spec in segment.places() if spec.numel), key=kind):
        members = list(group)
        numel = sum(spec.numel for spec in members)
        if isinstance(shape, tuple):
            yield batch(len(members), *shape)
        elif shape == "exact":
            yield Exact(part, first, first + numel)
        else:
            rows = isqrt(numel)
            yield batch(1, rows, numel // rows)
            if rest := numel % rows:
                first += numel - rest
                numel = rest
                yield batch(1, 1, rest)
        first += numel


def side_by_side(factors: Tensor) -> Tensor:
    """Reshape [links, num_matrices, d, rank] to [num_matrices, d, links * rank], for one product over all links."""
    return factors.permute(1, 2, 0, 3).flatten(2)


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute matrix products in the dtype of their arguments: without autocast and without TF32.

    TF32 is a setting of the whole process, so products of training at the same time are also computed without it.
    """
    matmul = torch.backends.cuda.matmul
    # Since torch 2.9 the setting has a new name. A process that has used the new name must not use the old one.
    name, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, name)
    is_changed = device.type == "cuda" and before != exact
    with torch.autocast(device.type, enabled=False):
        if is_changed:
            setattr(matmul, name, exact)
        try:
            yield
        finally:
            if is_changed:
                setattr(matmul, name, before)

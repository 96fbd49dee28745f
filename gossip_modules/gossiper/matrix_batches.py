"""The matrices of a run of tensors in few batches, so that products over all of them are few operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isqrt, prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..flat.layout import TensorSpec


class Batch(NamedTuple):
    """Neighbouring matrices of one shape: a run from element `first` on as [num_matrices, rows, columns].

    Attributes:
        run: the index of the run of tensors that holds the matrices.
        first: the element of the run at which the first matrix begins.
        num_matrices, rows, columns: the shape of the batch.
        rank: the number of columns of the factors.
    """

    run: int
    first: int
    num_matrices: int
    rows: int
    columns: int
    rank: int

    def of(self, runs: Sequence[Tensor]) -> Tensor:
        """The matrices, [num_matrices, rows, columns]; shares memory with the run."""
        numel = self.num_matrices * self.rows * self.columns
        return runs[self.run][self.first : self.first + numel].view(self.num_matrices, self.rows, self.columns)

    def factor_shape(self, side: int) -> tuple[int, int, int]:
        """The shape of a factor: on side 0 the left one, P = X Q, on side 1 the right one, Q = X^T P."""
        return self.num_matrices, self.columns if side else self.rows, self.rank


def batches_of(run: int, specs: Sequence[TensorSpec], *, rank: int) -> Iterator[Batch]:
    """Neighbouring matrices of one shape as one batch; neighbouring vectors as one nearly square matrix.

    Args:
        run: the index of the run of tensors.
        specs: the tensors of the run.
        rank: the number of columns of the factors, at most; a matrix with a shorter side has fewer.
    """

    def batch(num_matrices: int, rows: int, columns: int) -> Batch:
        return Batch(run, first, num_matrices, rows, columns, min(rank, rows, columns))

    first = 0
    for shape, group in groupby(specs, key=lambda p: (p.shape[0], prod(p.shape[1:])) if p.is_matrix else None):
        members = list(group)
        numel = sum(spec.numel for spec in members)
        if shape is not None:
            yield batch(len(members), *shape)
        else:
            rows = isqrt(numel)
            yield batch(1, rows, numel // rows)
            if rest := numel % rows:
                first += numel - rest
                numel = rest
                yield batch(1, 1, rest)
        first += numel


def side_by_side(factors: Tensor) -> Tensor:
    """[links, num_matrices, d, rank] as [num_matrices, d, links * rank], so that one product serves all links."""
    return factors.permute(1, 2, 0, 3).flatten(2)


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute matrix products in the dtype of their arguments: without autocast and without TF32.

    TF32 is a setting of the whole process, so products that training computes meanwhile are more precise than asked.
    """
    matmul = torch.backends.cuda.matmul
    # Since torch 2.9 the setting has a new name, and a process that has used the new name may not use the old one.
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

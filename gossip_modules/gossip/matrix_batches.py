"""The matrices of a section in few batches, so that products over all of them are few operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isqrt, prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..flat.layout import Part


class Batch(NamedTuple):
    """Matrices of one shape side by side: a section from element `first` on as [num_matrices, rows, columns]."""

    section: int
    first: int
    num_matrices: int
    rows: int
    columns: int
    rank: int

    def of(self, sections: Sequence[Tensor]) -> Tensor:
        """The matrices; shares memory."""
        numel = self.num_matrices * self.rows * self.columns
        return sections[self.section][self.first : self.first + numel].view(self.num_matrices, self.rows, self.columns)

    def factor_shape(self, side: int) -> tuple[int, int, int]:
        """Of the factor that a product gives: side 0 the left one, M A, side 1 the right one, M^T A."""
        return self.num_matrices, self.columns if side else self.rows, self.rank


def batches_of(section: int, parts: Sequence[Part], *, rank: int) -> Iterator[Batch]:
    """Neighbouring matrices of one shape as one batch; neighbouring vectors as one nearly square matrix.

    Args:
        section: its number.
        parts: its tensors.
        rank: of the factors, capped by the shape.
    """

    def batch(num_matrices: int, rows: int, columns: int) -> Batch:
        return Batch(section, first, num_matrices, rows, columns, min(rank, rows, columns))

    first = 0
    for shape, group in groupby(parts, key=lambda p: (p.shape[0], prod(p.shape[1:])) if p.is_matrix else None):
        run = list(group)
        numel = sum(part.numel for part in run)
        if shape is not None:
            yield batch(len(run), *shape)
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
    """Matrix products in the dtype of their arguments: no autocast, no TF32.

    TF32 is a setting of the process: products that training starts meanwhile are more precise than asked for.
    """
    matmul = torch.backends.cuda.matmul
    # torch 2.9 has a new name for it, and forbids the old one to those who have used the new.
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

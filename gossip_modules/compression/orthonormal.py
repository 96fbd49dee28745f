"""Orthonormal bases of the columns of many small matrices at once."""

from __future__ import annotations

import torch
from torch import Tensor

DEPENDENT = 1e-5  # of a column's norm: what rounding of float32 columns leaves of one that the others span


def orthonormalize(columns: Tensor, fallback: Tensor) -> Tensor:
    """Bases A with A^T A = I that span the columns; what they leave open is filled from `fallback`.

    Gram-Schmidt, each column projected twice. A column that is zero, not finite, or spanned by those before it up to
    `DEPENDENT` is replaced by the fallback's, so that the result is orthonormal whatever comes in, and rounding noise
    never chooses a direction.

    Args:
        columns: float64 [..., d, r], r <= d.
        fallback: float64, like `columns`; linearly independent, in general position.

    Returns:
        float64 [..., d, r].
    """
    basis = torch.zeros_like(columns)
    for k in range(columns.shape[-1]):
        before = basis[..., :k]
        column = _scaled(columns[..., k : k + 1])
        size = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
        column = _without(before, column)
        rest = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
        column = torch.where(rest > DEPENDENT * size, column, _without(before, fallback[..., k : k + 1]))
        basis[..., k : k + 1] = column / torch.linalg.vector_norm(column, dim=-2, keepdim=True)
    return basis


def _scaled(column: Tensor) -> Tensor:
    """The column over its largest entry, so that squares neither underflow nor overflow; NaN where that is zero."""
    return column / column.abs().amax(dim=-2, keepdim=True)


def _without(basis: Tensor, column: Tensor) -> Tensor:
    """The column without its part in the span of an orthonormal basis."""
    for _ in range(2):
        column = column - basis @ (basis.mT @ column)
    return column

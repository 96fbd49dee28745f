"""Orthonormal bases of the columns of many small matrices at once."""

from __future__ import annotations

import torch
from torch import Tensor

DEPENDENT = 1e-5  # share of a column's norm that rounding of float32 can leave if the other columns span it


def orthonormalize(columns: Tensor, fallback: Tensor) -> Tensor:
    """Orthonormal bases A, A^T A = I, that span the columns; missing directions are taken from `fallback`.

    Gram-Schmidt with each column projected twice. A column that is zero, not finite, or up to `DEPENDENT` in the span
    of the columns before it is replaced by the column of `fallback`. So the result is orthonormal for every input, and
    rounding noise never chooses a direction.

    Args:
        columns: the matrices, float64 [..., d, r] with r <= d.
        fallback: the replacements, float64 like `columns`; linearly independent, in general position.

    Returns:
        The bases, float64 [..., d, r].
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
    """The column divided by its largest entry, so that squares do not underflow or overflow; NaN for a zero column."""
    return column / column.abs().amax(dim=-2, keepdim=True)


def _without(basis: Tensor, column: Tensor) -> Tensor:
    """The column minus its projection on the span of an orthonormal basis."""
    for _ in range(2):
        column = column - basis @ (basis.mT @ column)
    return column

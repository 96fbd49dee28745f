"""Bases of many small matrices: orthonormal whatever comes in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gossip_modules.compression.orthonormal import DEPENDENT, orthonormalize


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fallback_like(columns: Tensor) -> Tensor:
    return draw(*columns.shape, seed=99)


def assert_orthonormal(basis: Tensor) -> None:
    """A^T A = I to float64 rounding."""
    eye = torch.eye(basis.shape[-1], dtype=torch.float64).expand(*basis.shape[:-2], -1, -1)
    torch.testing.assert_close(basis.mT @ basis, eye, rtol=0, atol=1e-13)


SHAPES = [(5, 1), (5, 3), (4, 4), (1, 1), (3, 20, 8), (2, 3, 7, 2), (0, 3, 2), (64, 32)]


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_span_of_independent_columns_at_any_scale(shape: tuple[int, ...], scale: float) -> None:
    columns = draw(*shape)
    basis = orthonormalize(columns * scale, fallback_like(columns))
    assert_orthonormal(basis)
    torch.testing.assert_close(basis @ (basis.mT @ columns), columns, rtol=0, atol=1e-11)


def test_first_column_keeps_its_direction() -> None:
    columns = draw(6, 3)
    basis = orthonormalize(columns, fallback_like(columns))
    torch.testing.assert_close(basis[:, 0], columns[:, 0] / columns[:, 0].norm(), rtol=0, atol=1e-15)


def test_columns_of_very_different_sizes() -> None:
    """One column must not hide another by being large."""
    columns = draw(8, 3) * torch.tensor([1e12, 1e-12, 1.0], dtype=torch.float64)
    basis = orthonormalize(columns, fallback_like(columns))
    assert_orthonormal(basis)
    for k in range(3):
        unit = columns[:, k] / columns[:, k].norm()
        torch.testing.assert_close(basis @ (basis.mT @ unit), unit, rtol=0, atol=1e-12)


BAD: dict[str, Tensor] = {
    "zero": torch.zeros(6, 3, dtype=torch.float64),
    "one zero": draw(6, 3) * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64),
    "equal": draw(6, 1).expand(6, 3).clone(),
    "opposite": torch.cat([draw(6, 1), -draw(6, 1), draw(6, 1, seed=1)], dim=1),
    "NaN": torch.full((6, 3), float("nan"), dtype=torch.float64),
    "one NaN": draw(6, 3).index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(float("nan")).double()),
    "infinite": torch.full((6, 3), float("inf"), dtype=torch.float64),
    "one infinite": draw(6, 3).index_put((torch.tensor(2), torch.tensor(0)), torch.tensor(float("-inf")).double()),
    "square and singular": torch.ones(3, 3, dtype=torch.float64),
}


@pytest.mark.parametrize("name", BAD)
def test_dependent_and_infinite_columns_are_replaced(name: str) -> None:
    columns = BAD[name]
    basis = orthonormalize(columns, fallback_like(columns))
    assert_orthonormal(basis)
    for column in columns.unbind(1):  # what was there is spanned all the same
        if bool(column.isfinite().all()):
            torch.testing.assert_close(basis @ (basis.mT @ column), column, rtol=0, atol=1e-12)


def test_zero_columns_give_the_basis_of_the_fallback() -> None:
    fallback = draw(6, 2)
    basis = orthonormalize(torch.zeros_like(fallback), fallback)
    torch.testing.assert_close(basis, orthonormalize(fallback, draw(6, 2, seed=1)), rtol=0, atol=1e-14)


@pytest.mark.parametrize("noise", [0.0, 1e-9, 0.1 * DEPENDENT])
def test_rounding_noise_never_chooses_a_direction(noise: float) -> None:
    """A column that is dependent up to float32 rounding is replaced by the same direction whatever its noise is."""
    first, fallback = draw(6, 1), draw(6, 2, seed=1)
    clean = torch.cat([first, 3 * first], dim=1)
    noisy = torch.cat([first, 3 * first + noise * draw(6, 1, seed=2)], dim=1)
    expected = orthonormalize(clean, fallback)
    assert_orthonormal(expected)
    torch.testing.assert_close(orthonormalize(noisy, fallback), expected, rtol=0, atol=1e-14)


def test_nearly_dependent_columns_above_the_threshold_are_kept() -> None:
    first, other = draw(6, 1), draw(6, 1, seed=1)
    columns = torch.cat([first, first + 100 * DEPENDENT * other], dim=1)
    basis = orthonormalize(columns, fallback_like(columns))
    assert_orthonormal(basis)
    torch.testing.assert_close(basis @ (basis.mT @ other), other, rtol=0, atol=1e-9)


def test_matrices_of_a_batch_do_not_meet() -> None:
    """One bad matrix leaves the others as they are alone; arguments are not changed."""
    columns, fallback = draw(4, 6, 2), draw(4, 6, 2, seed=1)
    columns[1] = float("nan")
    columns[2] = 0
    before = columns.clone(), fallback.clone()
    basis = orthonormalize(columns, fallback)
    assert_orthonormal(basis)
    for k in range(4):
        torch.testing.assert_close(basis[k], orthonormalize(columns[k], fallback[k]), rtol=0, atol=1e-14)
    assert torch.equal(columns.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(fallback, before[1])

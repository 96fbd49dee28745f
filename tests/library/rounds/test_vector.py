"""Vectors: each way to write a copy that a round reads under training gives the result of the plain vector."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable

import pytest
import torch

from gossip_modules.rounds import vector
from gossip_modules.rounds.vector import SentVector, Vector

WAYS: dict[str, Callable[[Vector, Vector], object]] = {
    "set_": lambda x, y: x.set_(y),
    "sum_": lambda x, y: x.sum_(y, y, alpha=0.5),
    "add_": lambda x, y: x.add_(y, alpha=0.25).add_(y),
    "sub_": lambda x, y: x.sub_(y, alpha=0.25),
    "mul_": lambda x, y: x.mul_(0.75).add_(y, alpha=0.25),
    "div_": lambda x, y: x.div_(4.0),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "interpolate_": lambda x, y: x.interpolate_(y, 0.75),
    "zero_": lambda x, y: x.zero_(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_sent_copy_becomes_the_difference_between_new_and_old_values(way: str) -> None:
    old = torch.arange(1.0, 6.0, dtype=torch.float64)
    other = Vector([torch.linspace(-2.0, 2.0, 5, dtype=torch.float64)])
    plain, sent = Vector([old.clone()]), SentVector([old.clone()])
    for x in (plain, sent):
        WAYS[way](x, other)
    torch.testing.assert_close(old + sent.parts[0], plain.parts[0], rtol=1e-14, atol=1e-14)


def test_a_sent_copy_is_written_once() -> None:
    sent, other = SentVector([torch.ones(3)]), Vector([torch.ones(3)])
    sent.mul_(0.5)
    with pytest.raises(AssertionError, match="an algorithm writes x once in a round, or adds to it"):
        sent.lerp_(other, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e25])
@pytest.mark.parametrize("shape", [(0,), (3,), (4096,), (3, 10_001)])
def test_a_norm_is_the_one_of_float64(shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> None:
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    found = Vector([x, 2 * x]).norm()
    exact = 5**0.5 * float(x.double().norm())
    assert found == pytest.approx(exact, rel=1e-14 if dtype is torch.float64 else 1e-7, abs=0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_norm_of_numbers_that_are_not_finite_is_none(wrong: float) -> None:
    x = torch.ones(5000)
    assert Vector([0 * x]).norm() == 0
    x[4] = wrong
    assert not math.isfinite(Vector([x, torch.ones(2)]).norm())


def test_the_example_runs() -> None:
    assert doctest.testmod(vector).failed == 0

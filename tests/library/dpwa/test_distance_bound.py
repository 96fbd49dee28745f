"""Which models may be merged: finite ones that are not far away, whatever their dtype."""

from __future__ import annotations

import math

import pytest
import torch

from gossip_modules.dpwa.config import DEFAULT_MAX_DISTANCE
from gossip_modules.dpwa.fetcher import check_distance
from gossip_modules.dpwa.protocol import RefusedModelError
from gossip_modules.flat.vector import SCRATCH_NUMEL, FlatVector

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
NUMEL = SCRATCH_NUMEL + 1000  # two chunks


def vector_of(value: float, dtype: torch.dtype = torch.float32) -> FlatVector:
    return FlatVector.over(torch.full((NUMEL,), value).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_is_exact(dtype: torch.dtype) -> None:
    own, other = vector_of(16.0, dtype), vector_of(80.0, dtype)  # 4 times 16 apart
    check_distance(other, own, 4.01)
    before = other.raw.clone(), own.raw.clone()
    with pytest.raises(RefusedModelError, match=r"distance of 64 from ours, expected 3.99 \* 16 at most"):
        check_distance(other, own, 3.99)
    assert torch.equal(other.raw, before[0])
    assert torch.equal(own.raw, before[1])


@pytest.mark.parametrize("place", [0, SCRATCH_NUMEL, NUMEL - 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [*DTYPES[:4], torch.float8_e5m2], ids=str)  # float8_e4m3fn has no infinity
def test_models_that_are_not_finite_are_told_from_finite_ones(dtype: torch.dtype, bad: float, place: int) -> None:
    good, sick = vector_of(1.0, dtype), vector_of(1.0, dtype)
    sick.segments[0][place] = bad
    for own in (good, sick, None):
        with pytest.raises(RefusedModelError, match="got a model with infinite or NaN values"):
            check_distance(sick, own, math.inf)
    assert not check_distance(good, sick, 1.0)
    assert check_distance(good, good, 1.0)


def test_nan_of_a_float8_without_infinities_is_refused() -> None:
    sick = vector_of(math.nan, torch.float8_e4m3fn)
    with pytest.raises(RefusedModelError, match="got a model with infinite or NaN values"):
        check_distance(sick, vector_of(1.0, torch.float8_e4m3fn), 1.0)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_numbers_whose_squares_overflow_have_a_distance(dtype: torch.dtype) -> None:
    largest = 1e38 if dtype is torch.float32 else 1e300
    own = vector_of(1.0, dtype)
    other = FlatVector.over(torch.full((NUMEL,), largest, dtype=dtype))
    with pytest.raises(RefusedModelError, match=r"root mean square distance of (1e|inf)"):
        check_distance(other, own, DEFAULT_MAX_DISTANCE)
    check_distance(other, own, math.inf)
    check_distance(other, other, 0.1)  # equal ones are near, however large


def test_a_beginner_may_be_far_away() -> None:
    check_distance(vector_of(100.0), None, 0.1)
    with pytest.raises(RefusedModelError, match="max_distance= is needed"):
        check_distance(vector_of(1e7), None, 0.1)

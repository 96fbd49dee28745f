"""Which models may be merged: finite ones that are not far away, whatever their dtype."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from gossip_modules.dpwa.wire.distance_bound import DEFAULT_MAX_DISTANCE, DistanceBound
from gossip_modules.dpwa.wire.message import RefusedModelError
from gossip_modules.flat.vector import SCRATCH_NUMEL, FlatVector

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
NUMEL = SCRATCH_NUMEL + 1000  # two chunks


def vector_of(value: float, dtype: torch.dtype = torch.float32) -> FlatVector:
    return FlatVector.over(torch.full((NUMEL,), value).to(dtype))


def bound(max_distance: float, own: FlatVector | None) -> DistanceBound:
    return DistanceBound(max_distance, lambda: contextlib.nullcontext(own))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_is_exact(dtype: torch.dtype) -> None:
    own, other = vector_of(16.0, dtype), vector_of(80.0, dtype)  # 4 times 16 apart
    bound(4.01, own).check(other)
    before = other.raw.clone(), own.raw.clone()
    with pytest.raises(RefusedModelError, match=r"distance of 64 from ours, expected 3.99 \* 16 at most"):
        bound(3.99, own).check(other)
    assert torch.equal(other.raw, before[0])
    assert torch.equal(own.raw, before[1])


@pytest.mark.parametrize("place", [0, SCRATCH_NUMEL, NUMEL - 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [*DTYPES[:4], torch.float8_e5m2], ids=str)  # float8_e4m3fn has no infinity
def test_what_is_not_finite_is_told_from_what_is(dtype: torch.dtype, bad: float, place: int) -> None:
    good, sick = vector_of(1.0, dtype), vector_of(1.0, dtype)
    sick.segments[0][place] = bad
    for own in (good, sick, None):
        with pytest.raises(RefusedModelError, match="got a model with infinite or NaN values"):
            bound(math.inf, own).check(sick)
    checked = bound(1.0, sick)
    checked.check(good)
    assert not checked.is_own_finite
    checked = bound(1.0, good)
    checked.check(good)
    assert checked.is_own_finite


def test_nan_of_a_float8_without_infinities_is_refused() -> None:
    sick = vector_of(math.nan, torch.float8_e4m3fn)
    with pytest.raises(RefusedModelError, match="got a model with infinite or NaN values"):
        bound(1.0, vector_of(1.0, torch.float8_e4m3fn)).check(sick)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_numbers_whose_squares_overflow_have_a_distance(dtype: torch.dtype) -> None:
    largest = 1e38 if dtype is torch.float32 else 1e300
    own = vector_of(1.0, dtype)
    other = FlatVector.over(torch.full((NUMEL,), largest, dtype=dtype))
    with pytest.raises(RefusedModelError, match=r"root mean square distance of (1e|inf)"):
        bound(DEFAULT_MAX_DISTANCE, own).check(other)
    bound(math.inf, own).check(other)
    bound(0.1, other).check(other)  # equal ones are near, however large


def test_a_beginner_may_be_far_away() -> None:
    bound(0.1, None).check(vector_of(100.0))
    with pytest.raises(RefusedModelError, match="max_distance= is needed"):
        bound(0.1, None).check(vector_of(1e7))


def test_ones_own_model_is_looked_at_alone() -> None:
    for own, is_finite in ((vector_of(1.0), True), (vector_of(math.nan), False), (None, True)):
        checked = bound(1.0, own)
        checked.check_own()
        assert checked.is_own_finite == is_finite

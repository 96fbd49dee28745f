"""How far a worker goes towards a peer: the formulas, and what they say of numbers that make no sense."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip_modules.dpwa.interpolation import (
    ClockInterpolation,
    ConstantInterpolation,
    DivergenceThreshold,
    Interpolation,
    LossInterpolation,
    Standing,
)

RULES = [
    ConstantInterpolation(0.3),
    ClockInterpolation(),
    LossInterpolation(),
    *(DivergenceThreshold(rule, 0.2) for rule in (ConstantInterpolation(1.0), LossInterpolation())),
]


@pytest.mark.parametrize(
    ("rule", "own", "peer", "expected"),
    [
        (ConstantInterpolation(), Standing(), Standing(), 0.5),
        (ConstantInterpolation(0.25), Standing(1.0, 2.0), Standing(3.0, 4.0), 0.25),
        (ClockInterpolation(), Standing(30.0), Standing(10.0), 10 / 40),
        (ClockInterpolation(), Standing(0.0), Standing(7.0), 1.0),  # a worker that starts late takes the peer's model
        (ClockInterpolation(), Standing(7.0), Standing(0.0), 0.0),
        (LossInterpolation(), Standing(0, 3.0), Standing(0, 1.0), 3 / 4),  # the worse one takes more
        (LossInterpolation(), Standing(0, 1.0), Standing(0, 3.0), 1 / 4),
        (DivergenceThreshold(ConstantInterpolation(0.5), 0.2), Standing(0, 0.05), Standing(), 0.5 * 0.05 / 0.2),
        (DivergenceThreshold(ConstantInterpolation(0.5), 0.2), Standing(0, 0.2), Standing(), 0.5),
        (DivergenceThreshold(ClockInterpolation(), 0.2), Standing(1.0, 0.1), Standing(3.0), 0.75 * 0.1 / 0.2),
    ],
    ids=str,
)
def test_formulas(rule: Interpolation, own: Standing, peer: Standing, expected: float) -> None:
    assert rule.factor(own, peer) == pytest.approx(expected, abs=0)


@pytest.mark.parametrize(
    ("rule", "own", "peer", "expected"),
    [
        (ClockInterpolation(), Standing(0.0), Standing(0.0), 0.5),
        (LossInterpolation(), Standing(0, 0.0), Standing(0, 0.0), 0.5),
        (LossInterpolation(), Standing(0, -1.0), Standing(0, -2.0), 0.5),  # a negative loss counts as zero
        (LossInterpolation(), Standing(0, -1.0), Standing(0, 2.0), 0.0),
        (LossInterpolation(), Standing(0, 2.0), Standing(0, -1.0), 1.0),
        (LossInterpolation(), Standing(0, math.nan), Standing(0, 1.0), 1.0),  # nothing of ours is worth keeping
        (LossInterpolation(), Standing(0, math.inf), Standing(0, 1.0), 1.0),
        (LossInterpolation(), Standing(0, 1.7e308), Standing(0, 1.7e308), 0.5),  # whose sum is infinite
        (DivergenceThreshold(ConstantInterpolation(), 0.2), Standing(0, -1.0), Standing(), 0.0),
        (DivergenceThreshold(ConstantInterpolation(), 0.2), Standing(0, math.nan), Standing(), 0.5),
    ],
    ids=str,
)
def test_guards(rule: Interpolation, own: Standing, peer: Standing, expected: float) -> None:
    assert rule.factor(own, peer) == expected


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data())
def test_every_factor_is_between_zero_and_one(data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from(RULES))
    clocks = st.floats(0.0, allow_nan=False, allow_infinity=False)
    own = Standing(data.draw(clocks), data.draw(st.floats()))
    peer = Standing(data.draw(clocks), data.draw(st.floats(allow_nan=False, allow_infinity=False)))
    assert 0.0 <= rule.factor(own, peer) <= 1.0


def test_interpolations_that_need_a_loss() -> None:
    assert [rule.needs_loss for rule in RULES] == [False, False, True, True, True]
    assert [rule.needs_peer_loss for rule in RULES] == [False, False, True, False, True]


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_constant_is_a_factor(value: float) -> None:
    with pytest.raises(ValueError, match=r"got value=.*expected a factor in \[0, 1\]"):
        ConstantInterpolation(value)


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan, math.inf])
def test_threshold_is_positive(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"got threshold=.*expected a positive number"):
        DivergenceThreshold(ConstantInterpolation(), threshold)

"""The oracle of workers that miss outer steps has the golden values of its law."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.late_drifts import WEIGHTS, outer_steps

LATE = {2: [4], 4: [4]}
"""Worker 4 misses the outer steps 2 and 4; its drift in outer step 3 has ten inner steps."""


@pytest.mark.parametrize(
    ("late", "keeps", "anchor", "model"),
    [
        ({}, True, 0.7702157507, 0.7702157507),
        (LATE, False, 0.0778158787, 0.0778158787),
        (LATE, True, 0.1789581115, 1.8775301647),
    ],
    ids=["nobody", "dropped", "kept"],
)
def test_golden_values(late: dict[int, list[int]], keeps: bool, anchor: float, model: float) -> None:
    last = outer_steps(late, keeps=keeps)[-1]
    np.testing.assert_allclose([last.anchor, last.models[4]], [anchor, model], rtol=0, atol=5e-11)


def test_golden_value_of_weights_by_tokens() -> None:
    last = outer_steps({}, weighted_by="tokens", tokens=(1, 2, 3, 4, 5))[-1]
    assert abs(last.anchor - 2.2972042506) < 5e-11


@pytest.mark.parametrize("name", sorted(WEIGHTS, key=str))
def test_a_longer_drift_has_the_weight_of_its_steps(name: str | None) -> None:
    """With c = 1 and b = 0 outer step 3 is a weighted mean of bases less drifts, of which one is twice as long."""
    own_weight = 1.0 if name is None else 2.0  # twice the tokens in twice the steps: 2^2 / 2, 2 and 2

    def step_3(late: list[int]) -> float:
        _, before, after, _ = outer_steps(LATE | {3: late}, weighted_by=name, lr=1.0, momentum=0.0)
        return after.anchor - before.anchor

    expected = (4 * step_3([4]) + own_weight * step_3([0, 1, 2, 3])) / (4 + own_weight)
    assert step_3([]) == pytest.approx(expected, abs=1e-14)

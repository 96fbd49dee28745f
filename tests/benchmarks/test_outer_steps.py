"""The figures of outer steps are ratios within a cycle, and every method that is compared wraps a model."""

from __future__ import annotations

import pytest
from torch import nn

from benchmarks.outer_steps import ALONE, methods, summary


def test_ratios_are_taken_cycle_by_cycle() -> None:
    alone = [1.0, 2.0, 4.0, 8.0, 16.0]  # a machine that gets slower
    rows = summary({ALONE: alone, "late": [1.1 * x for x in alone]}, every=4)
    assert [row["method"] for row in rows] == [ALONE, "late"]
    assert rows[0]["ratio"] == rows[0]["ratio_low"] == rows[0]["ratio_high"] == 1
    assert rows[1]["ratio"] == pytest.approx(1.1)
    assert rows[1]["step_seconds"] == pytest.approx(1.1)
    assert rows[1]["cycles"] == 5


def test_who_trains_alone_is_not_wrapped() -> None:
    model = nn.Linear(1, 1)
    assert methods(4)[ALONE](model) is model

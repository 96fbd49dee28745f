"""The row of a method has the first logged step below each error, of the run with the best step size."""

from __future__ import annotations

import pandas as pd

from benchmarks.consensus import rows_of


def test_the_first_step_below_each_error_counts() -> None:
    points = [
        {"method": method, "step_size": size, "step": step, "error": rate**step, "megabits": 2.0 * step}
        for method, size, rate in (("plain", 0.5, 0.125), ("plain", 0.1, 0.9), ("slow", 1.0, 0.5))
        for step in range(11)
    ]
    # 0.125^2 > 1e-2 > 0.125^3 and 0.125^4 > 1e-4 > 0.125^5; 0.5^6 > 1e-2 > 0.5^7, and 0.5^10 > 1e-4.
    assert rows_of(pd.DataFrame(points)) == [
        {"method": "plain", "step_size": 0.5, "steps_to_0.01": 3, "megabits_to_0.01": 6.0}
        | {"steps_to_0.0001": 5, "megabits_to_0.0001": 10.0},
        {"method": "slow", "step_size": 1.0, "steps_to_0.01": 7, "megabits_to_0.01": 14.0}
        | {"steps_to_0.0001": None, "megabits_to_0.0001": None},
    ]

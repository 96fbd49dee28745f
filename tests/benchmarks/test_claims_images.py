"""The gaps of images are those of trainings with the same seed, at the tuned rate, in every study."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.claims import images
from benchmarks.claims.images import IMAGE_STUDIES, every_study, gaps, of_sgp, trained, with_spread


def study_rows(errors: dict[tuple[str, int, int], float]) -> pd.DataFrame:
    """Rows of a study by method, workers and seed, and a point before the end."""
    return pd.DataFrame(
        {
            "method": method,
            "workers": workers,
            "seed": seed,
            "steps": 20,
            "step": step,
            "is_tuning": False,
            "test": error,
        }
        for (method, workers, seed), error in errors.items()
        for step in (10, 20)
    )


def test_a_gap_has_its_spread_over_common_seeds() -> None:
    rows = study_rows({("all-reduce", 8, 1): 40, ("all-reduce", 8, 2): 42, ("SGP", 8, 1): 41, ("SGP", 8, 3): 99})
    found = gaps(trained(IMAGE_STUDIES[0], rows)).set_index("method").loc["SGP"]
    assert (found["seeds"], found["gap"], found["accuracy"]) == (1, 1.0, 59.0)
    assert with_spread(found) == "+1.0"
    rows = study_rows({("all-reduce", 8, 1): 40, ("all-reduce", 8, 2): 42, ("SGP", 8, 1): 41, ("SGP", 8, 2): 41.04})
    found = gaps(trained(IMAGE_STUDIES[0], rows)).set_index("method").loc["SGP"]
    assert with_spread(found) == "+0.0 (-1.0 to +1.0)"


def test_the_table_has_all_studies_by_workers() -> None:
    first = study_rows(
        {(method, n, 1): 40.0 + n * (method == "SGP") for method in ("all-reduce", "SGP") for n in (8, 4)}
    )
    other = study_rows({(method, 8, seed): 31.0 + seed for method in ("all-reduce", "SGP") for seed in (1, 2)})
    lines = every_study({"worker_numbers": first, "accuracy_bytes": other}).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 4", "| 8", "| 8"]
    assert lines[3].endswith("](worker_numbers.md) | SGD, Nesterov | 8 | 1,280 | 1 | 60.0 | +8.0 |  |  |  |")
    assert "](accuracy_bytes.md) | SGD, Nesterov | 8 | 1,280 | 2 | 67.5 | +0.0 (+0.0 to +0.0) |" in lines[4]
    assert of_sgp({"worker_numbers": first, "accuracy_bytes": other}, 8)["gap"].tolist() == [0.0]  # of two seeds


@pytest.mark.parametrize("name", [name for name in images.IMAGES if name.startswith("sgp")])
def test_a_claim_is_a_range_over_studies(name: str) -> None:
    low, _, high = images.IMAGES[name].text().partition(" to ")
    assert 0 <= float(low) <= float(high or low) < 5

"""Claims about workers that are killed, stopped or started."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import pandas as pd

from benchmarks.claims.base import Claim


def sentence(rows: pd.DataFrame) -> str:
    """Return a sentence about kills with SGP."""
    own = rows[rows["method"] == "SGP"]
    killed, failed = sorted(own["killed"].unique()), own["survivors_that_failed"].sum()
    assert list(killed) == [1, 2, 3]
    assert set(own["num_workers"]) == {8}
    return textwrap.fill(
        f"In {len(own)} runs of eight workers that train by SGP, one to three workers were killed at once. "
        f"{'No' if failed == 0 else int(failed)} other worker failed. The slowest step after a kill took "
        f"{own['slowest_after_kill_ms'].max():.0f} ms, where the median step takes {own['median_ms'].median():.0f} ms.",
        width=118,
    )


ELASTIC: Mapping[str, Claim] = {
    "sentence": Claim(
        ("elastic.csv",),
        "SGP, all runs: the highest slowest_after_kill_ms, and the median of median_ms",
        sentence,
    ),
}

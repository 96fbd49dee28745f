"""Claims about workers with different classes."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.claims.base import Claim
from benchmarks.studies.ends import split_ends


def classes(rows: pd.DataFrame) -> str:
    """Return the points below all-reduce of four methods with one or two classes on each worker."""
    gaps = split_ends(rows, "1-2 classes").set_index("method")["gap"]
    names = sorted(("SGP", "QG-DSGDm", "D2"), key=lambda name: gaps[name])
    others = ", ".join(f"{name} {gaps[name]:.1f}" for name in names[:-1])
    return (
        f"RelaySGD ended {gaps['RelaySGD']:.1f} points below all-reduce, {others} and {names[-1]} {gaps[names[-1]]:.1f}"
    )


SEEDS = "the last step, tuned: accuracy of all-reduce less that of the method, mean over the seeds that both have"
UNEVEN: Mapping[str, Claim] = {
    "classes": Claim(("uneven_data.csv",), f"16 workers, split 1-2 classes, {SEEDS}", classes),
}

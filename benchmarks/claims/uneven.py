"""Claims about workers with different classes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pandas as pd

from benchmarks.claims.base import Claim
from benchmarks.studies.ends import split_ends
from benchmarks.studies.uneven import GRAPHS, RING, SKEWED


def unsigned(gap: float) -> str:
    """Return a gap with one decimal, and no sign of minus before zero."""
    return f"{round(gap, 1) + 0.0:.1f}"


def by_split(rows: pd.DataFrame, split: str) -> str:
    """Return the points below all-reduce of all methods on a split, those on the ring last."""
    found = split_ends(rows, split).sort_values("gap")
    found = found[found["method"] != "all-reduce"].set_index("method")["gap"]
    texts = {name: f"{name.partition(',')[0]} {unsigned(gap)}" for name, gap in found.items()}
    others, ring = (
        ", ".join(text for name, text in texts.items() if (GRAPHS[name] == RING) == is_on_ring)
        for is_on_ring in (False, True)
    )
    return f"{others}; on a ring {ring}"


def by_method(rows: pd.DataFrame, method: str) -> str:
    """Return the points below all-reduce of a method on the three splits, the most even one first."""
    *first, last = [unsigned(split_ends(rows, each).set_index("method")["gap"][method]) for each in SKEWED]
    return f"{', '.join(first)} and {last}"


SEEDS = "the last step, tuned: accuracy of all-reduce less that of the method, mean over the seeds that both have"
SPLITS: Mapping[str, str] = {"alpha_1": "alpha 1", "alpha_01": "alpha 0.1", "classes": "1-2 classes"}
"""The splits by the names of their claims."""
METHODS: Mapping[str, str] = {
    "sgp": "SGP",
    "relaysgd": "RelaySGD",
    "dpsgd": "D-PSGD",
    "qgdsgdm": "QG-DSGDm",
    "decentlam": "DecentLaM",
    "d2": "D2",
    "exactdiffusion": "exact diffusion",
    "gradienttracking": "gradient tracking",
}
"""The methods by the names of their claims."""
UNEVEN: Mapping[str, Claim] = {
    **{
        name: Claim(("uneven_data.csv",), f"16 workers, split {split}, {SEEDS}", partial(by_split, split=split))
        for name, split in SPLITS.items()
    },
    **{
        name: Claim(
            ("uneven_data.csv",), f"16 workers, {', '.join(SKEWED)}: {SEEDS}", partial(by_method, method=method)
        )
        for name, method in METHODS.items()
    },
}
"""Claims about uneven data."""

"""The rows of gap.csv at the best rate of each change."""

from __future__ import annotations

import pandas as pd

UNTUNED = {("language", 320): 0.008, ("images", 800): 0.1}
"""By task and steps: a change for which no such rate was tried is not tuned."""


def best(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of each change at the rate that is best on the validation split with the lowest seed, a row per change.

    Args:
        rows: of gap.csv, of one task with one number of workers and of steps.

    Returns:
        By change and batch: rate, seeds, and of the test split mean, lowest and highest; own (of the models of single
        workers); distance of these from their mean, relative; from the lowest mean to the highest.
    """
    found = []
    for (change, batch), own in rows.groupby(["change", "batch"], sort=False):
        tuned = own[own["run_seed"] == own["run_seed"].min()]
        rate = tuned.loc[tuned["validation"].idxmin(), "rate"]
        if rate == tuned["rate"].max() < UNTUNED.get((own["task"].iloc[0], own["steps"].iloc[0]), 0.0):
            continue  # no time was left for a rate that is too high
        own = own[own["rate"] == rate]
        test = own["test"]
        ends = (rate, len(own), test.mean(), test.min(), test.max(), own["test_own"].mean(), own["distance"].mean())
        found.append((change, batch, *ends))
    columns = ["change", "batch", "rate", "seeds", "mean", "lowest", "highest", "own", "distance"]
    return pd.DataFrame(found, columns=columns).sort_values("mean")

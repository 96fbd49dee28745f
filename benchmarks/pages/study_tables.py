"""Tables of the CSV files of `benchmarks.studies`."""

from __future__ import annotations

import pandas as pd

from benchmarks.pages.markdown import grid, table


def trainings(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the last row of each training with all its steps, with its accuracy in percent."""
    found = rows[~rows["is_tuning"] & (rows["step"] == rows["steps"])]
    return found.assign(accuracy=100 - found["test"])


def ends(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """Return the ends of each method with each number of workers, in the mean over seeds, the best first.

    Args:
        rows: of a study.
        base: the method that others are compared with, on the seeds that both have.

    Returns:
        method, workers, rate, seeds, accuracy, lowest, highest, gap (points below the base), megabytes of a worker,
        seconds.
    """
    last = trainings(rows)
    found = []
    for workers, own in last.groupby("workers", sort=True):
        accuracies = own.pivot(index="seed", columns="method", values="accuracy")
        others = own.groupby("method")[["rate", "megabytes", "seconds"]].mean()
        for method, each in accuracies.items():
            gap = (accuracies[base] - each).mean() if base in accuracies else float("nan")
            spread = each.count(), each.mean(), each.min(), each.max(), gap
            found.append(
                (method, workers, others["rate"][method], *spread, *others.loc[method, ["megabytes", "seconds"]])
            )
    names = ("method", "workers", "rate", "seeds", "accuracy", "lowest", "highest", "gap", "megabytes", "seconds")
    return pd.DataFrame(found, columns=list(names)).sort_values(["workers", "accuracy"], ascending=[True, False])


def rates(rows: pd.DataFrame) -> str:
    """Write the validation errors of the short trainings that chose rates, a table for each number of workers."""
    texts = ["Validation errors in percent of the short trainings that chose rates, with the first seed:"]
    tuning = rows[rows["is_tuning"]]
    for workers, own in tuning[tuning["step"] == tuning["steps"]].groupby("workers"):
        own = own.sort_values("rate", kind="stable")
        texts.append(f"{workers} workers, {own['steps'].iloc[0]:,} steps")
        texts.append(grid(own, ("method", "method"), "rate", "validation", ".1f", "rate {:g}"))
    return "\n\n".join(texts)


def all_rows(rows: pd.DataFrame) -> str:
    """Write the end of each training, and the grid of rates."""
    columns = {
        "method": ("method", "s"),
        "workers": ("workers", "d"),
        "seed": ("seed", "d"),
        "rate": ("rate", "g"),
        "steps": ("steps", ",d"),
        "accuracy": ("accuracy, %", ".2f"),
        "consensus": ("distance", ".3g"),
        "megabytes": ("MB sent", ".1f"),
        "seconds": ("seconds", ".1f"),
        "cpu_seconds": ("CPU s", ".0f"),
    }
    return "\n\n".join([table(trainings(rows), columns), *([rates(rows)] if rows["is_tuning"].any() else [])])


def progress(rows: pd.DataFrame, planned: int) -> str:
    """Return a sentence about the trainings that have rows; "" if all have.

    Args:
        rows: of a study.
        planned: the number of trainings of the study.
    """
    done = len(trainings(rows))
    missing = (
        "" if done == planned else f" {done} of {planned} trainings have run; the command below goes on with them."
    )
    return missing.strip()

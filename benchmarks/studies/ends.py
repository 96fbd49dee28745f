"""The ends of the trainings of a study, from its CSV file."""

from __future__ import annotations

import pandas as pd


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


def split_ends(rows: pd.DataFrame, split: str) -> pd.DataFrame:
    """Return `ends` beside all-reduce of the trainings whose names begin with a split of the data and a colon.

    Returns:
        The columns of `ends`, and spread, the standard deviation of the accuracy over seeds.
    """
    prefix = f"{split}: "
    own = rows[rows["method"].str.startswith(prefix)]
    own = own.assign(method=own["method"].str.removeprefix(prefix))
    spread = trainings(own).groupby(["method", "workers"])["accuracy"].std().rename("spread")
    return ends(own, "all-reduce").join(spread, on=["method", "workers"])


def gaps(rows: pd.DataFrame, base: str, steps: int) -> pd.DataFrame:
    """Return the ends of trainings of a language model whose rates were chosen, with their distance from a method.

    Args:
        rows: of a study.
        base: the method that others are compared with, on the seeds that both have.
        steps: of the trainings.

    Returns:
        method, workers, rate, seeds, validation and test in the mean over seeds, beyond (test less that of the base)
        with its lowest and its highest seed, tuned (the steps of the trainings that chose the rate), megabytes of a
        worker; the best first.
    """
    last = rows[rows["step"] == rows["steps"]]
    ends, tuning = last[~last["is_tuning"] & (last["steps"] == steps)], last[last["is_tuning"]]
    found = []
    for (workers, method), own in ends.groupby(["workers", "method"]):
        own_base = ends[(ends["workers"] == workers) & (ends["method"] == base)].set_index("seed")["test"]
        beyond = (own.set_index("seed")["test"] - own_base).dropna()
        chosen = tuning[(tuning["method"] == method) & (tuning["workers"] == workers)]["steps"].max()
        means = own[["validation", "test"]].mean()
        spread = beyond.mean(), beyond.min(), beyond.max()
        found.append(
            (method, workers, own["rate"].iloc[0], len(own), *means, *spread, chosen, own["megabytes"].iloc[0])
        )
    names = ["method", "workers", "rate", "seeds", "validation", "test", "beyond", "lowest", "highest", "tuned"]
    return pd.DataFrame(found, columns=[*names, "megabytes"]).sort_values(["workers", "test"])

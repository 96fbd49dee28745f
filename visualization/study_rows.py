"""The rows of a study in benchmarks/results/ that pictures draw."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from visualization.charts import Curve, Look, Point
from visualization.logs.tables import read_columns

SOURCE = "benchmarks.studies"
STUDY = ("method", "workers", "seed", "steps", "step", "is_tuning", "seconds", "megabytes", "test", "waiting")
"""The columns of a study that pictures need."""


def trainings(path: Path) -> pd.DataFrame:
    """Return the curves of the trainings of a study that did not choose a rate, with the accuracy in percent."""
    rows = read_columns(path, STUDY, source=SOURCE)
    return rows[~rows["is_tuning"]].assign(accuracy=100 - rows["test"])


def last(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the last row of each training."""
    return rows[rows["step"] == rows["steps"]]


def points(rows: pd.DataFrame) -> list[Point]:
    """Return the first two columns as points, in the order of the rows."""
    return [(float(x), float(y)) for x, y in rows.iloc[:, :2].itertuples(index=False)]


def mean_curves(rows: pd.DataFrame, x: str, y: str, looks: Iterable[tuple[str, str, Look]]) -> list[Curve]:
    """Return a curve for each method, the mean over its seeds at each step.

    Args:
        rows: trainings, a row for each step that was evaluated.
        x, y: names of columns.
        looks: the method, its label and its look.
    """
    means = rows.assign(at=rows["step"]).groupby(["method", "at"])[[x, y]].mean()
    return [Curve(label, look, points(means.loc[name].sort_values(x))) for name, label, look in looks]

"""The rows of learning curves: what they say, how they are found again, and which learning rate is best by them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.cluster.workload.task import Score

SETTING = (
    *("task", "data", "method", "hosts", "rate_gbit", "num_parameters", "planned_ms", "spread", "straggle_chance"),
    *("slow_factor", "slow_host", "slow_link_share", "batch_size", "planned_steps"),
)
"""The columns that say what was trained, but for the learning rate and the seed; data: a short hash of it."""
COLUMNS = (
    *(*SETTING, "learning_rate", "seed"),
    *("num_steps", "score", "worst_score", "mean_loss", "mean_step_ms", "error"),
)
"""Of the CSV. num_steps: mean over ranks; score: of all ranks' own models; worst_score: of the rank with the worst, on
its share; mean_loss and mean_step_ms: over the steps since the row before."""


def digest(arrays: Path) -> str:
    """A short hash of the arrays in a folder, to tell whether trainings read the same data."""
    found = hashlib.sha256()
    for path in sorted(arrays.glob("*.npy")):
        found.update(path.name.encode() + path.read_bytes())
    return f"sha256:{found.hexdigest()[:12]}"


def rows_in(path: Path) -> pd.DataFrame:
    """The rows of the CSV file; none where it is not there."""
    if not path.is_file():
        return pd.DataFrame(columns=list(COLUMNS))
    return pd.read_csv(path)


def rows_of_setting(rows: pd.DataFrame, setting: Mapping[str, Any]) -> pd.DataFrame:
    """Those whose columns have the values of `setting`."""
    chosen = pd.Series(True, index=rows.index)
    for name, value in setting.items():
        chosen &= rows[name] == value
    return rows[chosen]


def goodness_by_rate(rows: pd.DataFrame, score: Score) -> dict[float, float]:
    """How good the models at the end are, higher is better: by the learning rates of trainings with one seed.

    -inf: it failed or diverged.

    Args:
        rows: of one setting and seed.
        score: of the task.
    """
    found = {}
    for rate, own in rows.groupby("learning_rate", sort=False):
        last = own.sort_values("num_steps")["score"].iloc[-1]
        found[float(str(rate))] = -math.inf if pd.isna(last) else score.goodness(last)
    return found


def best_rate(goodness: Mapping[float, float]) -> float:
    """The best of the learning rates of `goodness_by_rate`; of equal ones the lowest."""
    return max(goodness, key=lambda rate: (goodness[rate], -rate))


def tuned_rate(rows: pd.DataFrame, score: Score) -> float:
    """The learning rate of all seeds of a setting: the best at the end with the lowest seed, which `curves` tunes with.

    Args:
        rows: of one setting.
        score: of the task.

    Raises:
        ValueError: another seed was not trained at it, or at more learning rates than the lowest seed, so that the
            rows do not say with which seed the learning rate was tuned.
    """
    lowest = rows["seed"].min()
    tuned = goodness_by_rate(rows[rows["seed"] == lowest], score)
    best = best_rate(tuned)
    for seed, own in rows.groupby("seed"):
        rates = sorted(set(own["learning_rate"]))
        if best not in rates or len(rates) > len(tuned):
            named = ", ".join(f"{rate:g}" for rate in rates)
            raise ValueError(
                f"got {rows['method'].iloc[0]} with seed {seed} at learning rates {named}, expected the best of seed "
                f"{lowest}, {best:g}, and no more of them than its {len(tuned)}, as they are tuned with the lowest "
                "seed; train with both seeds by one command, or remove the rows of one"
            )
    return best


def curve(answers: Sequence[dict[str, list[float]]], score: Score) -> list[dict[str, float]]:
    """Of the answers of all ranks, as `training.train` gives them: a point per evaluation.

    Args:
        answers: of the ranks.
        score: of the task.
    """
    points = []
    for index in range(min(len(answer["num_steps"]) for answer in answers)):
        totals = [answer["total"][index] for answer in answers]
        items = [answer["num_items"][index] for answer in answers]
        own = [score.scale * total / num for total, num in zip(totals, items)]
        points.append(
            {
                "num_steps": sum(answer["num_steps"][index] for answer in answers) / len(answers),
                "score": score.scale * sum(totals) / sum(items),
                "worst_score": min(own, key=score.goodness),
                "mean_loss": sum(answer["mean_loss"][index] for answer in answers) / len(answers),
                "mean_step_ms": 1e3 * sum(answer["mean_seconds"][index] for answer in answers) / len(answers),
            }
        )
    return points

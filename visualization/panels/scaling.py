"""Seconds per iteration against the number of ranks, a line per recipe: what communication costs as a job grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from visualization.logs.runs import LoggedRun
from visualization.style import method_styles

NAME = "scaling"


def seconds_per_step(run: LoggedRun) -> float | None:
    """Mean over ranks of training seconds per optimizer step of their own.

    The first epoch, with its start-up, is left out where there is another. None: no rank has taken a step.
    """
    if not (run.has("own_steps") and run.has("time_seconds")):
        return None
    seconds = []
    for _, rows in run.table.groupby("rank"):
        first, last = rows.iloc[0], rows.iloc[-1]
        steps, elapsed = last["own_steps"], last["time_seconds"]
        if last["own_steps"] > first["own_steps"]:
            steps, elapsed = steps - first["own_steps"], elapsed - first["time_seconds"]
        if steps > 0:
            seconds.append(elapsed / steps)
    return sum(seconds) / len(seconds) if seconds else None


def scaling_points(runs: Sequence[LoggedRun]) -> dict[str, pd.DataFrame]:
    """Of each recipe: mean, low and high over its runs of a size, in seconds per step, by ascending world_size.

    Runs without a summary, whose recipe is not known, are left out.
    """
    rows = [
        {"recipe": run.recipe, "world_size": run.world_size, "seconds": seconds}
        for run in runs
        if run.recipe is not None and (seconds := seconds_per_step(run)) is not None
    ]
    if not rows:
        return {}
    table = pd.DataFrame(rows).groupby(["recipe", "world_size"])["seconds"].agg(["mean", "min", "max"]).reset_index()
    return {str(recipe): points.sort_values("world_size") for recipe, points in table.groupby("recipe")}


def why_not(points: Mapping[str, pd.DataFrame]) -> str | None:
    """What is missing for the picture; None: nothing."""
    sizes = {size for rows in points.values() for size in rows["world_size"]}
    if len(sizes) >= 2:
        return None
    had = f"of {sizes.pop()} ranks" if sizes else "none with a summary"
    return f"it needs runs of at least two world sizes, got {had}"


def draw_scaling(axis: Axes, points: Mapping[str, pd.DataFrame]) -> None:
    """Draw `scaling_points`; bars are from the fastest run of a kind to the slowest."""
    looks = method_styles(list(points))
    for recipe, rows in points.items():
        mean = 1000 * rows["mean"]
        bars = None if (rows["max"] == rows["min"]).all() else [mean - 1000 * rows["min"], 1000 * rows["max"] - mean]
        axis.errorbar(rows["world_size"], mean, yerr=bars, label=recipe, capsize=2, elinewidth=0.8, **looks[recipe])
    sizes = sorted({int(size) for rows in points.values() for size in rows["world_size"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, list(map(str, sizes)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set(title="Time per iteration", xlabel="ranks [log scale]", ylabel="time per iteration [ms]")
    axis.set_ylim(bottom=0)

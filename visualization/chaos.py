"""Members over time, and the slowest step after each fault, of a run of benchmarks/chaos.

python -m visualization.chaos benchmarks/results/chaos_faults.csv --runs benchmarks/results/chaos.csv --output chaos.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from visualization.command import run_command
from visualization.logs.tables import read_columns
from visualization.style import COLORS, LEGIBLE, MUTED, PHONE, add_legend, log_scale, new_figure, save, styled

COLUMNS = ("method", "at_seconds", "kind", "lasts_seconds", "live", "members", "slowest_ms")
RUN_COLUMNS = ("method", "num_workers", "seed", "median_ms")
SOURCE = "benchmarks/chaos"
KINDS: Mapping[str, tuple[str, str, str]] = {
    "kill": ("killed", COLORS[1], "X"),
    "stop": ("stopped", COLORS[3], "s"),
    "join": ("started", COLORS[2], "^"),
    "store": ("store killed", COLORS[4], "D"),
}
"""Label, colour and marker of each kind of fault; none is the colour of a line."""
DEADLINE_MS = 2000.0
"""The least silence after which a soak leaves a worker out."""


def draw_members(axis: Axes, rows: pd.DataFrame) -> None:
    """Processes that live, and workers in the generation that trains, against time; both as of each fault."""
    seconds, live, members = rows["at_seconds"], rows["live"], rows["members"]
    axis.fill_between(seconds, live, step="post", color=MUTED, alpha=0.3, lw=0, label="live processes")
    axis.step(seconds, members, where="post", color=COLORS[0], linewidth=0.9, label="workers that train together")
    axis.set(ylabel="workers", ylim=(0, max(rows["live"].max(), rows["members"].max()) + 1))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))


def draw_slowest(axis: Axes, rows: pd.DataFrame, median_ms: float | None) -> None:
    """The slowest step of any worker between a fault and the next one, a point for each fault.

    Args:
        axis: where to draw.
        rows: a fault each.
        median_ms: the median of all steps of the run, in milliseconds; None: not known.
    """
    axis.axhline(DEADLINE_MS, color=MUTED, linestyle="--", linewidth=0.9, label="deadline of a silent worker, 2 s")
    if median_ms is not None:
        label = f"median of all steps, {median_ms:.0f} ms"
        axis.axhline(median_ms, color=MUTED, linestyle=":", linewidth=1.2, label=label)
    for kind, (label, color, marker) in KINDS.items():
        own = rows[(rows["kind"] == kind) & (rows["slowest_ms"] > 0)]
        if len(own):
            axis.plot(
                own["at_seconds"],
                own["slowest_ms"],
                color=color,
                marker=marker,
                linestyle="",
                markersize=3.2,
                label=f"{label}: {own['slowest_ms'].median():.0f} ms in the median",
            )
    axis.set(xlabel="seconds of training", ylabel="slowest step [ms]")
    log_scale(axis, "y")


def draw(path: Path, output: Path, *, method: str = "", runs: Path | None = None) -> Path:
    """Draw one run of the CSV file as the file `output`; returns it.

    Args:
        path: chaos_faults.csv.
        output: PNG, SVG or PDF.
        method: whose run; empty: the first.
        runs: chaos.csv, which has the number of workers and the median step of each run.

    Raises:
        ValueError: a column is missing, or there is no such run.
    """
    rows = read_columns(path, COLUMNS, source=SOURCE)
    method = method or str(rows["method"].iloc[0])
    own = rows[rows["method"] == method]
    if own.empty:
        found = ", ".join(map(str, rows["method"].unique()))
        raise ValueError(f"got no faults of {method} in {path}, expected one of {found}; see --method")
    workers, median_ms = "", None
    if runs is not None:
        run = _run_of(read_columns(runs, RUN_COLUMNS, source=SOURCE), method, runs)
        workers, median_ms = f" {int(run['num_workers'])} workers, seed {int(run['seed'])},", float(run["median_ms"])
    with styled(LEGIBLE):
        figure = new_figure(PHONE, 5.8)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.6))
        draw_members(above, own)
        draw_slowest(below, own, median_ms)
        above.set_title(f"{method} on digits:{workers}\n{len(own)} faults in {own['at_seconds'].max():.0f} s")
        add_legend(figure, (above, below))
        return save(figure, output)


def _run_of(table: pd.DataFrame, method: str, path: Path) -> pd.Series[Any]:
    rows = table[table["method"] == method]
    if rows.empty:
        raise ValueError(f"got no run of {method} in {path}, expected the table of the runs that had the faults")
    return rows.iloc[0]


def main() -> None:
    """Draw the CSV file named on the command line, beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="chaos_faults.csv")
    parser.add_argument("--method", default="", help="whose run; default: the first")
    parser.add_argument(
        "--runs", type=Path, help="chaos.csv of the same soak, for the number of workers and their median step"
    )
    parser.add_argument("--output", type=Path, help="file to write; default: beside the CSV")
    options = parser.parse_args()
    print(
        draw(options.csv, options.output or options.csv.with_suffix(".png"), method=options.method, runs=options.runs)
    )


if __name__ == "__main__":
    run_command(main)

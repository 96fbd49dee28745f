"""Curves of the consensus experiment: error against steps and bits, methods at their best step size.

python -m visualization.consensus runs/consensus/consensus.csv  # writes consensus.png beside it
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from visualization.command import run_command
from visualization.logs.tables import read_columns
from visualization.style import MUTED, PAGE, add_legend, mark_every, method_styles, new_figure, save, styled

THRESHOLDS = (1e-2, 1e-4)
"""Errors, relative to the start, that a run is judged by."""
MAX_SEEN = 40
"""Of so many logged points each is marked."""
COLUMNS = ("method", "step_size", "step", "error", "megabits", "diverged")


def best_runs(points: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Of each method the run with the best step size, in the order of the table.

    That is the run with fewest bits to the smallest of THRESHOLDS that any of the method's runs has reached; where none
    has reached any, the one with the least error at its end.

    Args:
        points: the COLUMNS, a row per logged step.
    """
    best = {}
    for method, rows in points.groupby("method", sort=False):
        runs = [run for _, run in rows.groupby("step_size")]
        best[str(method)] = min(runs, key=_rank)
    return best


def _rank(run: pd.DataFrame) -> tuple[float, ...]:
    """Smaller is better."""
    megabits = [run.loc[run["error"] <= threshold, "megabits"].min() for threshold in sorted(THRESHOLDS)]
    return (*(float("inf") if pd.isna(m) else m for m in megabits), float(run["error"].fillna(float("inf")).iloc[-1]))


def _title(points: pd.DataFrame) -> str:
    """Says what was averaged, by how many workers and with how many seeds, as far as the table does."""
    facts = [f"{points['data'].iloc[0]} matrices"] if "data" in points else []
    facts += [f"{points[name].iloc[0]} workers" for name in ("workers", "world_size", "num_workers") if name in points]
    facts += [f"seed {points['seed'].iloc[0]}"] if "seed" in points else []
    return f"Consensus{': ' if facts else ''}{', '.join(facts)}\neach method with its best step size"


def draw(csv: Path, path: Path) -> Path:
    """Draw the CSV of train/consensus.py as the file `path`; returns it.

    Raises:
        ValueError: a column is missing, or there are no rows.
    """
    points = read_columns(csv, COLUMNS, source="train/consensus.py")
    with styled():
        figure = new_figure(PAGE, 4.2)
        axes = figure.subplots(1, 2, sharey=True)
        best = best_runs(points)
        looks = method_styles(list(best))
        for method, run in best.items():
            end = " (diverges)" if run["diverged"].any() else ""
            label = f"{method}, step size {run['step_size'].iloc[0]:.3g}{end}"
            # A logarithm has no place for step 0, nor for an error that is 0 or no number.
            run = run[(run["step"] > 0) & (run["error"] > 0)]
            for axis, x in zip(axes, ("step", "megabits"), strict=True):
                style = looks[method] | {"markevery": mark_every(len(run))}
                if len(run) <= MAX_SEEN:
                    style |= {"markevery": 1, "markersize": 2.5}
                axis.plot(run[x], run["error"], label=label, **style)
        for axis, xlabel in zip(axes, ("step [log scale]", "sent per worker [Mbit, log scale]"), strict=True):
            # Without a single point a logarithmic axis has no ends.
            scale = "log" if any(len(line.get_path().vertices) for line in axis.get_lines()) else "linear"
            axis.set(
                xscale=scale,
                yscale=scale,
                xlabel=xlabel,
            )
            for threshold in THRESHOLDS:
                axis.axhline(threshold, color=MUTED, linewidth=0.8)
        axes[0].set_ylabel("squared distance to the mean, start = 1 [log scale]")
        figure.suptitle(_title(points))
        add_legend(figure, axes)
        return save(figure, path)


def main() -> None:
    """Draw the CSV named on the command line, beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="consensus.csv")
    parser.add_argument("--output", type=Path, help="file to write; default: beside the CSV")
    options = parser.parse_args()
    print(draw(options.csv, options.output or options.csv.with_suffix(".png")))


if __name__ == "__main__":
    run_command(main)

"""Curves of a run, and of several side by side: error, loss and consensus distance, over epochs and over time.

python -m visualization.curves runs/digits_sgp                        # writes curves.png there
python -m visualization.curves runs/a runs/b --output compare.png     # one colour per run
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SETTLED = 0.2
"""Share of the epochs after which the loss is to fill its axis: its start would press all recipes into one line."""
ERROR_TICKS = (0, 0.5, 1, 2, 5, 10, 20, 50, 100)


def read_run(folder: Path) -> pd.DataFrame:
    """The CSVs of all ranks as one table, with the column `rank`.

    Args:
        folder: of the run, with rank_0000.csv, rank_0001.csv, ...

    Raises:
        ValueError: there are none.
    """
    paths = sorted(folder.glob("rank_*.csv"))
    if not paths:
        raise ValueError(f"got {folder} without rank_*.csv, expected the --out-dir of a run; check it")
    return pd.concat(
        [pd.read_csv(path).assign(rank=int(path.stem.removeprefix("rank_"))) for path in paths], ignore_index=True
    )


def draw_run(folder: Path) -> Path:
    """Draw curves.png of one run into its folder; returns its path."""
    return draw({folder.name: folder}, folder / "curves.png")


def draw(runs: Mapping[str, Path], path: Path) -> Path:
    """Draw the curves of `runs`, by name, into the PNG file `path`; returns it."""
    # A figure of its own, not one of pyplot: nothing global, no display needed.
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle("Lines: mean over ranks. Bands: from the lowest rank to the highest.", fontsize="medium")
    errors, errors_over_time, losses, distances = figure.subplots(2, 2).flat
    settled_losses = []
    for (name, folder), color in zip(runs.items(), cycle(mpl.color_sequences["tab10"])):
        table = read_run(folder)
        table["averaged_error"] = 100 - table["averaged_test_accuracy_percent"]
        table["own_error"] = 100 - table["own_test_accuracy_percent"]
        for axis, x in ((errors, "epoch"), (errors_over_time, "time_seconds")):
            draw_mean(axis, table, x=x, y="averaged_error", color=color, label=f"{name}: averaged model")
            draw_mean(axis, table, x=x, y="own_error", color=color, label=f"{name}: own models", linestyle=":")
        draw_mean(losses, table, x="epoch", y="loss", color=color, label=name)
        settled_losses.append(table.loc[table["epoch"] > SETTLED * table["epoch"].max(), "loss"])
        draw_mean(distances, table, x="epoch", y="consensus_distance", color=color, label=name)
    for axis in (errors, errors_over_time):
        # Close to logarithmic, so that the end of training shows next to its start, yet with a place for 0.
        axis.set_yscale("symlog", linthresh=1.0, linscale=0.5)
        axis.set_yticks(ERROR_TICKS, [f"{tick:g}" for tick in ERROR_TICKS])
        axis.set_ylim(0, 100)
    if any((line.get_ydata() > 0).any() for line in distances.get_lines()):
        distances.set_yscale("log")
    is_zoomed = zoom(losses, pd.concat(settled_losses))
    finish(errors, title="Test error", xlabel="epoch", ylabel="error [%]")
    finish(errors_over_time, title="Test error over training time", xlabel="training time [s]", ylabel="error [%]")
    title = "Training loss" + (" (first epochs above the frame)" if is_zoomed else "")
    finish(losses, title=title, xlabel="epoch", ylabel="loss")
    finish(distances, title="Distance of ranks from their average", xlabel="epoch", ylabel="consensus distance")
    figure.savefig(path, dpi=120)
    return path


def draw_mean(axis: Axes, table: pd.DataFrame, *, x: str, y: str, color: Any, label: str, linestyle: str = "-") -> None:
    """A line of the mean of y over ranks, after each epoch that has y, in a band from the lowest rank to the highest.

    Args:
        axis: where to draw.
        table: rows of all ranks.
        x: column of the horizontal axis; its mean over ranks is used.
        y: column to draw.
        color: of line and band.
        label: in the legend.
        linestyle: of the line.
    """
    epochs = table.dropna(subset=[y]).groupby("epoch")
    xs, mean, low, high = epochs[x].mean(), epochs[y].mean(), epochs[y].min(), epochs[y].max()
    if not (high > 0).any():
        label += ": 0 throughout"  # AllReduce keeps ranks equal, which a log scale has no place for
    axis.plot(xs, mean, color=color, linestyle=linestyle, label=label, linewidth=1.6)
    axis.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)


def zoom(axis: Axes, values: pd.Series) -> bool:
    """Let `values` fill the vertical axis; whether something drawn lies outside."""
    low, high = values.min(), values.max()
    if not high > low:
        return False
    margin = 0.05 * (high - low)
    is_zoomed = bool(axis.dataLim.y1 > high + margin)
    axis.set_ylim(low - margin, high + margin)
    return is_zoomed


def finish(axis: Axes, *, title: str, xlabel: str, ylabel: str) -> None:
    """Title, labels, grid, legend."""
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize="small")


def main() -> None:
    """Draw the runs named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="--out-dir of a run")
    parser.add_argument("--output", type=Path, help="PNG to write; default: curves.png in the first folder")
    arguments = parser.parse_args()
    runs = {folder.name: folder for folder in arguments.folders}
    print(draw(runs, arguments.output or arguments.folders[0] / "curves.png"))


if __name__ == "__main__":
    main()

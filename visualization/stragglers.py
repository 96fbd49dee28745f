"""Accuracy against seconds in each setting, and the rate that fast ranks keep, of benchmarks/stragglers.py.

python -m visualization.stragglers runs/stragglers/stragglers.csv runs/stragglers/curves.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import ColorType

ROW_COLUMNS = ("setting", "method", "title", "seed", "steps_per_second")
CURVE_COLUMNS = ("setting", "method", "title", "seed", "seconds", "accuracy_percent")
UNDISTURBED, BOUND = "undisturbed", "none"


def read(csv: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    """A CSV of benchmarks/stragglers.py.

    Raises:
        ValueError: a column is missing, or there are no rows.
    """
    table = pd.read_csv(csv)
    if missing := [name for name in columns if name not in table] or (["rows"] if table.empty else []):
        raise ValueError(f"got {csv} without {', '.join(missing)}, expected a CSV of benchmarks/stragglers.py")
    return table


def kept_percent(rows: pd.DataFrame) -> pd.DataFrame:
    """Rate of fast ranks in percent of the same method's undisturbed one, means over seeds: titles by settings.

    Methods that were not run undisturbed are left out.
    """
    rates = rows.pivot_table("steps_per_second", "title", "setting", sort=False)
    others = [name for name in rates if name != UNDISTURBED]
    if UNDISTURBED not in rates:
        return rates.iloc[:0][others]
    return 100 * rates[others].div(rates[UNDISTURBED], axis=0).dropna(how="all")


def lower_limit(curves: pd.DataFrame) -> float:
    """The ten percent below the worst curve's best accuracy and 80: how far down an axis shows what is of interest."""
    best = curves.groupby(["setting", "title", "seed"])["accuracy_percent"].max()
    return max(10 * (min(best.min(), 90.0) // 10 - 1), 0.0)


def draw_curves(axis: Axes, curves: pd.DataFrame, colors: Mapping[str, ColorType], *, lowest: float) -> None:
    """Accuracy of the averaged model against seconds, a line per method and seed, on an axis from `lowest` percent."""
    for (title, _), points in curves.groupby(["title", "seed"], sort=False):
        axis.plot(points["seconds"], points["accuracy_percent"], color=colors[title], linewidth=1.5, label=title)
    axis.set(xlabel="seconds", ylim=(lowest, 100))
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def draw_bars(axis: Axes, kept: pd.DataFrame, colors: Mapping[str, ColorType]) -> None:
    """A group of bars per setting, a bar per method."""
    width = 0.8 / max(len(kept), 1)
    for index, (title, values) in enumerate(kept.iterrows()):
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(values))]
        axis.bar(places, values, width, color=colors[title], label=title)
    axis.set_xticks(range(len(kept.columns)), kept.columns)
    axis.set(title="rate of fast ranks", ylabel="of the undisturbed rate [%]")
    axis.grid(alpha=0.3, axis="y")
    axis.spines[["top", "right"]].set_visible(False)


def draw(csv: Path, curves_csv: Path, path: Path) -> Path:
    """Draw the two CSV files into the PNG file `path`; returns it.

    Raises:
        ValueError: see `read`.
    """
    rows, curves = read(csv, ROW_COLUMNS), read(curves_csv, CURVE_COLUMNS)
    settings = list(dict.fromkeys(rows["setting"]))
    colors = dict(
        zip(dict.fromkeys(rows["title"]), [color for _ in range(9) for color in mpl.color_sequences["tab10"]])
    )
    curves = curves[curves["method"] != BOUND]
    lowest = lower_limit(curves)
    figure = Figure(figsize=(4 * len(settings) + 4, 4), layout="constrained")
    axes = figure.subplots(1, len(settings) + 1, squeeze=False)[0]
    for axis, setting in zip(axes, settings):
        draw_curves(axis, curves[curves["setting"] == setting], colors, lowest=lowest)
        axis.set(title=setting)
    axes[0].set(ylabel="test accuracy of the averaged model [%]")
    draw_bars(axes[-1], kept_percent(rows), colors)
    shown: dict[str, Artist] = {}  # a method has a line per seed, and a bar only where it was run undisturbed
    for axis in axes:
        for handle, title in zip(*axis.get_legend_handles_labels()):
            shown.setdefault(title, handle)
    titles = [title for title in colors if title in shown]
    handles = [shown[title] for title in titles]
    figure.legend(handles, titles, frameon=False, fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=120)
    return path


def main() -> None:
    """Draw the CSV files named on the command line, beside the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="stragglers.csv")
    parser.add_argument("curves", type=Path, help="curves.csv")
    parser.add_argument("--output", type=Path, help="PNG to write; default: beside the first CSV")
    options = parser.parse_args()
    print(draw(options.csv, options.curves, options.output or options.csv.with_suffix(".png")))


if __name__ == "__main__":
    main()

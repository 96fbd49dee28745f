"""Accuracy against seconds in each setting of benchmarks/stragglers, and the rate of fast ranks.

python -m visualization.stragglers runs/stragglers/stragglers.csv runs/stragglers/curves.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from visualization.command import run_command
from visualization.logs.tables import read_columns
from visualization.style import PAGE, legend_columns, mark_every, method_styles, new_figure, save, styled

ROW_COLUMNS = ("setting", "method", "title", "seed", "steps_per_second")
CURVE_COLUMNS = ("setting", "method", "title", "seed", "seconds", "accuracy_percent")
UNDISTURBED, BOUND = "undisturbed", "none"
SOURCE = "benchmarks/stragglers"
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\")


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


def draw_curves(axis: Axes, curves: pd.DataFrame, looks: Mapping[str, Mapping[str, Any]], *, lowest: float) -> None:
    """Accuracy of the averaged model against seconds, a line per method and seed, on an axis from `lowest` percent.

    Args:
        axis: where to draw.
        curves: of one setting.
        looks: of each title, of `method_styles`.
        lowest: end of the axis.
    """
    for (title, _), points in curves.groupby(["title", "seed"], sort=False):
        style = {**looks[title], "markevery": mark_every(list(looks).index(title), len(points))}
        axis.plot(points["seconds"], points["accuracy_percent"], label=title, **style)
    axis.set(xlabel="seconds", ylim=(lowest, 100))


def draw_bars(axis: Axes, kept: pd.DataFrame, looks: Mapping[str, Mapping[str, Any]]) -> None:
    """A group of bars per setting, a bar per method: colours and hatches tell them apart."""
    width = 0.8 / max(len(kept), 1)
    for index, (title, values) in enumerate(kept.iterrows()):
        xs = [x - 0.4 + (index + 0.5) * width for x in range(len(values))]
        axis.bar(xs, values, width, label=title, **_bar_style(looks, title))
    axis.set_xticks(range(len(kept.columns)), kept.columns)
    axis.set(title="rate of fast ranks", ylabel="of the undisturbed rate [%]")
    axis.grid(visible=False, axis="x")


def _bar_style(looks: Mapping[str, Mapping[str, Any]], title: str) -> dict[str, Any]:
    hatch = HATCHES[list(looks).index(title) % len(HATCHES)]
    return {"facecolor": looks[title]["color"], "hatch": hatch, "edgecolor": "white", "linewidth": 0}


def draw(csv: Path, curves_csv: Path, path: Path) -> Path:
    """Draw the two CSV files as the file `path`; returns it.

    Raises:
        ValueError: a column is missing, or there are no rows.
    """
    rows = read_columns(csv, ROW_COLUMNS, source=SOURCE)
    curves = read_columns(curves_csv, CURVE_COLUMNS, source=SOURCE)
    settings = list(dict.fromkeys(rows["setting"]))
    looks = method_styles(list(dict.fromkeys(rows["title"])))
    curves = curves[curves["method"] != BOUND]
    lowest = lower_limit(curves)
    with styled():
        num_rows = -(-(len(settings) + 1) // 3)
        num_columns = -(-(len(settings) + 1) // num_rows)
        figure = new_figure(PAGE, 2.2 * num_rows + 0.9)
        axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
        for axis, setting in zip(axes, settings):
            draw_curves(axis, curves[curves["setting"] == setting], looks, lowest=lowest)
            axis.set(title=setting)
        for axis in axes[: len(settings) : num_columns]:
            axis.set(ylabel="averaged model: test accuracy [%]")
        draw_bars(axes[len(settings)], kept_percent(rows), looks)
        for axis in axes[len(settings) + 1 :]:
            axis.set_axis_off()
        # A method has a line per seed, and a bar only where it was run undisturbed.
        shown = {
            title: handle
            for axis in reversed(axes)
            for handle, title in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        titles = [title for title in looks if title in shown]
        handles = [shown[title] for title in titles]
        columns = legend_columns(titles, PAGE)
        figure.legend(handles, titles, loc="outside lower center", ncols=columns)
        return save(figure, path)


def main() -> None:
    """Draw the CSV files named on the command line, beside the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="stragglers.csv")
    parser.add_argument("curves", type=Path, help="curves.csv")
    parser.add_argument("--output", type=Path, help="file to write; default: beside the first CSV")
    options = parser.parse_args()
    print(draw(options.csv, options.curves, options.output or options.csv.with_suffix(".png")))


if __name__ == "__main__":
    run_command(main)

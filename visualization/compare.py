"""Loss of a comparison in the Lab against steps, bytes and seconds: a line for each method.

python -m visualization.compare mine.csv    # writes mine.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from visualization.command import run_command
from visualization.logs.tables import read_columns
from visualization.style import PAGE, add_legend, as_label, mark_every, method_styles, new_figure, save, styled

AXES = {"step": "optimizer steps", "megabytes": "sent per worker [MB]", "seconds": "time on the cluster [s]"}
COLUMNS = ("method", "workers", "seed", *AXES, "loss")


def draw(csv: Path, path: Path) -> Path:
    """Draw the CSV of `gossip_modules.lab.compare` as the file `path`, a row for each number of workers; returns it.

    Raises:
        ValueError: a column is missing, or there are no rows.
    """
    table = read_columns(csv, COLUMNS, source="gossip_modules.lab.compare").dropna(subset="loss")
    sizes, looks = sorted(table["workers"].unique()), method_styles(list(dict.fromkeys(table["method"])))
    with styled():
        figure = new_figure(PAGE, 2.2 * len(sizes) + 0.5)
        axes = figure.subplots(len(sizes), len(AXES), squeeze=False, sharey="row")
        for row, size in zip(axes, sizes, strict=True):
            row[0].set_ylabel(f"training loss, {size} workers")
            for axis, (column, label) in zip(row, AXES.items(), strict=True):
                axis.set_xlabel(label)
                own = table[table["workers"] == size]
                for method, rows in own.groupby("method", sort=False):
                    steps = rows.groupby("step", as_index=False)[["megabytes", "seconds", "loss"]]
                    points, low, high = steps.mean(), steps.min()["loss"], steps.max()["loss"]
                    marks = mark_every(len(points))
                    axis.plot(points[column], points["loss"], label=as_label(method), markevery=marks, **looks[method])
                    axis.fill_between(points[column], low, high, color=looks[method]["color"], alpha=0.18, lw=0)
        num_seeds = table["seed"].nunique()
        figure.suptitle(
            f"The Lab: mean of {num_seeds} seeds, bands from the lowest to the highest"
            if num_seeds > 1
            else "The Lab: one seed"
        )
        add_legend(figure, axes.flatten())
        return save(figure, path)


def main() -> None:
    """Draw the CSV named on the command line, beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="the file of Result.to_csv, or of compare(path=...)")
    parser.add_argument("--output", type=Path, help="file to write; default: beside the CSV")
    options = parser.parse_args()
    print(draw(options.csv, options.output or options.csv.with_suffix(".png")))


if __name__ == "__main__":
    run_command(main)

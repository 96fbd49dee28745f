"""Test accuracy against bytes sent in training, a point per method.

python -m visualization.accuracy_bytes runs/accuracy_bytes/accuracy_bytes.csv
"""

from __future__ import annotations

import argparse
from pathlib import Path

from visualization.command import run_command
from visualization.logs.tables import read_columns
from visualization.style import PAGE, add_legend, log_scale, method_styles, new_figure, percent_limits, save, styled

WIDE = 10
"""From this ratio of most to fewest bytes on, the axis is logarithmic."""
COLUMNS = ("title", "accuracy_percent", "sent_megabytes")


def draw(csv: Path, path: Path) -> Path:
    """Draw the CSV of benchmarks/accuracy_bytes.py as the file `path`; returns it.

    Raises:
        ValueError: a column is missing, or there are no rows.
    """
    table = read_columns(csv, COLUMNS, source="benchmarks/accuracy_bytes.py")
    with styled():
        figure = new_figure(PAGE, 3.6)
        axis = figure.subplots()
        looks = method_styles(list(dict.fromkeys(table["title"])))
        for title, rows in table.groupby("title", sort=False):
            accuracy = rows["accuracy_percent"]
            mean = accuracy.mean()
            axis.errorbar(
                [rows["sent_megabytes"].mean()],
                [mean],
                yerr=[[mean - accuracy.min()], [accuracy.max() - mean]],
                **{**looks[title], "linestyle": "none", "markersize": 6},
                capsize=2.5,
                elinewidth=1,
                label=title,
            )
        sent = table.groupby("title")["sent_megabytes"].mean()
        is_log = sent.min() > 0 and sent.max() > WIDE * sent.min()
        if is_log:
            log_scale(axis, "x")
        else:
            axis.set_xlim(0, 1.1 * sent.max() or 1)
        axis.set(
            title="Averaged model: mean over seeds, bars from lowest to highest",
            xlabel=f"sent per worker in training [MB{', log scale' if is_log else ''}]",
            ylabel="test accuracy [%]",
            ylim=percent_limits(table["accuracy_percent"]),
        )
        add_legend(figure, [axis], least=1)
        return save(figure, path)


def main() -> None:
    """Draw the CSV named on the command line, beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="accuracy_bytes.csv")
    parser.add_argument("--output", type=Path, help="file to write; default: beside the CSV")
    options = parser.parse_args()
    print(draw(options.csv, options.output or options.csv.with_suffix(".png")))


if __name__ == "__main__":
    run_command(main)

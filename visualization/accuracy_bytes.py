"""Test accuracy against bytes sent in training, a point per method.

python -m visualization.accuracy_bytes runs/accuracy_bytes/accuracy_bytes.csv
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

COLUMNS = ("title", "accuracy_percent", "sent_megabytes")


def draw(csv: Path, path: Path) -> Path:
    """Draw the CSV of benchmarks/accuracy_bytes.py into the PNG file `path`; returns it.

    Raises:
        ValueError: a column is missing, or there are no rows.
    """
    table = pd.read_csv(csv)
    if missing := [name for name in COLUMNS if name not in table] or (["rows"] if table.empty else []):
        raise ValueError(f"got {csv} without {', '.join(missing)}, expected the CSV of benchmarks/accuracy_bytes.py")
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axis = figure.subplots()
    colors = mpl.color_sequences["tab20"]
    markers = "os^Dv<>Pph*"
    for index, (title, rows) in enumerate(table.groupby("title", sort=False)):
        accuracy = rows["accuracy_percent"]
        mean = accuracy.mean()
        axis.errorbar(
            [rows["sent_megabytes"].mean()],
            [mean],
            yerr=[[mean - accuracy.min()], [accuracy.max() - mean]],
            fmt=markers[index % len(markers)],
            color=colors[index % len(colors)],
            capsize=3,
            markersize=8,
            label=title,
        )
    axis.set_xscale("log")
    axis.set(
        title="Accuracy of the averaged model: mean over seeds, bars from the lowest to the highest",
        xlabel="sent per worker in training [MB]",
        ylabel="test accuracy [%]",
    )
    axis.grid(alpha=0.3, which="both")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    return path


def main() -> None:
    """Draw the CSV named on the command line, beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="accuracy_bytes.csv")
    parser.add_argument("--output", type=Path, help="PNG to write; default: beside the CSV")
    options = parser.parse_args()
    print(draw(options.csv, options.output or options.csv.with_suffix(".png")))


if __name__ == "__main__":
    main()

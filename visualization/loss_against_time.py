"""Loss against time at several link speeds: curves of the gap study, times of steps of the emulated cluster.

python -m visualization.loss_against_time benchmarks/results/gap.csv benchmarks/results/default_cells.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from visualization.command import run_command
from visualization.logs.tables import read_columns
from visualization.style import PAGE, add_legend, log_scale, method_styles, new_figure, save, styled

NUM_STEPS = 320
LINES: Mapping[str, tuple[str, str]] = {
    "DDP, AdamW": ("all-reduce", "ddp"),
    "DDP with fp16 hook, AdamW": ("all-reduce", "ddp-fp16"),
    "Decent-DP, AdamW": ("D-PSGD", "decent-exp"),
    "SGP, AdamW": ("SGP", "sgp"),
    "SGP, GossipAdamW": ("SGP, GossipAdamW", "sgp"),
    "Overlap SGP, GossipAdamW": ("Overlap SGP, GossipAdamW", "osgp"),
    "local SGD with period 4, GossipAdamW": ("local SGD, 4, GossipAdamW", "localsgd"),
}
"""By the label: the change of the gap study that has the loss, and the method of the cluster that has the time."""


def curves(gap: pd.DataFrame, change: str) -> np.ndarray:
    """The test losses of a change at its best rate after equal parts of the steps, [seeds, parts]."""
    own = gap[(gap["change"] == change) & gap["curve"].notna()]
    tuned = own[own["run_seed"] == own["run_seed"].min()]
    own = own[own["rate"] == tuned.loc[tuned["validation"].idxmin(), "rate"]]
    return np.array([[*map(float, str(row.curve).split()), row.test] for row in own.itertuples()])


def seconds(cells: pd.DataFrame, rate: float, method: str) -> float:
    """The seconds of a step of all ranks together, median over repeats."""
    own = cells[(cells["rate_gbit"] == rate) & (cells["method"] == method)]
    return float(own["fleet_step_ms"].median()) / 1e3


def draw(gap_csv: Path, cells_csv: Path, output: Path) -> Path:
    """Draw a panel for each rate of the links as the file `output`; returns it.

    Raises:
        ValueError: a column is missing.
    """
    needed = ("task", "change", "workers", "steps", "rate", "run_seed", "validation", "test", "curve")
    gap = read_columns(gap_csv, needed, source="benchmarks/gap.py")
    gap = gap[(gap["task"] == "language") & (gap["steps"] == NUM_STEPS)]
    cells = read_columns(cells_csv, ("rate_gbit", "method", "fleet_step_ms"), source="benchmarks/cluster")
    rates, looks = sorted(cells["rate_gbit"].unique()), method_styles(list(LINES))
    with styled():
        figure = new_figure(PAGE, 3.4)
        axes = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
        for axis, rate in zip(axes, rates, strict=True):
            for label, (change, method) in LINES.items():
                losses = curves(gap, change)
                if not len(losses):
                    continue
                steps = NUM_STEPS * np.arange(1, losses.shape[1] + 1) / losses.shape[1]
                times = steps * seconds(cells, rate, method)
                axis.plot(times, losses.mean(0), label=label, markevery=[-1], **looks[label])
                axis.fill_between(times, losses.min(0), losses.max(0), color=looks[label]["color"], alpha=0.15, lw=0)
            axis.set(xlabel="seconds", title=f"{rate:g} Gbit/s")
            log_scale(axis, "x")
        axes[0].set(ylabel="test loss [nats per byte]")
        workers, seeds = gap["workers"].iloc[0], gap["run_seed"].nunique()
        figure.suptitle(
            f"Small language model of Python's sources, {workers} workers, {NUM_STEPS} steps\n"
            f"mean of {seeds} seeds, bands from the lowest to the highest"
        )
        add_legend(figure, axes)
        return save(figure, output)


def main() -> None:
    """Draw the two CSV files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gap", type=Path, help="gap.csv")
    parser.add_argument("cells", type=Path, help="the CSV file of benchmarks/cluster")
    parser.add_argument("--output", type=Path, default=Path("loss_against_time.svg"))
    options = parser.parse_args()
    print(draw(options.gap, options.cells, options.output))


if __name__ == "__main__":
    run_command(main)

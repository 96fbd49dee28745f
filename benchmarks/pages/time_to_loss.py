"""The time to a fixed validation loss on the emulated cluster: two CSV files that are multiplied."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.cluster.time_to_target import tables
from benchmarks.pages.base import Page
from benchmarks.record import RESULTS

CELLS = "loss_cells.csv"
TARGETS = (2.5, 2.43)
"""Nats per byte. Ranks that do not communicate reach 2.6 first, and below 2.42 only DDP arrives in 320 steps."""


def time_to_loss(rows: pd.DataFrame) -> str:
    """The tables of each target.

    Args:
        rows: of loss_steps.csv.
    """
    cells = pd.read_csv(RESULTS / CELLS, dtype={"commit": str})
    return figures(rows, cells)


def figures(steps: pd.DataFrame, cells: pd.DataFrame) -> str:
    """How the rows of both files were measured, the tables of each target, and what did not run.

    Args:
        steps: of loss_steps.csv.
        cells: of loss_cells.csv.
    """
    parts = [_sources(steps, "Steps"), _sources(cells, "Seconds per step")]
    for target in TARGETS:
        parts += [f"## {target:g} nats per byte", tables(steps, cells, target)]
    failed = pd.concat([steps, cells])
    failed = failed[failed["error"].notna()].drop_duplicates(["method", "error"])
    if len(failed):
        parts.append("## Without a result")
        parts.append("\n".join(f"- {row.method}: `{row.error}`" for row in failed.itertuples()))
    return "\n\n".join(parts) + "\n"


def _sources(rows: pd.DataFrame, what: str) -> str:
    entries = [f"{what}:"]
    for (command, commit), part in rows.groupby(["command", "commit"], sort=False):
        first, last = part.iloc[0], part.iloc[-1]
        seeds = ", ".join(str(seed) for seed in part["seed"].unique())
        entries.append(
            f"    {command}\n\n{first['date']} to {last['date']}, commit {commit}, torch {first['torch']}, "
            f"{first['machine']}, {first['cores']} cores, seed {seeds}."
        )
    return "\n\n".join(entries)


TIME_TO_LOSS: Mapping[str, Page] = {
    "time_to_loss": Page(
        "Seconds to a fixed validation loss, on an emulated cluster",
        "loss_steps.csv",
        f"""\
Eight hosts train a language model of bytes: how many steps each method takes to a validation loss, times
the seconds of a step on links of 100 Mbit/s and 1 Gbit/s, even and with stragglers, in which 5 % of the
steps of a rank compute ten times as long. Hosts are network namespaces of one machine; `benchmarks/README.md`
says how they are made.

Steps are those of a decoder of two layers, width 64, on the sources of Python's standard library, by
AdamW with a warm-up of a tenth of the steps and a rate that falls linearly to zero. The loss is that of
each rank's own model on its share of 512 sequences of 64 bytes; of our methods that average now and then
it is that of the average. The learning rate is tuned alike for every method, with the lowest seed: a factor
of three or so between rates, and on while the best is at an end. Steps are medians over seeds.
Seconds per step (`benchmarks/results/{CELLS}`) are those of a model with the parameters of a small
ResNet-18, whose compute is waited; what travels is real. Methods that average now and then do so every
four steps. What lockstep methods compute does not depend on links and delays, so their steps count in every
cell. A method without a figure was not timed there, or not trained. Seconds per step are of one run of
each cell.

**One of ours is first in every cell, down to 2.43 nats.** At 100 Mbit/s SparseLoCo takes a quarter of the
time of the fastest of the others, whose messages are whole models; at 1 Gbit/s, where computing is most of a
step, the fastest of ours takes 0.85 to 0.97 of it. DDP makes the most of a step, and ends at 2.31; nobody
else is below 2.41 after 320 steps, neither of ours nor of the others. That may be since ranks have batches of
eight, and DDP alone averages their gradients before AdamW scales them; it was not measured. With a period of
four DiLoCo learns slowly, ours and torchft's alike. At 2.6 nats ranks that do not communicate would be first.""",
        render=time_to_loss,
        also=(CELLS,),
        may_be_missing=True,
    ),
}

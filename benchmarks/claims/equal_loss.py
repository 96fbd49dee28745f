"""Seconds to an equal loss: losses of the study `language`, and times of steps on the emulated cluster.

README, the pages and the picture have one rule. The seconds of a method are steps times the median time of a step. The
steps are those of a training that ends at the target. The target is the lowest loss at which trainings of all compared
methods end after `STEPS` steps.

[Note: a training of its own length] The learning rate of a training falls to zero at its end, and the loss falls
fastest there. So the first step at which the curve of `STEPS` steps is at the target is no fair count: with a lower
rate a curve is lower in the middle, and not at the end. A training that is planned to end at the target is compared
instead. Its steps are between the lengths of two trainings that have ended, at the best rate of `STEPS` steps. Between
them the last loss is linear in the logarithm of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

FILES = ("language.csv", "default_cells.csv")
STEPS, WORKERS = 3000, 8
DDP = ("DDP", "DDP, fp16 hook", "DDP, bf16 hook")


@dataclass(frozen=True)
class MethodLine:
    """A method, with the loss of one study and the time of another one.

    Attributes:
        curve: the method of language.csv that has the loss. Empty: the variant of SGP that the cell has chosen.
        cell: the method of default_cells.csv that has the time.
        is_compared: whether the target is a loss that this method reaches.
    """

    curve: str
    cell: str
    is_compared: bool = False

    @property
    def optimizer(self) -> str:
        """The name of the optimizer."""
        return self.curve.rpartition(", ")[2] or "GossipAdamW"


LINES: Mapping[str, MethodLine] = {
    "DDP": MethodLine("all-reduce, AdamW", "ddp", is_compared=True),
    "DDP, fp16 hook": MethodLine("all-reduce, AdamW", "ddp-fp16", is_compared=True),
    "DDP, bf16 hook": MethodLine("all-reduce, AdamW", "ddp-bf16", is_compared=True),
    "SGP": MethodLine("SGP, GossipAdamW", "sgp", is_compared=True),
    "SGP, bfloat16": MethodLine("SGP, bfloat16, GossipAdamW", "sgp-bf16", is_compared=True),
    "Overlap SGP": MethodLine("Overlap SGP, GossipAdamW", "osgp", is_compared=True),
    "Overlap SGP, bfloat16": MethodLine("Overlap SGP, bfloat16, GossipAdamW", "osgp-bf16", is_compared=True),
    "SGP, int8": MethodLine("SGP, int8, GossipAdamW", "sgp-int8"),
    "Overlap SGP, int8": MethodLine("Overlap SGP, int8, GossipAdamW", "osgp-int8"),
    "Overlap SGP, momentum mixed too, int8": MethodLine(
        "Overlap SGP, int8, momentum mixed too, GossipAdamW", "osgp-int8-mixed"
    ),
    "SGP, momentum mixed too": MethodLine("SGP, momentum mixed too, GossipAdamW", "sgp-mixed", is_compared=True),
    "SGP, momentum mixed too, bfloat16": MethodLine(
        "SGP, bfloat16, momentum mixed too, GossipAdamW", "sgp-bf16-mixed", is_compared=True
    ),
    "Overlap SGP, momentum mixed too, bfloat16": MethodLine(
        "Overlap SGP, bfloat16, momentum mixed too, GossipAdamW", "osgp-bf16-mixed", is_compared=True
    ),
    **{
        f"Local SGD, H = {every}, momentum mixed too": MethodLine(
            f"local SGD, H = {every}, momentum mixed too, GossipAdamW", f"local-{every}-mixed"
        )
        for every in (2, 4)
    },
    **{
        f"Local SGD, H = 4, {bits} bits, momentum mixed too": MethodLine(
            f"local SGD, H = 4, {bits} bits, momentum mixed too, GossipAdamW", f"local-4-mixed-{bits}"
        )
        for bits in (4, 8)
    },
    "SGP, auto": MethodLine("", "auto"),
    "SGP, two peers": MethodLine("SGP, 2 peers, GossipAdamW", "sgp-2peers"),
    "SGP, each 8th round exact": MethodLine("SGP, each 8th round exact, GossipAdamW", "sgp-exact"),
    "D-PSGD, ring": MethodLine("D-PSGD ring, GossipAdamW", "dpsgd-ring"),
    "AD-PSGD": MethodLine("AD-PSGD, GossipAdamW", "adpsgd"),
    "Local SGD, H = 10": MethodLine("local SGD, H = 10, GossipAdamW", "LocalSGD(sync_every=10)"),
    "SlowMo, H = 12": MethodLine(
        "SlowMo, H = 12, GossipAdamW", "SlowMo(sync_every=12, gossip_every=1, inner_lr='optimizer')"
    ),
    "DiLoCo, H = 30": MethodLine("DiLoCo, H = 30, GossipAdamW", "DiLoCo(sync_every=30)"),
}
"""By the label. `SGP, auto` is `overlap="auto"` with `wire_dtype="auto"`, and has the loss of what it chooses."""
COMPARED = sorted({line.curve for line in LINES.values() if line.is_compared})
"""The methods of language.csv that all reach the target, where they have been trained."""


def first_step(curve: pd.Series, target: float) -> float:
    """Return the first step at which a curve is at the target, linear between its points; NaN if it never is.

    Args:
        curve: losses by step, ascending. A curve that begins below the target is at it at its first point.

    >>> first_step(pd.Series({100: 3.0, 200: 2.0, 300: 1.0, 400: 1.5}), 1.25)
    275.0
    """
    steps, losses = curve.index.to_numpy(float), curve.to_numpy(float)
    below = np.flatnonzero(losses <= target)
    if not below.size:
        return math.nan
    last = below[0]
    if last == 0:
        return float(steps[0])
    share = (losses[last - 1] - target) / (losses[last - 1] - losses[last])
    return float(steps[last - 1] + share * (steps[last] - steps[last - 1]))


def own_length(ends: pd.Series, target: float) -> float:
    """Return the steps of a training that ends at the target; NaN if the shortest one ends below it, or all above it.

    Args:
        ends: the losses at the end of trainings by their steps, ascending; see [Note: a training of its own length].
        target: a loss.

    >>> round(own_length(pd.Series({30: 4.0, 300: 3.0, 3000: 2.0}), 2.5))
    949
    """
    if ends.iloc[0] < target:
        return math.nan
    return math.exp(first_step(ends.set_axis(np.log(ends.index.to_numpy(float))), target))


def tuned(language: pd.DataFrame) -> pd.Series:
    """Return the rate of each method with the lowest validation loss at the end of `STEPS` steps, of the tuning."""
    own = language[(language["workers"] == WORKERS) & (language["step"] == STEPS) & language["is_tuning"]]
    return own.loc[own.groupby("method")["validation"].idxmin()].set_index("method")["rate"]


def trainings(language: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of trainings of `STEPS` steps at tuned rates, of the seeds that all compared methods have."""
    own = language[(language["workers"] == WORKERS) & (language["steps"] == STEPS) & ~language["is_tuning"]]
    own = own[own["rate"] == own["method"].map(tuned(language))]
    seeds = own[own["step"] == STEPS].groupby("method")["seed"].agg(set)
    return own[own["seed"].isin(set.intersection(*seeds[[method for method in COMPARED if method in seeds]]))]


def curves(language: pd.DataFrame) -> pd.DataFrame:
    """Return the validation losses by step, in the mean over seeds, a column for each method."""
    found = trainings(language).pivot_table(index="step", columns="method", values="validation")
    return found.loc[:, found.loc[STEPS].notna()]


def target(language: pd.DataFrame) -> float:
    """Return the lowest loss at which trainings of all compared methods end."""
    last = curves(language).loc[STEPS]
    return float(last[last.index.isin(COMPARED)].max())


def lengths(language: pd.DataFrame) -> pd.DataFrame:
    """Return the validation losses at the end of trainings by their steps, a column for each method.

    Those of `STEPS` are means over seeds. The others are above them by as much as with the first seed, each at the best
    rate that was tried.
    """
    own = language[(language["workers"] == WORKERS) & (language["seed"] == language["seed"].min())]
    own = own[own["step"] == own["steps"]]
    first = own.pivot_table(index="steps", columns="method", values="validation", aggfunc="min")
    last = curves(language).loc[STEPS]
    return first[last.index] - first.loc[STEPS, last.index] + last


def ends(language: pd.DataFrame) -> pd.DataFrame:
    """Return the test losses after all steps by method: mean, lowest, highest, the number of seeds, and the rate."""
    own = trainings(language)
    groups = own[own["step"] == STEPS].groupby("method")
    return (
        groups["test"].agg(mean="mean", lowest="min", highest="max", seeds="size").assign(rate=groups["rate"].first())
    )


def step_times(cells: pd.DataFrame, hosts: int = WORKERS) -> pd.DataFrame:
    """Return the milliseconds of a step of all ranks together, over repeats; see [Note: slowed time].

    [Note: slowed time] Emulated hosts share the cores of one machine, so that a host has a share cores / hosts of one.
    The cluster is therefore slowed by s = hosts / cores: computation is waited s times as long, and links have an s-th
    of their speed. The times of a step divided by s are those of hosts that have a core each.

    Returns:
        median, low, high and repeats, by method and rate_gbit, the speed of the links that are not slowed.
    """
    own = cells[(cells["hosts"] == hosts) & cells["error"].isna()].astype({"fleet_step_ms": float})
    slowed = own["hosts"] / own["cores"]
    own = own.assign(fleet_step_ms=own["fleet_step_ms"] / slowed, rate_gbit=(own["rate_gbit"] * slowed).round(6))
    each = own.groupby(["method", "rate_gbit", "repeat"])["fleet_step_ms"].first()
    return each.groupby(["method", "rate_gbit"]).agg(median="median", low="min", high="max", repeats="size")


def chosen(cells: pd.DataFrame, rate: float) -> str:
    """Return the label of the settings that the row `auto` has chosen at a rate, in most of its repeats."""
    slowed = cells["hosts"] / cells["cores"]
    own = cells[(cells["method"] == "auto") & np.isclose(cells["rate_gbit"] * slowed, rate) & cells["error"].isna()]
    is_late = own["is_hidden"].astype(bool).mean() > 0.5
    num_bytes = (own["bytes_per_step"].astype(float) / own["num_parameters"].astype(float)).median()
    return f"{'Overlap SGP' if is_late else 'SGP'}{', bfloat16' if num_bytes < 3 else ''}"


def equal_loss(language: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds of each method to the target at each rate of the links.

    Returns:
        label, rate (Gbit/s), ms, first (the first step at which the curve is at the target), steps, seconds, and share
        (of the seconds of the fastest DDP), the last four NaN if no trainings of the method end on both sides of it.
    """
    found, goal, rows = curves(language), target(language), []
    last, times = lengths(language), step_times(cells)
    for rate in sorted(times.index.unique("rate_gbit")):
        for label, line in LINES.items():
            curve = line.curve or LINES[chosen(cells, rate)].curve
            if curve in found and (line.cell, rate) in times.index:
                ms = times.loc[(line.cell, rate), "median"]
                steps = own_length(last[curve].dropna(), goal)
                rows.append((label, rate, ms, first_step(found[curve], goal), steps, steps * ms / 1e3))
    table = pd.DataFrame(rows, columns=["label", "rate", "ms", "first", "steps", "seconds"])
    fastest = table[table["label"].isin(DDP)].groupby("rate")["seconds"].min()
    return table.assign(share=table["seconds"] / table["rate"].map(fastest))

"""The time to a fixed validation loss on the emulated cluster: two CSV files that are multiplied."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from benchmarks.cluster.methods import CLUSTER_METHODS, OTHERS, OURS
from benchmarks.cluster.table import medians
from benchmarks.pages.base import Page
from benchmarks.record import RESULTS

CELLS = "loss_cells.csv"
TARGETS = (2.5, 2.43)
"""Nats per byte. Ranks that do not communicate reach 2.6 first, and below 2.42 only DDP arrives in 320 steps."""
LOSS_OF_A_GUESS = math.log(256)
_CELL = [
    *("hosts", "rate_gbit", "num_parameters", "planned_ms"),
    *("spread", "straggle_chance", "slow_factor", "slow_host", "slow_link_share"),
]
"""The columns that make a column of the tables."""
_STEPS = ["num_steps", "fewest", "most", "final", "learning_rate", "num_seeds"]


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
    seconds = seconds_per_step(cells)
    for target in TARGETS:
        times = markdown(steps_to(steps, target), seconds, target)
        parts += [f"## {target:g} nats per byte", times, "Milliseconds per step, of all ranks together:"]
        parts.append(paces(seconds))
    failed = pd.concat([steps, cells])
    failed = failed[failed["error"].notna()].drop_duplicates(["method", "error"])
    if len(failed):
        parts.append("## Without a result")
        parts.append("\n".join(f"- {row.method}: `{row.error}`" for row in failed.itertuples()))
    return "\n\n".join(parts) + "\n"


def steps_to(trained: pd.DataFrame, target: float) -> pd.DataFrame:
    """How many steps a loss takes: a row per method, at the learning rate that is best at the end with the lowest seed.

    Returns:
        num_steps (inf: not reached) and final (the loss at the end), medians over seeds; fewest and most (of the steps
        of a seed); learning_rate; num_seeds.
    """
    found = {}
    for method, rows in trained.groupby("method", sort=False):
        ends = rows.sort_values("num_steps").groupby(["seed", "learning_rate"])["score"].last().fillna(math.inf)
        tuned = ends[rows["seed"].min()]
        rate = min(tuned.index, key=lambda rate: (tuned[rate], rate))
        seeds = [own for _, own in rows[rows["learning_rate"] == rate].groupby("seed", sort=False)]
        steps = pd.Series([_crossing(own, target) for own in seeds])
        finals = pd.Series([own.sort_values("num_steps")["score"].iloc[-1] for own in seeds])
        found[method] = (steps.median(), steps.min(), steps.max(), finals.median(), rate, len(seeds))
    return pd.DataFrame.from_dict(found, orient="index", columns=_STEPS)


def _crossing(rows: pd.DataFrame, target: float) -> float:
    """The steps at which the loss first reaches the target, between evaluations along a line; inf: it does not."""
    steps, last = 0.0, LOSS_OF_A_GUESS
    for point in rows.sort_values("num_steps").itertuples():
        if point.score <= target:
            return float(steps + (target - last) / (point.score - last) * (point.num_steps - steps))
        steps, last = point.num_steps, point.score
    return math.inf


def seconds_per_step(timed: pd.DataFrame) -> pd.DataFrame:
    """Seconds of all ranks together (see fleet_step_ms of table.py): a row per method, a column per cell."""
    timed = timed.copy()
    timed.loc[timed["straggle_chance"] == 0, "slow_factor"] = 1.0  # without stragglers it says nothing
    columns = {}
    for cell, rows in timed.groupby(_CELL, sort=False):
        columns[_label(dict(zip(_CELL, cell)))] = medians(rows).set_index("method")["fleet_step_ms"] / 1e3
    return pd.DataFrame(columns)


def _label(cell: Mapping[str, float]) -> str:
    """The head of a cell's column."""
    parts = [
        f"{cell['hosts']:.0f} hosts",
        f"{cell['num_parameters'] / 1e6:.3g} M parameters",
        f"{cell['rate_gbit']:g} Gbit/s",
        f"compute {cell['planned_ms']:g} ms",
    ]
    if cell["straggle_chance"]:
        parts.append(f"{100 * cell['straggle_chance']:g} % stragglers {cell['slow_factor']:g} times slower")
    return ", ".join(parts)


def markdown(steps: pd.DataFrame, seconds: pd.DataFrame, target: float) -> str:
    """Methods by the steps they take, then the fastest of ours and of the others in every cell.

    Args:
        steps: of `steps_to`.
        seconds: of `seconds_per_step`.
        target: the loss.
    """
    times = seconds.mul(steps["num_steps"], axis="index").reindex(steps.index)
    lines = [
        "| method | validation loss at the end, nats per byte | learning rate | seeds "
        f"| steps to {target:g} | fewest-most | {' | '.join(times)} |",
        "|---|" + "---:|" * (5 + len(times.columns)),
    ]
    for method, row in steps.sort_values(["num_steps", "final"]).iterrows():
        values = [
            *(_number(row["final"], digits=2), f"{row['learning_rate']:g}"),
            *(_number(row[name]) for name in ("num_seeds", "num_steps")),
            "-".join(dict.fromkeys(_number(row[name]) for name in ("fewest", "most"))),
            *map(_number, times.loc[method]),
        ]
        lines.append(f"| {CLUSTER_METHODS[str(method)].title} | {' | '.join(values)} |")
    for name, methods in (("ours", OURS), ("the others", OTHERS)):
        best = [_fastest(times.loc[times.index.isin(list(methods)), cell]) for cell in times]
        lines.append(f"| fastest of {name} | | | | | | {' | '.join(best)} |")
    return "\n".join(lines)


def paces(seconds: pd.DataFrame) -> str:
    """Milliseconds per step, a row per method, a column per cell."""
    lines = [f"| method | {' | '.join(seconds)} |", "|---|" + "---:|" * len(seconds.columns)]
    lines += [
        f"| {CLUSTER_METHODS[str(method)].title} | {' | '.join(_number(1e3 * value) for value in row)} |"
        for method, row in seconds.sort_values(seconds.columns[0]).iterrows()
    ]
    return "\n".join(lines)


def _fastest(seconds: pd.Series) -> str:
    finite = seconds[seconds < math.inf]
    return f"{CLUSTER_METHODS[str(finite.idxmin())].title} {finite.min():.0f}" if len(finite) else "none"


def _number(value: float, *, digits: int = 0) -> str:
    if pd.isna(value):
        return ""
    return "never" if value == math.inf else f"{value:.{digits}f}"


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
else is below 2.41 after 320 steps, neither of ours nor of the others. DDP alone averages gradients before AdamW
scales them: [the cause of the gap and its remedy](gap.md) were measured later. With a period of four DiLoCo
learns slowly, ours and torchft's alike. At 2.6 nats ranks that do not communicate would be first.""",
        render=time_to_loss,
        also=(CELLS,),
        may_be_missing=True,
        script="benchmarks/cluster/curves.py",
    ),
}

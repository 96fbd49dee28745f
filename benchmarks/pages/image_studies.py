"""Pages of the studies of `benchmarks.studies.images`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from typing import Any

import pandas as pd

from benchmarks.claims.images import every_study, gaps, measured, with_spread
from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.headline import EXACT, rows_of
from benchmarks.pages.markdown import table
from benchmarks.pages.study_tables import all_rows, ends, has_trainings, study_page, together, trainings

SETUP = """\
This is [a study in the Lab](index.md#studies-in-the-lab) with {task}, in batches of {batch}. {more}"""
LEVEL = "Images have 16 pixels and networks about 22,000 parameters, so read the gaps and not the level."
"""How a reader takes the accuracies of CIFAR-10 in these studies."""
ENDS = {
    "method": ("method", "s"),
    "seeds": ("seeds", "d"),
    "accuracy": ("accuracy, %", ".1f"),
    "lowest": ("lowest", ".1f"),
    "highest": ("highest", ".1f"),
    "gap": ("points below", "+.2f"),
}


def beside(gap: float, other: str) -> str:
    """Return a gap in words."""
    points = f"{abs(gap):.2f}"
    return f"level with {other}" if points == "0.00" else f"{points} points {'below' if gap > 0 else 'above'} {other}"


def of(found: pd.DataFrame, method: str) -> pd.Series:
    """Return the row of a method."""
    return found.set_index("method").loc[method]


def within(gap: float, limit: float) -> bool:
    """Return whether a gap is at most a limit, before rounding."""
    return gap <= limit + EXACT


# Accuracy against bytes.


def bytes_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `ends` beside D-PSGD, with the ratio of bytes."""
    found = ends(rows, "D-PSGD")
    return found.assign(ratio=of(found, "D-PSGD")["megabytes"] / found["megabytes"])


def bytes_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    found = bytes_ends(rows)
    power, ring = of(found, "PowerGossip, rank 1"), of(found, "D-PSGD")
    text = (
        f"**PowerGossip with rank 1 ends {beside(power['gap'], 'D-PSGD')} and sends {power['ratio']:.0f} times fewer "
        f"bytes.** D-PSGD reaches {ring['accuracy']:.1f} % on a ring of 8 in {rows['steps'].max():,} steps."
    )
    others = found[~found["method"].isin(["D-PSGD", "PowerGossip, rank 1"])]
    near = [f"{row.method} ({row.ratio:.1f} times fewer bytes)" for row in others.itertuples() if within(row.gap, 0.5)]
    return f"{text} Within half a point of D-PSGD, or above it, are {together(near)}." if near else text


def bytes_summary(rows: pd.DataFrame) -> str:
    """Write the table of methods."""
    columns = {**ENDS, "megabytes": ("MB sent by a worker", ",.0f"), "ratio": ("times fewer bytes", ".1f")}
    return table(bytes_ends(rows), columns)


# Numbers of workers.

NUMBERS_BATCH = 8
"""The images of a worker in a step."""


def numbers_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    found = gaps(trainings(rows).assign(batch=NUMBERS_BATCH))
    own = found[(found["workers"] == 16) & (found["method"] != "all-reduce")]
    near = [row.method for row in own.itertuples() if within(row.gap, 1.0)]
    text = (
        f"**With 16 workers {len(near)} of {len(own)} methods end at most one point below all-reduce.** {LEVEL} "
        f"All workers together read {_samples(rows):,} images."
    )
    sgp = found[found["method"] == "SGP"].sort_values("workers")
    means = [f"{row.gap:.1f} with {row.workers}" for row in sgp.itertuples()]
    text = f"{text} SGP ends so many points below it: {together(means)} workers."
    if unsure := [str(row.workers) for row in sgp.itertuples() if row.lowest <= EXACT]:
        text += f" With {together(unsure)} workers not every seed is below it."
    return text


def _samples(rows: pd.DataFrame) -> int:
    last = trainings(rows).iloc[0]
    return int(last["workers"] * last["steps"] * NUMBERS_BATCH)


def numbers_summary(rows: pd.DataFrame) -> str:
    """Write the gaps to all-reduce, a column for each number of workers, and the table of all studies of images."""
    found = gaps(trainings(rows).assign(batch=NUMBERS_BATCH))
    found["text"] = found.apply(with_spread, axis=1)
    base = found["method"] == "all-reduce"
    found.loc[base, "text"] = found.loc[base, "accuracy"].map("{:.1f} %".format)
    cells = found.pivot(index="method", columns="workers", values="text")
    order = found[found["workers"] == 16].set_index("method")["gap"].reindex(cells.index).sort_values().index
    first = ["all-reduce", *order.drop("all-reduce")]
    columns = {"method": ("method", "s"), **{n: (f"{n} workers", "s") for n in cells}}
    tables = {name: rows_of(f"{name}.csv") for name in measured()}
    return "\n\n".join([table(cells.loc[first].reset_index(), columns), ALL_STUDIES, every_study(tables), COLUMNS])


ALL_STUDIES = """\
## All studies of images { #images }

Gaps differ with the model, the batch and the number of images. Momentum is 0.9. ResNet-20 has images of 32 pixels, the
others of 16."""
COLUMNS = """\
Both tables have points below all-reduce with the same seed: the mean, the lowest and the highest."""


# Stragglers.

COMPUTE = 0.6 + 0.32 * 2 / 64
"""Seconds of computation in a step, mean over workers and steps."""


def late_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `ends` beside all-reduce, with the time of a worker's step, and the time until the target accuracy.

    A worker computes or waits, so the time of its step is the mean time of computation over the share of computation.
    """
    found, target = ends(rows, "all-reduce"), late_target(rows)
    curves = rows[~rows["is_tuning"] & (100 - rows["test"] >= target - EXACT)]
    reached = curves.groupby(["method", "seed"])["seconds"].min().groupby("method").agg(["mean", "count"])
    seeds = found.set_index("method")["seeds"].reindex(reached.index)
    first = reached["mean"].where(reached["count"] == seeds)  # NaN unless all seeds have
    step = found["method"].map(COMPUTE / (1 - trainings(rows).groupby("method")["waiting"].mean()))
    return found.assign(step=step, own=found["seconds"] / step, reached=found["method"].map(first))


def late_target(rows: pd.DataFrame) -> float:
    """Return the target accuracy: two points below all-reduce at the end."""
    return float(of(ends(rows, "all-reduce"), "all-reduce")["accuracy"]) - 2


def late_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    found = late_ends(rows)
    wagma, base, sgp = (of(found, name) for name in ("WAGMA-SGD", "all-reduce", "SGP, 2 peers"))
    text = (
        f"**A step takes {wagma['step']:.2f} s with WAGMA-SGD, {base['step'] / wagma['step']:.2f} times as long with "
        f"all-reduce, and {sgp['step'] / wagma['step']:.2f} times with SGP with two peers.**"
    )
    fastest = found.dropna(subset="reached").sort_values("reached")
    first = fastest.iloc[0]
    return (
        f"{text} {first['method']} is the first to reach {late_target(rows):.1f} %, after {first['reached']:.0f} s; "
        f"all-reduce needs {base['reached']:.0f} s."
    )


def late_summary(rows: pd.DataFrame) -> str:
    """Write the table of methods."""
    head = f"s to {late_target(rows):.1f} %"
    return table(
        late_ends(rows),
        {**ENDS, "step": ("s per step", ".3f"), "own": ("steps of a worker", ".0f"), "reached": (head, ".0f")},
    )


# MATCHA.


def matcha_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Return graph, budget, accuracy, the time of a step and of the target accuracy for each method.

    The target of a graph and seed is one point below budget 1 at the end.
    """
    last = trainings(rows)
    names = last["method"].str.extract(r"graph (?P<graph>\d), budget (?P<budget>[\d.]+)").astype(float)
    last = last.assign(graph=names["graph"].astype(int), budget=names["budget"])
    found = []
    whole = last[last["budget"] == 1].set_index(["graph", "seed"])["accuracy"].to_dict()
    has_target = [(graph, seed) in whole for graph, seed in zip(last["graph"], last["seed"])]
    for (graph, budget), own in last[has_target].groupby(["graph", "budget"]):
        curve = rows[rows["method"] == own["method"].iloc[0]]
        targets = curve["seed"].map({seed: found for (index, seed), found in whole.items() if index == graph}) - 1
        reached = curve[100 - curve["test"] >= targets - EXACT].groupby("seed")[["seconds", "step"]].min()
        first = reached.mean() if len(reached) == len(own) else {"step": math.nan, "seconds": math.nan}
        step = (own["seconds"] / own["steps"]).mean()
        found.append((graph, budget, len(own), own["accuracy"].mean(), step, first["step"], first["seconds"]))
    names_ = ["graph", "budget", "seeds", "accuracy", "s_step", "steps_to", "seconds_to"]
    return pd.DataFrame(found, columns=names_)


def fastest(found: pd.DataFrame) -> pd.DataFrame:
    """Return for each graph the budget with the least time, and how much less it is than that of budget 1."""
    reached = found.dropna(subset="seconds_to")
    best = reached.loc[reached.groupby("graph")["seconds_to"].idxmin()].set_index("graph")
    whole = found[found["budget"] == 1].set_index("graph")["seconds_to"]
    return best.assign(factor=whole / best["seconds_to"]).reset_index()


def matcha_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    best = fastest(matcha_ends(rows))["factor"]
    return (
        f"**To one point below the accuracy with all links, the best budget of MATCHA is {best.min():.1f} to "
        f"{best.max():.1f} times as fast.**"
    )


def matcha_summary(rows: pd.DataFrame) -> str:
    """Write the table of graphs and budgets."""
    columns = {
        "graph": ("graph", "d"),
        "budget": ("budget", "g"),
        "seeds": ("seeds", "d"),
        "accuracy": ("accuracy, %", ".1f"),
        "s_step": ("s per step", ".3f"),
        "steps_to": ("steps to the target", ",.0f"),
        "seconds_to": ("s to the target", ".0f"),
        "factor": ("times as fast", ".1f"),
    }
    found = matcha_ends(rows)
    whole = found[found["budget"] == 1].set_index("graph")["seconds_to"]
    return table(found.assign(factor=found["graph"].map(whole) / found["seconds_to"]), columns)


PLANNED = {"accuracy_bytes": 33, "worker_numbers": 156, "straggler_accuracy": 18, "matcha_time": 90}
"""The numbers of trainings of the studies."""
NEEDED: Mapping[str, Set[tuple[str, int]]] = {
    "accuracy_bytes": {("D-PSGD", 8), ("PowerGossip, rank 1", 8), ("MATCHA, budget 0.5", 8)},
    "worker_numbers": {("all-reduce", 16), ("SGP", 16)},
    "straggler_accuracy": {("all-reduce", 64), ("WAGMA-SGD", 64), ("SGP, 2 peers", 64)},
    "matcha_time": {("graph 0, budget 1", 8)},
}
"""Methods and numbers of workers without which a study has no page."""


def ends_of_all(rows: pd.DataFrame) -> str:
    """Write the end of each training, and the grid of rates."""
    columns = {
        "accuracy": ("accuracy, %", ".2f"),
        "consensus": ("distance", ".3g"),
        "megabytes": ("MB sent", ".1f"),
        "seconds": ("seconds", ".1f"),
        "cpu_seconds": ("CPU s", ".0f"),
    }
    return all_rows(rows, columns, "Validation errors in percent", ".1f")


def image_page(
    name: str,
    title: str,
    said: Callable[[pd.DataFrame], str],
    summary: Callable[[pd.DataFrame], str],
    question: str,
    also: tuple[str, ...] = (),
    **setup: Any,
) -> dict[str, Page]:
    """Return `study_page` of a study of images.

    Args:
        name, title, said: see `study_page`.
        summary, question, also: see `Page`.
        setup: the fields of SETUP.
    """
    return study_page(
        name,
        title,
        said,
        has_trainings(*NEEDED[name]),
        planned=PLANNED[name],
        render=ends_of_all,
        summary=summary,
        setup=SETUP.format(**setup),
        question=question,
        also=also,
    )


def pages() -> dict[str, Page]:
    """Return the pages of the studies with enough rows, by name."""
    return {
        **image_page(
            "accuracy_bytes",
            "Accuracy against bytes on a ring of 8",
            bytes_said,
            bytes_summary,
            QUESTIONS[0],
            task="CIFAR-10 and 22,154 parameters, without normalisation",
            batch=8,
            more="""\
Points below are those below D-PSGD. CHOCO and DeepSqueeze have the published step sizes for a ring of 8. SGP has its
own graph.""",
        ),
        **image_page(
            "worker_numbers",
            "How accurate? Images by 4 to 32 workers, even and uneven data",
            numbers_said,
            numbers_summary,
            QUESTIONS[0],
            also=tuple(f"{name}.csv" for name in measured() if name != "worker_numbers"),
            task="CIFAR-10 and 22,282 parameters, with batch normalisation after each convolution",
            batch=NUMBERS_BATCH,
            more="""\
All steps take equal times. Methods in lockstep mix the running statistics as
they mix the models.""",
        ),
        **image_page(
            "straggler_accuracy",
            "Time to accuracy with two late workers of 64",
            late_said,
            late_summary,
            QUESTIONS[1],
            task="drawn digits",
            batch=2,
            more="""\
As in the paper of WAGMA-SGD, two random workers of 64 compute 320 ms longer in each step, and the others for 0.6 s.
Times are those of a ResNet-50, 25.6 M parameters, on links of 80 Gbit/s. The time of a step is the mean time of
computation, 0.61 s, over the share of its time in which a worker computes. All methods train for 240 steps: rounds of
WAGMA-SGD, of which a late worker may skip some, and ticks of 0.6 s with AD-PSGD and dpwa. The target is two points
below all-reduce at the end.""",
        ),
        **image_page(
            "matcha_time",
            "MATCHA against time on its six graphs",
            matcha_said,
            matcha_summary,
            QUESTIONS[1],
            task="drawn digits",
            batch=2,
            more="""\
The rate is 0.1 for all. Graphs are those of `select_graph`; graphs 0 and 5 have 8 workers, the others 16. Budget 1 uses
all links in each round, with MATCHA's weights. Times are those of 14.7 M parameters, 100 ms of computation and links of
5 Gbit/s. The target of a graph is one point below the accuracy of budget 1.""",
        ),
    }


IMAGE_STUDIES: Mapping[str, Page] = pages()

"""The page of the study of HALoS's regions, and its row of the page Reproduction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.headline import IN_PART, NO, YES, Headline, by_ratio, rows_of
from benchmarks.pages.markdown import grid, table
from benchmarks.pages.study_tables import all_rows, has_trainings, study_page, trainings

CSV, WORKERS, PLANNED = "regions.csv", 16, 12
ORDER = ("HALoS", "async local SGD", "DiLoCo, DyLU", "DiLoCo")
"""The published order, from the shortest time to the longest."""
PUBLISHED = {"DiLoCo": 7.5, "async local SGD": 2.1}
"""The time to a loss over that of HALoS, up to."""


def curves(rows: pd.DataFrame) -> pd.DataFrame:
    """Return seconds and test loss by method and step, in the mean over the seeds that all methods have."""
    last = trainings(rows)
    seeds = last.groupby("seed")["method"].nunique()
    own = rows[~rows["is_tuning"] & rows["seed"].isin(seeds.index[seeds == len(ORDER)])]
    return own.groupby(["method", "step"])[["seconds", "test", "megabytes", "waiting"]].mean()


def reached(curve: pd.DataFrame, loss: float) -> float:
    """Return the time at which a curve is at a loss for the first time, between its points; NaN: it never is."""
    at = (curve["test"] <= loss).to_numpy()
    if not at.any():
        return math.nan
    k, seconds, test = int(at.argmax()), curve["seconds"].to_numpy(), curve["test"].to_numpy()
    if k == 0:
        return float(seconds[0])
    share = (test[k - 1] - loss) / (test[k - 1] - test[k])
    return float(seconds[k - 1] + share * (seconds[k] - seconds[k - 1]))


def region_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the ends of the methods in the published order, and the time to the highest loss at an end.

    Returns:
        By method: rate, seeds, loss, lowest, highest, step (seconds), waiting (percent), gigabytes between regions,
        seconds (to the loss), ratio (of seconds to those of HALoS).
    """
    found, last = curves(rows), trainings(rows)
    ends = found.groupby("method").last().loc[list(ORDER)]
    own = last.groupby("method")
    spread = own["test"].agg(["count", "min", "max"]).loc[list(ORDER)]
    target, steps = ends["test"].max(), last["steps"].iloc[0]
    ends["rate"], ends["seeds"], ends["lowest"], ends["highest"] = own["rate"].first(), *(spread[x] for x in spread)
    seconds = pd.Series({name: reached(found.loc[name], target) for name in ORDER})
    return ends.assign(
        loss=ends["test"],
        step=ends["seconds"] / steps,
        waiting=100 * ends["waiting"],
        gigabytes=WORKERS * ends["megabytes"] / 1e3,
        seconds=seconds,
        ratio=seconds / seconds["HALoS"],
    )


def region_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    found = region_ends(rows)
    own, equal = found["ratio"], found["loss"]
    times = [f"{name} {found['seconds'][name]:,.0f} s" for name in ORDER]
    is_order = list(own.sort_values().index) == list(ORDER)
    order = "as published" if is_order else f"not the published one, {', '.join(ORDER)}"
    return (
        f"**To {equal.max():.2f} nats per byte {', '.join(times[:-1])} and {times[-1]} of simulated time are needed.** "
        f"The order is {order}. DiLoCo takes {own['DiLoCo']:.1f} times as long as HALoS, and asynchronous local SGD "
        f"{own['async local SGD']:.1f} times; the paper says up to 7.5 and 2.1 times. With equal data HALoS ends at "
        f"{equal['HALoS']:.2f}, asynchronous local SGD at {equal['async local SGD']:.2f} and DiLoCo at "
        f"{equal['DiLoCo']:.2f}: time decides, as a step takes {found['step']['HALoS']:.2f} s with HALoS and "
        f"{found['step']['DiLoCo']:.2f} s with DiLoCo."
    )


def region_summary(rows: pd.DataFrame) -> str:
    """Write the table of methods, and the times to several losses."""
    found, all_curves = region_ends(rows), curves(rows)
    columns = {
        "method": ("method", "s"),
        "rate": ("rate", "g"),
        "seeds": ("seeds", "d"),
        "loss": ("nats per byte", ".3f"),
        "lowest": ("lowest", ".3f"),
        "highest": ("highest", ".3f"),
        "step": ("s per step", ".2f"),
        "waiting": ("waiting, %", ".0f"),
        "gigabytes": ("GB between regions", ",.0f"),
        "seconds": (f"s to {found['loss'].max():.2f}", ",.0f"),
        "ratio": ("times HALoS", ".2f"),
    }
    low, high = found["loss"].min(), all_curves.groupby("method")["test"].first().min()
    losses = [round(high - (high - low) * k / 5, 2) for k in range(6)]
    times = [
        {"method": name, "loss": loss, "seconds": reached(all_curves.loc[name], loss)}
        for name in ORDER
        for loss in losses
    ]
    return "\n\n".join(
        [
            table(found.reset_index(), columns),
            "Seconds until the loss is so many nats per byte for the first time; empty if it never is:",
            grid(pd.DataFrame(times), ("method", "method"), "loss", "seconds", ",.0f", "{:.2f}"),
        ]
    )


def region_rows(rows: pd.DataFrame) -> str:
    """Write the end of each training, and the grid of rates."""
    columns = {
        "validation": ("validation", ".3f"),
        "test": ("test", ".3f"),
        "seconds": ("seconds", ",.0f"),
        "cpu_seconds": ("CPU s", ".0f"),
    }
    return all_rows(rows, columns, "Validation losses", ".3f")


def halos_headline() -> tuple[str, str]:
    """The order of the times to a loss, and their ratios to the time of HALoS."""
    own = region_ends(rows_of(CSV))["ratio"]
    text = ", ".join(f"{name} {own[name]:.1f}" for name in ORDER[1:])
    sizes = min((by_ratio(own[name], ratio) for name, ratio in PUBLISHED.items()), key=[NO, IN_PART, YES].index)
    is_order = list(own.sort_values().index) == list(ORDER)
    return f"times as long as HALoS: {text}", sizes if is_order else IN_PART if own.idxmin() == "HALoS" else NO


SETUP = """\
16 workers of unequal speed are in four regions. Links have 0.117 to 0.935 Gbit/s between regions, and 100 inside.
Speeds, links and settings are those of [the authors' simulator](https://github.com/utnslab/halos). So are the bytes of
Pythia-70M, and its step of 238 ms on the fastest worker. The clock of the [Lab](../guides/lab.md) computes the times. A
decoder of one layer with 12,288 parameters learns the characters of the sources of Python's standard library, from four
sequences of 32 characters in a step of a worker. The authors trained six times as many steps.

- DiLoCo: H = 32, outer rate 0.7, momentum 0.9; all workers wait for the slowest one and for an all-reduce along a ring.
- DyLU: a worker takes steps in proportion to its speed, at most H. The two methods below do so too.
- Async local SGD: H = 32. Workers push their drifts to one server in the first region, which takes Delayed Nesterov
  steps: rate 0.05 for each push, momentum 0.9, N = 32.
- HALoS: H = 8. Workers push to the server of their region (rate 0.2, momentum 0.9, N = 16). After 32 pushes its drift
  goes to a global server (0.15, 0.5, N = 2), whose model comes back and is merged with a share of 0.25.

A training ends after {steps:,} steps of a worker in the mean over workers, so all methods read equal data. The learning
rate of AdamW rises in the first twentieth of the steps, and falls by a cosine to a tenth. Its highest value is tuned
for each method alike in trainings of a quarter of the steps on the validation split, with the first seed. The loss is
that of the model of the (global) server on the test split. Times are those of the mean curve over seeds, between its 32
points. Bytes between regions count all messages of servers and workers."""

REGION_STUDY: Mapping[str, Page] = study_page(
    "regions",
    "Time to a loss in HALoS's four regions",
    region_said,
    has_trainings(*((name, WORKERS) for name in ORDER)),
    planned=PLANNED,
    render=region_rows,
    summary=region_summary,
    setup=SETUP.format(steps=1024),
    measures=("gossip_modules/lab", "gossip_modules/optim"),
    question=QUESTIONS[1],
)

REGION_HEADLINES: Sequence[Headline] = (
    Headline(
        "HALoS",
        "time to a loss in the order HALoS, async local SGD, DiLoCo with DyLU, DiLoCo; DiLoCo takes up to 7.5 times as "
        "long as HALoS, async local SGD 2.1 times",
        "decoder of 12,288 parameters, the authors' regions by the Lab's clock",
        (CSV,),
        "regions",
        halos_headline,
    ),
)

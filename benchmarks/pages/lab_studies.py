"""The page of the Lab with many workers: their trainings, the predictions of its clock, and its processor time."""

from __future__ import annotations

import pandas as pd

from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.headline import rows_of
from benchmarks.pages.language_studies import language_rows
from benchmarks.pages.markdown import table
from benchmarks.pages.study_tables import progress, together, trainings
from gossip_modules.methods import METHODS

PLANNED = 6
"""Trainings of the study `many_workers`."""
_SIMULATED = {
    "method": ("method", "s"),
    "steps": ("steps", "d"),
    "step_seconds": ("s per step", ".3f"),
    "seconds": ("s to target", ".1f"),
    "rank_megabytes": ("MB per worker", ",d"),
    "waiting_percent": ("waiting, %", "d"),
    "disagreement": ("disagreement", ".3f"),
    "agreed": ("agree", "s"),
}


def many_said(rows: pd.DataFrame) -> str:
    """Return the time of the largest training by SGP, and its loss beside all-reduce, in words."""
    last = trainings(rows).set_index(["workers", "method"])
    most = int(rows["workers"].max())
    sgp, base = last.loc[most, "SGP"], last.loc[most, "all-reduce"]
    return (
        f"**{most:,} workers train {sgp['steps']:,} steps by SGP in {sgp['cpu_seconds'] / 60:.0f} minutes of one "
        f"core.** SGP ends at {sgp['test']:.2f} nats per byte and all-reduce at {base['test']:.2f}."
    )


def many_summary(rows: pd.DataFrame) -> str:
    """Write the table of trainings."""
    columns = {
        "workers": ("workers", ",d"),
        "method": ("method", "s"),
        "test": ("nats per byte", ".3f"),
        "consensus": ("distance", ".3g"),
        "cpu_seconds": ("CPU s", ".0f"),
        "each": ("CPU ms of a worker's step", ".2f"),
    }
    last = trainings(rows)
    return table(last.assign(each=1000 * last["cpu_seconds"] / last["workers"] / last["steps"]), columns)


def simulated_said(rows: pd.DataFrame) -> str:
    """Return the order of a few methods by the Lab, in words."""
    seconds = rows.set_index("recipe")["seconds"]
    first = METHODS[seconds.idxmin()].title
    later = [METHODS[name].title for name in seconds[seconds > seconds["ar"]].index]
    return (
        f"**At 1 Gbit/s the Lab puts {first} first, with {seconds.min():.1f} s to the target.** Local SGD takes "
        f"{seconds['localsgd']:.1f} s, SGP {seconds['sgp']:.0f} s, Overlap SGP {seconds['osgp']:.0f} s and all-reduce "
        f"{seconds['ar']:.0f} s. Later than all-reduce: {together(later)}. It does not know your loss: in "
        "[a language model](outer_language.md) local SGD and DiLoCo end above all-reduce."
    )


def simulated(rows: pd.DataFrame) -> str:
    """Write all methods, the fastest first; those that did not reach the target come last."""
    return table(rows.sort_values("seconds", kind="stable"), _SIMULATED)


def lab_said(rows: pd.DataFrame) -> str:
    """Return the processor time of a worker and step, in words."""
    turns = rows.pivot(index="turn", columns="by", values="milliseconds")
    first = rows.iloc[0]
    return (
        f"**A loop over the workers takes {(turns['loop'] / turns['vmap']).median():.1f} times the processor time of "
        f"`torch.func.vmap`, in the median over {len(turns)} turns.** {first['workers']} decoders of "
        f"{first['parameters']:,} parameters take {turns['vmap'].median():.2f} ms per worker and step by vmap."
    )


def lab_page() -> Page:
    """Return the page; its main table is the study `many_workers`."""
    many, predicted, cost = (rows_of(f"{name}.csv") for name in ("many_workers", "simulator", "lab"))
    text = many_said(many)
    return Page(
        "The Lab with 1,024 workers",
        "many_workers.csv",
        f"{text} {progress(many, PLANNED)}".rstrip(),
        measures=("gossip_modules/lab", "gossip_modules/rounds"),
        render=language_rows,
        summary=many_summary,
        setup="""\
The decoder, the text and AdamW are those of [the study of outer methods](outer_language.md#setup). A worker reads one
sequence of 32 characters in a step. The highest rate is 0.016. How near the clock is to an emulated cluster is on
[compute utilisation](utilisation.md).""",
        parts=(
            Page(
                "Prediction of each method for 1,024 workers",
                "simulator.csv",
                simulated_said(predicted),
                measures=("gossip_modules/algorithms", "gossip_modules/lab", "gossip_modules/rounds"),
                render=simulated,
                setup="""\
1,024 workers train 25 million parameters with 250 ms of compute per step, on links of 1 Gbit/s. This command computes
all methods, with advice: `python -m gossip_modules.lab --world-size 1024 --network "1 Gbit/s" --parameters 25e6
--compute 0.25`. An empty cell means that the target was not reached in 320 steps. Disagreement is the relative
difference between models; methods whose workers do not agree are not advised. [Which
method?](../choosing.md#ask-the-lab) says how to read the table.""",
            ),
            Page(
                "Processor time by vmap and in a loop",
                "lab.csv",
                lab_said(cost),
                {
                    "by": ("losses by", "s"),
                    "turn": ("turn", "d"),
                    "workers": ("workers", "d"),
                    "parameters": ("parameters", ",d"),
                    "milliseconds": ("CPU ms per worker and step", ".2f"),
                },
                measures=("gossip_modules/lab", "gossip_modules/rounds"),
                setup="""\
The workers train by SGP with AdamW, in one process on one core, and read eight sequences of 32 characters in a step.
The machine was busy with other work, so compare the two ways and not the milliseconds. See [the
Lab](../guides/lab.md).""",
            ),
        ),
        question=QUESTIONS[4],
        result=text.partition("**")[2].partition("**")[0],
    )

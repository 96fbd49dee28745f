"""Pages of studies that repeat an experiment of a paper: groups of WAGMA, gossip and all-reduce, power iterations."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.headline import EXACT
from benchmarks.pages.image_studies import ENDS, SETUP, ends_of_all, of
from benchmarks.pages.study_tables import has, has_trainings, study_page
from benchmarks.record import RESULTS, rows_of
from benchmarks.studies.ends import ends, trainings
from benchmarks.tables import table

SIZE = 8
"""The size of groups that WAGMA's paper recommends for 64 workers."""
IMAGES = "wagma_ablations_images.csv"


# WAGMA-SGD's ablations.


def ablation_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `ends` beside changing groups of `SIZE`."""
    return ends(rows, f"groups of {SIZE}")


def ablations_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    texts = []
    for name, own in (("drawn digits", rows), ("CIFAR-10", rows_of(IMAGES))):
        found = ablation_ends(own)
        fixed, none = (of(found, method)["gap"] for method in (f"fixed groups of {SIZE}", "no groups"))
        texts.append(f"{fixed:+.2f} and {none:+.2f} on {name}")
    return f"**Points below changing groups of {SIZE}: fixed groups and no groups {', '.join(texts)}.**"


def ablations_summary(rows: pd.DataFrame) -> str:
    """Write the table of groups."""
    columns = {
        **ENDS,
        "rate": ("rate", "g"),
        "seconds": ("seconds", ".0f"),
        "megabytes": ("MB sent by a worker", ",.0f"),
    }
    return table(ablation_ends(rows), columns)


# Gossip and all-reduce.


def times_to_target(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds to two points below all-reduce at the end, by the number of workers and method.

    It is the mean over seeds, and NaN unless all seeds reach the target of their number of workers.
    """
    target = ends(rows, "all-reduce").query("method == 'all-reduce'").set_index("workers")["accuracy"] - 2
    curves = rows[~rows["is_tuning"]]
    reached = curves[100 - curves["test"] >= curves["workers"].map(target) - EXACT]
    key = ["workers", "method"]
    first = reached.groupby([*key, "seed"])["seconds"].min().groupby(key).agg(["mean", "count"])
    seeds = trainings(rows).groupby(key)["seed"].nunique()
    return first["mean"].where(first["count"] == seeds.reindex(first.index)).unstack()


def crossover_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    times = times_to_target(rows)
    texts = [f"{row['dpwa']:.0f} and {row['all-reduce']:.0f} s with {workers}" for workers, row in times.iterrows()]
    return (
        f"**To two points below all-reduce at the end, dpwa and all-reduce take {', '.join(texts)} workers.** "
        + ("nan: not all seeds get there. " if times.isna().any(axis=None) else "")
        + "All numbers of workers learn from 32,000 images."
    )


def crossover_summary(rows: pd.DataFrame) -> str:
    """Write the table of methods and numbers of workers."""
    found, times = ends(rows, "all-reduce"), times_to_target(rows).stack()
    reached = [times.get((row.workers, row.method)) for row in found.itertuples()]
    columns = {
        "workers": ("workers", "d"),
        **ENDS,
        "seconds": ("seconds", ".0f"),
        "reached": ("s to the target", ".1f"),
    }
    return table(found.assign(reached=reached), columns)


# PowerGossip.


def iterations_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    found = rows.groupby(["rank", "iterations"])[["rounds", "megabits"]].mean()
    one, many = found.loc[1, 1], found.loc[1, 32]
    return (
        f"**With 32 power iterations in a round PowerGossip agrees in {many['rounds']:.0f} rounds and "
        f"{many['megabits']:.2f} Mbit, and with one in {one['rounds']:.0f} rounds and {one['megabits']:.2f} Mbit.**"
    )


def iterations_summary(rows: pd.DataFrame) -> str:
    """Write the table of ranks and iterations."""
    found = rows.groupby(["rank", "iterations"])
    means = found[["rounds", "megabits", "last_error"]].mean().assign(seeds=found["run_seed"].nunique()).reset_index()
    columns = {
        "rank": ("rank", "d"),
        "iterations": ("iterations in a round", "d"),
        "seeds": ("seeds", "d"),
        "rounds": ("rounds to 1 %", ".0f"),
        "megabits": ("Mbit", ".2f"),
        "last_error": ("error at the end", ".2g"),
    }
    return table(means, columns)


_SIZES = [(f"groups of {size}", 64) for size in (4, SIZE, 64)]
_NEEDED = (*_SIZES, (f"fixed groups of {SIZE}", 64), ("no groups", 64))


def pages() -> Mapping[str, Page]:
    """Return the pages of the studies with enough rows, by name."""
    has_images = (RESULTS / IMAGES).is_file() and has_trainings(*_NEEDED)(rows_of(IMAGES))
    measures = ("gossip_modules/lab", "gossip_modules/rounds", "gossip_modules/graph_manager")
    ablation = study_page(
        "wagma_ablations",
        "Groups of WAGMA-SGD: sizes, fixed groups, and none",
        ablations_said,
        lambda rows: has_images and has_trainings(*_NEEDED)(rows),
        planned=21,
        render=ends_of_all,
        summary=ablations_summary,
        setup=SETUP.format(
            task="drawn digits",
            batch=2,
            more="""\
Workers, late workers, times and steps are those of [time to accuracy with two late
workers](stragglers.md#straggler_accuracy). Points below are those below groups of 8 that change in each round. "No
groups" averages over all workers every ten steps, as all do.""",
        ),
        measures=measures,
        question=QUESTIONS[0],
        parts=(
            Page(
                "The groups with CIFAR-10",
                IMAGES,
                "The task is that of [accuracy with 4 to 32 workers](worker_numbers.md#setup), in 250 steps.",
                render=ends_of_all,
                summary=ablations_summary,
                measures=measures,
            ),
        ),
    )
    return {
        **ablation,
        **study_page(
            "crossover",
            "Asynchronous gossip and all-reduce with 8 to 100 workers",
            crossover_said,
            has_trainings(*((name, n) for name in ("all-reduce", "dpwa") for n in (8, 32, 100))),
            planned=18,
            render=ends_of_all,
            summary=crossover_summary,
            setup=SETUP.format(
                task="drawn digits",
                batch=2,
                more="""\
A step computes for 0.2 s, with a spread of a tenth. Times are those of 11.7 M parameters on links of 10 Gbit/s.""",
            ),
            measures=measures,
            question=QUESTIONS[1],
        ),
        **study_page(
            "power_iterations",
            "Power iterations of PowerGossip in a round",
            iterations_said,
            has(("rank", "iterations"), (1, 1), (1, 32), (8, 4)),
            summary=iterations_summary,
            setup="""\
The experiment is [agreement by all compressors](compression.md#consensus_codes), at the best step size of plain gossip.
A run ends after 800 iterations. Rank 1 with 32 iterations and those below it send equal messages.""",
            measures=("gossip_modules/algorithms", "gossip_modules/rounds"),
            question=QUESTIONS[3],
            columns={
                "rank": ("rank", "d"),
                "iterations": ("iterations", "d"),
                "run_seed": ("seed", "d"),
                "step_size": ("step size", ".4g"),
                "rounds": ("rounds to 1 %", ".0f"),
                "megabits": ("Mbit", ".3f"),
                "last_error": ("error at the end", ".2g"),
            },
        ),
    }


PAPER_STUDIES: Mapping[str, Page] = pages()
"""The pages of the studies that have rows."""

"""The pages of the studies of `benchmarks.studies.outer_steps`, and their rows of the page Reproduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.claims.outer import ADAPTERS, ALL, AVERAGES, BASE, DILOCO, short_ends, with_parts
from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.headline import IN_PART, NO, YES, Headline, by_limit, rows_of
from benchmarks.pages.language_studies import language_ends, language_rows, language_summary, of
from benchmarks.pages.markdown import grid, table
from benchmarks.pages.study_tables import has_trainings, study_page, together, trainings

LONG, SHORT = "outer_long.csv", "outer_short.csv"
LONG_PLANNED, SHORT_TRAININGS = 57, 192
"""Trainings of all seeds, methods and, in short training, rates."""
THEIRS: Mapping[tuple[str, int], float] = {(DILOCO, 2): 9.9, (DILOCO, 4): 11.3, (AVERAGES, 2): 0.6}
"""Per cent above synchronous training that yeto publishes, by method and workers."""
YETO = "[yeto](https://github.com/agentenv/yeto/blob/main/docs/BENCHMARK_RESULTS.md)"


# Long training.


def most_workers(rows: pd.DataFrame) -> int:
    """Return the largest number of workers for which the methods of the claim have ended."""
    return max(n for n in set(trainings(rows)["workers"]) if is_measured(n)(rows))


def is_measured(workers: int) -> Any:
    """Return a rule: the methods that DiLoCo's claim is about have ended with so many workers."""
    return has_trainings(*((name, workers) for name in (BASE, DILOCO, "local SGD")))


def long_said(rows: pd.DataFrame) -> str:
    """Return the result of long training in words."""
    found, workers = language_ends(rows), most_workers(rows)
    base, diloco, averages = (at(found, name, workers) for name in (BASE, DILOCO, "local SGD"))
    steps = int(rows["steps"].max())
    text = (
        f"**With {workers} workers and {steps // 500} outer steps DiLoCo ends {beside(diloco['gap'])} all-reduce, and "
        f"local SGD {beside(averages['gap'])} it, in nats per byte, with {diloco['fewer']:,.0f} times fewer bytes.** "
        f"All-reduce ends at {base['loss']:.3f}."
    )
    alone = of(found, "one worker alone", 1)
    return text if alone is None else f"{text} One worker alone ends at {alone['loss']:.3f}."


def at(found: pd.DataFrame, method: str, workers: int) -> pd.Series:
    """Return the row of a method that has run."""
    row = of(found, method, workers)
    assert row is not None, "the page has its trainings"
    return row


def beside(gap: float) -> str:
    """Return a gap to another loss in words."""
    return f"{abs(gap):.3f} {'above' if gap > 0 else 'below'}"


def long_headline() -> tuple[str, str]:
    """DiLoCo after as many outer steps as in the paper, beside all-reduce and one worker alone."""
    rows = rows_of(LONG)
    found, workers = language_ends(rows), most_workers(rows)
    base, diloco, alone = at(found, BASE, workers), at(found, DILOCO, workers), of(found, "one worker alone", 1)
    text = (
        f"{diloco['gap']:+.3f} nats per byte with {diloco['fewer']:,.0f} times fewer bytes, H = 500, {workers} "
        f"workers, seeds: {diloco['seeds']}"
    )
    if alone is None:
        return text, YES if diloco["gap"] <= base["highest"] - base["lowest"] else NO
    lost = alone["loss"] - base["loss"]
    text += f"; one worker alone {lost:+.3f}"
    return text, YES if diloco["gap"] <= base["highest"] - base["lowest"] else IN_PART if diloco["gap"] < lost else NO


LONG_SETUP = """\
The decoder, the text and AdamW are those of [the study of outer methods](outer_language.md#setup): 20,480 parameters,
four sequences of 32 characters for each worker in a step. Trainings have 88,000 steps with $H = 500$, so 176 outer
steps. The paper of DiLoCo has as many where it begins with a new model, and 128 after 24,000 steps of one worker.

Rates were chosen in trainings of 10,000 steps, so in 20 outer steps. DiLoCo has the published outer rate 0.7 and
momentum 0.9, MuLoCo 0.7 and 0.6. "DiLoCo, outer rate ..." is the best of three other settings in the short trainings.
Local SGD is DiLoCo with an outer rate of 1 and no momentum. Steps are compiled."""


# Short fine-tuning.


def percents(found: pd.DataFrame, method: str, column: str) -> str:
    """Return how far a method is above all-reduce in words, with each number of workers, all parameters trained."""
    own = found[(found["method"] == method) & (found["trained"] == ALL)].set_index("workers")[column]
    return together([f"{share:+.1f} % with {workers}" for workers, share in own.sort_index().items()])


def short_said(rows: pd.DataFrame) -> str:
    """Return the result of short fine-tuning in words."""
    found = short_ends(rows)
    theirs = [f"{share:+.1f} % ({name}, {workers} workers)" for (name, workers), share in THEIRS.items()]
    return (
        f"**After 256 steps of fine-tuning, with six outer steps, the loss of DiLoCo beside all-reduce is "
        f"{percents(found, DILOCO, 'equal')} workers, and of plain averages {percents(found, AVERAGES, 'equal')}.** "
        f"All have the best rate of all-reduce there; seeds: {found['seeds'].max()}. With the best rate of each "
        f"method the loss of DiLoCo is {percents(found, DILOCO, 'own')} workers, and of plain averages "
        f"{percents(found, AVERAGES, 'own')}. {YETO} publishes {together(theirs)}, for adapters of a model of 27 B "
        "parameters, all with one rate."
    )


def short_summary(rows: pd.DataFrame) -> str:
    """Write the table of methods."""
    columns = {
        "trained": ("trained", "s"),
        "workers": ("workers", "d"),
        "method": ("method", "s"),
        "rate": ("best rate", "g"),
        "seeds": ("seeds", "d"),
        "loss": ("nats per byte", ".3f"),
        "lowest": ("lowest", ".3f"),
        "highest": ("highest", ".3f"),
        "own": ("% above all-reduce", "+.1f"),
        "equal": ("% above it, at its rate", "+.1f"),
    }
    return table(short_ends(rows), columns)


def short_rows(rows: pd.DataFrame) -> str:
    """Write the test losses by rate, in the mean over seeds."""
    texts = []
    for (trained, workers), own in with_parts(trainings(rows)).groupby(["trained", "workers"], sort=False):
        texts.append(
            f"Test losses by rate, {trained}, {workers} workers, in the mean over {own['seed'].nunique()} seeds:"
        )
        texts.append(grid(own.sort_values("rate"), ("part", "method"), "rate", "test", ".3f", "rate {:g}"))
    before = rows[rows["step"] == 0].groupby("seed")["test"].first()
    texts.append(f"Before fine-tuning: {', '.join(f'{loss:.3f}' for loss in before)}, by seed.")
    return "\n\n".join(texts)


def short_headline() -> tuple[str, str]:
    """Plain averages at the best rate of all-reduce, with two workers, as yeto compares them."""
    ends = short_ends(rows_of(SHORT))
    found = ends.set_index(["trained", "workers", "method"])["equal"].sort_index()
    both = {trained: found[trained, 2] for trained in (ALL, ADAPTERS) if (trained, 2, BASE) in found.index}
    text = "; ".join(f"{name}: DiLoCo {x[DILOCO]:+.1f} %, averages {x[AVERAGES]:+.1f} %" for name, x in both.items())
    text += f"; seeds: {ends['seeds'].max()}"
    near = all(by_limit(x[AVERAGES], THEIRS[AVERAGES, 2], 2 * THEIRS[AVERAGES, 2]) != NO for x in both.values())
    gap = THEIRS[DILOCO, 2] - THEIRS[AVERAGES, 2]
    shares = [(x[DILOCO] - x[AVERAGES]) / gap for x in both.values()]
    return text, YES if near and min(shares) >= 0.8 else IN_PART if min(shares) > 0 else NO


SHORT_SETUP = """\
One worker trains the decoder of [the study of outer methods](outer_language.md#setup) for 3,000 steps on Python's
sources, with 32 sequences in a step. Fine-tuning of this model goes on with Python's language reference, English
prose that `pydoc_data` has in every Python: 256 steps with $H = 42$, so six outer steps, and four sequences of 32
characters for each worker in a step. AdamW has a rate that rises for 26 steps and falls linearly. "LoRA" trains
adapters of rank 4 on the hidden matrices, and nothing else. All methods were trained with all rates and seeds. DiLoCo
has an outer rate of 0.7 and the momentum 0.9 if its row names no other; plain averages are local SGD."""

OUTER_STUDIES: Mapping[str, Page] = {
    **study_page(
        "outer_long",
        "Outer steps, as many as in the paper",
        long_said,
        lambda rows: any(is_measured(n)(rows) for n in (2, 4, 8)),
        planned=LONG_PLANNED,
        render=language_rows,
        summary=language_summary,
        setup=LONG_SETUP,
        measures=("gossip_modules/algorithms", "gossip_modules/lab", "gossip_modules/rounds"),
        question=QUESTIONS[0],
    ),
    **study_page(
        "outer_short",
        "Short fine-tuning with outer steps",
        short_said,
        has_trainings(*((name, 2) for name in (BASE, DILOCO, AVERAGES))),
        planned=SHORT_TRAININGS,
        render=short_rows,
        summary=short_summary,
        setup=SHORT_SETUP,
        measures=("gossip_modules/algorithms", "gossip_modules/lab", "gossip_modules/rounds"),
        question=QUESTIONS[0],
    ),
}
"""By the name of the page, those whose trainings have ended."""

_HEADLINES: Sequence[Headline] = (
    Headline(
        "DiLoCo",
        "8 workers learn as synchronous training does, with 500 times less communication; 176 outer steps",
        "decoder of 20,480 parameters, 88,000 steps, 176 outer steps",
        (LONG,),
        "outer_long",
        long_headline,
    ),
    Headline(
        "DiLoCo",
        "256 steps of fine-tuning, H = 42, 2 workers: DiLoCo +9.9 % of the loss, plain averages +0.6 %, by yeto",
        "decoder of 20,480 parameters, 6 outer steps",
        (SHORT,),
        "outer_short",
        short_headline,
    ),
)
OUTER_HEADLINES: Sequence[Headline] = [each for each in _HEADLINES if each.page in OUTER_STUDIES]
"""The headlines of papers that these studies measure, of those whose trainings have ended."""

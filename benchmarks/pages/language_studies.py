"""The pages of the studies of `benchmarks.studies.language`, and its rows of the page Reproduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pandas as pd

from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.headline import IN_PART, NO, YES, Headline, rows_of
from benchmarks.pages.markdown import table
from benchmarks.pages.study_tables import Rule, all_rows, has_trainings, study_page, trainings

CSV = "outer_language.csv"
PLANNED = 60
"""Trainings of all seeds and methods."""
ORDER = ("MuLoCo of one worker, H = 30", "all-reduce, Muon", "DiLoCo of one worker, H = 30", "all-reduce")
"""MuLoCo's table, from the lowest loss to the highest: the means of its five models."""


def language_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the test losses of each method with each number of workers, in the mean over seeds, the best first.

    Returns:
        method, workers, rate, seeds, loss, lowest, highest, gap (above all-reduce by AdamW, of the seeds that both
        have), megabytes of a worker, fewer (bytes of all-reduce over those).
    """
    last = trainings(rows)
    base = last[(last["method"] == "all-reduce")].set_index(["workers", "seed"])
    found = []
    for (method, workers), own in last.groupby(["method", "workers"], sort=False):
        many = workers if (workers, own["seed"].iloc[0]) in base.index else 8
        seeds = [seed for seed in own["seed"] if (many, seed) in base.index]
        gaps = [own.set_index("seed")["test"][seed] - base["test"][many, seed] for seed in seeds]
        gap = sum(gaps) / len(gaps) if gaps else float("nan")
        sent = own["megabytes"].iloc[0]
        fewer = base["megabytes"].xs(many, level="workers").iloc[0] / sent if sent and len(base) else float("nan")
        test = own["test"]
        found.append(
            (method, workers, own["rate"].iloc[0], len(own), test.mean(), test.min(), test.max(), gap, sent, fewer)
        )
    names = ["method", "workers", "rate", "seeds", "loss", "lowest", "highest", "gap", "megabytes", "fewer"]
    return pd.DataFrame(found, columns=names).sort_values(["workers", "loss"], ascending=[False, True])


def of(found: pd.DataFrame, method: str, workers: int = 8) -> pd.Series | None:
    """Return the row of a method; None: it has not run."""
    own = found[(found["method"] == method) & (found["workers"] == workers)]
    return own.iloc[0] if len(own) else None


def language_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    found = language_ends(rows)
    base = of(found, "all-reduce")
    texts = []
    if base is not None:
        far = of(found, "DiLoCo, H = 500")
        beside = "" if far is None else f", DiLoCo {_beside(far['gap'])} with {far['fewer']:,.0f} times fewer bytes"
        texts.append(f"**With 8 workers all-reduce ends at {base['loss']:.2f} nats per byte{beside}.**")
        alone = of(found, "one worker alone", 1)
        if alone is not None:
            texts.append(f"One worker alone, which reads an eighth of the data, ends at {alone['loss']:.2f}.")
    return " ".join(texts)


def _beside(gap: float) -> str:
    return f"{abs(gap):.2f} {'above' if gap > 0 else 'below'} it"


def language_summary(rows: pd.DataFrame) -> str:
    """Write the table of methods."""
    columns = {
        "method": ("method", "s"),
        "workers": ("workers", "d"),
        "rate": ("rate", "g"),
        "seeds": ("seeds", "d"),
        "loss": ("nats per byte", ".3f"),
        "lowest": ("lowest", ".3f"),
        "highest": ("highest", ".3f"),
        "gap": ("above all-reduce", "+.3f"),
        "megabytes": ("MB sent by a worker", ",.2f"),
        "fewer": ("times fewer bytes", ",.0f"),
    }
    return table(language_ends(rows), columns)


def language_rows(rows: pd.DataFrame) -> str:
    """Write the end of each training, and the grid of rates."""
    columns = {
        "validation": ("validation", ".3f"),
        "test": ("test", ".3f"),
        "consensus": ("distance", ".3g"),
        "megabytes": ("MB sent", ",.2f"),
        "cpu_seconds": ("CPU s", ".0f"),
    }
    return all_rows(rows, columns, "Validation losses", ".3f")


SETUP = """\
This is [a study in the Lab](index.md#studies-in-the-lab) with text and a decoder of two layers, 20,480 parameters, in
3,000 steps. In each step a worker reads four sequences; "one worker" reads 32, and "one worker alone" four. Muon steps
the hidden matrices of "Muon" and "MuLoCo", and AdamW the embedding. Rates were chosen in trainings of 600 steps.

Settings are the published ones, the defaults of this library: the outer rate 0.7 and momentum 0.9 of DiLoCo, 0.7 and
0.6 of MuLoCo, 1.8 and 0.8 of IsoLoCo, and 0.8 as momentum of DiLoCo of one worker. Streaming DiLoCo has four fragments,
a delay of five steps and codes of 4 bits."""


def diloco_headline() -> tuple[str, str]:
    """DiLoCo with the longest period beside all-reduce, after six of the 176 outer steps of its paper."""
    rows = rows_of(CSV)
    found = language_ends(rows)
    row, base = of(found, "DiLoCo, H = 500"), of(found, "all-reduce")
    assert row is not None, "this headline has its trainings"
    assert base is not None, "this headline has its trainings"
    outer = int(trainings(rows)["steps"].max()) // 500
    text = f"{row['gap']:+.2f} nats per byte with {row['fewer']:,.0f} times fewer bytes, H = 500, {outer} outer steps"
    return text, YES if row["gap"] <= base["highest"] - base["lowest"] else NO


def muloco_headline() -> tuple[str, str]:
    """The order of MuLoCo's table, in the means and for each seed."""
    rows = rows_of(CSV)
    last = trainings(rows)
    of_table = last["workers"] == [1 if "one worker" in name else 8 for name in last["method"]]
    ends = last[of_table & last["method"].isin(ORDER)].pivot(index="seed", columns="method", values="test")[list(ORDER)]
    means = ends.mean()
    text = ", ".join(f"{name.partition(', H')[0]} {means[name]:.3f}" for name in ORDER)
    in_order = [all(a <= b for a, b in pairwise(row)) for row in (means, *ends.to_numpy())]
    text = f"{text}; in this order with {sum(in_order[1:])} of {len(ends)} seeds"
    return text, YES if all(in_order) else IN_PART if means.iloc[0] < means.iloc[-1] else NO


LANGUAGE_STUDIES: Mapping[str, Page] = {
    **study_page(
        "outer_language",
        "A language model by outer methods at their published settings",
        language_said,
        has_trainings(("all-reduce", 8)),
        planned=PLANNED,
        render=language_rows,
        summary=language_summary,
        setup=SETUP,
        measures=("gossip_modules/algorithms", "gossip_modules/lab", "gossip_modules/rounds"),
        question=QUESTIONS[0],
    ),
}

_HEADLINES: Mapping[Rule, Headline] = {
    has_trainings(("all-reduce", 8), ("DiLoCo, H = 500", 8)): Headline(
        "DiLoCo",
        "8 workers learn as synchronous training does, with 500 times less communication; 176 outer steps",
        "decoder of 20,480 parameters, 3,000 steps",
        (CSV,),
        "outer_language",
        diloco_headline,
        {"rounds": (3000 // 500, 176)},
    ),
    has_trainings(*((name, 1 if "one worker" in name else 8) for name in ORDER)): Headline(
        "MuLoCo",
        "one worker, losses in the order MuLoCo, Muon, DiLoCo, AdamW (3.120 to 3.158 with 150 M parameters)",
        "decoder of 20,480 parameters, 3,000 steps",
        (CSV,),
        "outer_language",
        muloco_headline,
    ),
}
LANGUAGE_HEADLINES: Sequence[Headline] = [
    each for is_ready, each in _HEADLINES.items() if "outer_language" in LANGUAGE_STUDIES and is_ready(rows_of(CSV))
]
"""The headlines of papers that this study measures, of those whose trainings have ended."""

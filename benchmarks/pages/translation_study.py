"""The page of the study of translation, and its row of the page Reproduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.headline import Headline, by_limit, rows_of
from benchmarks.pages.markdown import table
from benchmarks.pages.study_tables import all_rows, ends, has_trainings, study_page

CSV, WORKERS, PLANNED = "translation.csv", 8, 15
BASE, BY_ADAM = "all-reduce", ("SGP", "Overlap SGP")
GOSSIP = (*BY_ADAM, *(f"{name} with GossipAdamW" for name in BY_ADAM))
LIMIT = 0.5
"""Points of BLEU below all-reduce that count as the same."""


def gaps(rows: pd.DataFrame) -> Mapping[str, float]:
    """Return the points of BLEU below all-reduce, by method."""
    found = ends(rows, BASE).set_index("method")
    return {name: float(found.loc[name, "gap"]) for name in GOSSIP if name in found.index}


def in_words(gaps: Mapping[str, float]) -> str:
    """Return gaps in words, in points below all-reduce."""
    return ", ".join(f"{name} {gap:.1f}" for name, gap in gaps.items())


def translation_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    base = ends(rows, BASE).set_index("method").loc[BASE]
    found = gaps(rows)
    num = sum(gap <= LIMIT for gap in found.values())
    return (
        f"**All-reduce ends at {base['accuracy']:.1f} BLEU; below it {in_words(found)}.** "
        f"{num} of {len(found)} are at most half a point below."
    )


def translation_summary(rows: pd.DataFrame) -> str:
    """Write the table of methods."""
    columns = {
        "method": ("method", "s"),
        "rate": ("rate", "g"),
        "seeds": ("seeds", "d"),
        "accuracy": ("BLEU", ".1f"),
        "lowest": ("lowest", ".1f"),
        "highest": ("highest", ".1f"),
        "gap": ("points below", "+.2f"),
    }
    return table(ends(rows, BASE), columns)


def translation_rows(rows: pd.DataFrame) -> str:
    """Write the end of each training, and the grid of rates."""
    columns = {
        "validation": ("validation, nats", ".3f"),
        "accuracy": ("BLEU", ".1f"),
        "consensus": ("distance", ".3g"),
        "cpu_seconds": ("CPU s", ".0f"),
    }
    return all_rows(rows, columns, "Validation losses", ".3f")


def sgp_headline() -> tuple[str, str]:
    """The larger gap of SGP and Overlap SGP by Adam, the optimizer of the paper."""
    found = gaps(rows_of(CSV))
    verdict = by_limit(max(found[name] for name in BY_ADAM), LIMIT, 2 * LIMIT)
    return f"BLEU below all-reduce: {in_words(found)}", verdict


TRANSLATION_STUDY: Mapping[str, Page] = study_page(
    "translation",
    "Translation of Multi30k by SGP and Overlap SGP",
    translation_said,
    has_trainings(*((name, WORKERS) for name in (BASE, *BY_ADAM))),
    planned=PLANNED,
    render=translation_rows,
    summary=translation_summary,
    setup="""\
This is [a study in the Lab](index.md#studies-in-the-lab) with Multi30k, from English into German. The transformer has
two layers on each side, a width of 64 and 295,680 parameters; its vocabulary is 2,000 byte pairs. Each of eight workers
reads 16 pairs in a step, for 12 epochs. Adam and GossipAdamW have betas (0.9, 0.98). Labels are smoothed by 0.1,
without dropout or decay. Rates were chosen in trainings of 408 steps. BLEU is of the test split of 2016, by greedy
search and sacrebleu.""",
    measures=("gossip_modules/algorithms", "gossip_modules/lab", "gossip_modules/rounds"),
    question=QUESTIONS[0],
)
TRANSLATION_HEADLINES: Sequence[Headline] = [
    Headline(
        "SGP, Overlap SGP",
        "translation of WMT'16 with 8 nodes as good as by all-reduce (curves)",
        "Multi30k, 8 workers, 295,680 parameters, 12 epochs",
        (CSV,),
        "translation",
        sgp_headline,
    )
]
"""The headline that this study measures."""

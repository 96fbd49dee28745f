"""The part of the page about accuracy that has the language model of the default, over 3,000 steps."""

from __future__ import annotations

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.studies.ends import gaps
from benchmarks.tables import table


def gaps_table(rows: pd.DataFrame) -> str:
    """Write `gaps` as a table."""
    columns = {
        "method": ("method", "s"),
        "workers": ("workers", "d"),
        "rate": ("rate", "g"),
        "seeds": ("seeds", "d"),
        "validation": ("validation, nats", ".3f"),
        "test": ("test, nats", ".3f"),
        "beyond": ("beyond all-reduce", ".3f"),
        "tuned": ("rate chosen in steps", "d"),
    }
    return table(gaps(rows, "all-reduce, AdamW"), columns)


MANY_STEPS = Page(
    "Language, 3,000 steps, with first moments that are mixed",
    "language.csv",
    """\
After 3,000 steps of 8 workers SGP with GossipAdamW ends {language.long_sgp} nats above all-reduce. With
[`MixedMomentum`][gossip_modules.MixedMomentum] it ends {language.long_mixed} above, and {language.long_mixed_64} above
with 64 workers. The study has one seed so far, and not all of its methods.""",
    render=gaps_table,
    measures=("gossip_modules/lab", "gossip_modules/optim", "gossip_modules/rounds"),
    setup="""\
A decoder of 20,480 parameters learns the characters of Python's standard library, on four sequences of 32 characters
per worker and step. AdamW and GossipAdamW have betas (0.9, 0.95) and weight decay 0.1. Rates are the best ones on the
validation split, of whole trainings with 8 workers and of trainings of 600 steps with 64.""",
)
"""Folded, on the page of `gap.csv`."""

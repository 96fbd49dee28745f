"""Pages about training with a fixed number of ranks: the time of a step, what is learnt, and what faults do."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pandas as pd

from benchmarks.faults.table import markdown as faults_markdown
from benchmarks.pages.base import Page


def faults(rows: pd.DataFrame) -> str:
    """The table of faults and what deviates; errors are shown letter by letter."""
    lines = faults_markdown(rows).splitlines()
    escaped = (re.sub(r"([\\`*_\[\]<>])", r"\\\1", line) if line.startswith("- ") else line for line in lines)
    return "\n".join(escaped) + "\n"


TRAINING: Mapping[str, Page] = {
    "before_after": Page(
        "The time of a step, before and after",
        "before_after.csv",
        """\
Milliseconds per training step of the slowest of four ranks, with the library of an earlier commit and
with that of this one, in one run: both train at once and take turns. The ratio is the median over turns
of after / before, with its interval of 95 %. "mlp" is six layers of 64: it shows what surrounds a round.
"resnet18" is mostly compute. Absolute times are those of four ranks on two cores.""",
        {
            "model": ("model", "s"),
            "method": ("method", "s"),
            "before_ms": ("before, ms", ".2f"),
            "after_ms": ("after, ms", ".2f"),
            "ratio": ("ratio", ".3f"),
            "ratio_low": ("from", ".3f"),
            "ratio_high": ("to", ".3f"),
        },
    ),
    "language_model": Page(
        "A language model on Python's sources",
        "language_model.csv",
        """\
The default run of `train/language_model.py`, by several methods with the same options: how long it
takes from the command to its end, and what the averaged model reaches on the validation files, beside
what the frequencies of the tokens alone give. Learning rates were not tuned for each method. The
machine did other work too, so seconds are no comparison of methods; the processor's seconds are those
of all processes of a run, which two idle cores share.
[Language models](../guides/language_models.md) says what is learnt.""",
        {
            "recipe": ("recipe", "s"),
            "model": ("model", "s"),
            "ranks": ("ranks", "d"),
            "python": ("Python", "s"),
            "steps": ("steps", "d"),
            "seconds": ("s, all", ".0f"),
            "cpu_seconds": ("s, processor", ".0f"),
            "training_seconds": ("s, training", ".0f"),
            "nll": ("nats per token", ".3f"),
            "perplexity": ("perplexity", ".1f"),
            "bits_per_byte": ("bits per byte", ".3f"),
            "frequencies_bits_per_byte": ("by frequencies", ".3f"),
            "sent_megabytes": ("MB sent per rank", ".1f"),
        },
    ),
    "restart": Page(
        "Killed and resumed",
        "restart.csv",
        """\
A job on one machine is killed by SIGKILL and started again with `--resume auto`: seconds from the
kill to the line that says from which step the run goes on, and to the first epoch that is new.""",
        {
            "date": ("date", "s"),
            "recipe": ("recipe", "s"),
            "num_workers": ("ranks", "d"),
            "repeat": ("repeat", "d"),
            "seconds_to_resume": ("to resume, s", ".1f"),
            "seconds_to_new_epoch": ("to a new epoch, s", ".1f"),
        },
    ),
    "faults": Page(
        "Killed, stopped and failing ranks",
        "faults.csv",
        """\
What every wrapper does when ranks are killed, stopped, fail or leave.
[What is guaranteed](../guides/failures.md) is on a page of its own.""",
        render=faults,
    ),
    "faults_quieter": Page(
        "Killed, stopped and failing ranks, on a quieter machine",
        "faults_quieter.csv",
        """\
The measurement of [killed, stopped and failing ranks](faults.md), made again on a quieter machine.""",
        render=faults,
    ),
    "faults_before": Page(
        "Killed, stopped and failing ranks, at an earlier commit",
        "faults_before.csv",
        """\
The same faults with the library of an earlier commit, for comparison with
[killed, stopped and failing ranks](faults.md).""",
        render=faults,
    ),
}

"""Claims about the seconds until an equal loss of the methods that a page advises first, beside DDP."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.claims.base import Claim
from benchmarks.claims.equal_loss import DDP, FILES, LINES, STEPS, WORKERS, equal_loss, target
from benchmarks.studies.ends import gaps

ROWS = (
    "DDP",
    "DDP, fp16 hook",
    "SGP, bfloat16",
    "SGP, momentum mixed too, bfloat16",
    "Overlap SGP, bfloat16",
    "Overlap SGP, momentum mixed too, bfloat16",
    "Local SGD, H = 10",
    "Local SGD, H = 4, momentum mixed too",
    "Local SGD, H = 4, 4 bits, momentum mixed too",
)
"""The labels of `LINES` that the table shows."""
RATES = (10.0, 1.0, 0.1)


def seconds(language: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Return `equal_loss` by label and rate."""
    return equal_loss(language, cells).set_index(["label", "rate"])


def result(language: pd.DataFrame, cells: pd.DataFrame) -> str:
    """Return a table: the loss of each method after equal steps, and the seconds until the loss that most reach."""
    losses = gaps(language, LINES["DDP"].curve, STEPS)
    losses = losses[losses["workers"] == WORKERS].set_index("method")["test"]
    found = seconds(language, cells)["seconds"]
    own = language[(language["workers"] == WORKERS) & ~language["is_tuning"]]
    longest = {label: own.loc[own["method"] == LINES[label].curve, "steps"].max() for label in ROWS}
    lines = [
        f"| method | test loss after {STEPS:,} steps | {' | '.join(f'{rate:g} Gbit/s' for rate in RATES)} |",
        "|---|---:|" + "---:|" * len(RATES),
    ]
    for label in ROWS:
        each = [found.get((label, rate)) for rate in RATES]
        cells_of = ["" if x is None else f"{x:,.0f} s" if x == x else f"not in {longest[label]:,} steps" for x in each]
        lines.append(f"| {label} | {losses[LINES[label].curve]:.3f} | {' | '.join(cells_of)} |")
    return "\n".join(lines)


ALIKE = 1.02
"""Methods whose seconds differ by less than this factor are first together."""
ANOTHER = "default_cells_intel.csv"
"""The same cells on another machine."""


def fastest(language: pd.DataFrame, cells: pd.DataFrame) -> str:
    """Return a sentence: the method with the fewest seconds at each speed of the links, and its share of DDP's."""
    found = equal_loss(language, cells).dropna(subset="seconds")
    texts = []
    for rate in RATES:
        own = found[found["rate"] == rate].sort_values("seconds")
        first, ours = own.iloc[0], own[~own["label"].isin(DDP)].iloc[0]
        if first["label"] in DDP:
            text = f"{_said(first['label'])} is first at {rate:g} Gbit/s"
            text += f", and {_said(ours['label'])} takes {ours['share']:.2f} times its seconds"
        else:
            near = own[~own["label"].isin(DDP) & (own["seconds"] <= ALIKE * first["seconds"])]["label"].map(_said)
            text = f"{' and '.join(near)} {'is' if len(near) == 1 else 'are'} first at {rate:g} Gbit/s"
            text += f", with {first['share']:.2f} of the seconds of the fastest DDP"
        texts.append(text)
    return "; ".join(texts)


def won(language: pd.DataFrame, cells: pd.DataFrame) -> str:
    """Return the speeds of the links at which a DDP has the fewest seconds."""
    found = equal_loss(language, cells).dropna(subset="seconds")
    first = found.loc[found.groupby("rate")["seconds"].idxmin()].set_index("rate")["label"]
    return " and ".join(f"{rate:g}" for rate in RATES if first[rate] in DDP)


def _said(label: str) -> str:
    """Return a label as a sentence has it."""
    for own, said in (
        (", fp16 hook", " with its fp16 hook"),
        (", bfloat16", " in bfloat16"),
        (", int8", " in int8"),
        (", H", " with H"),
        (", 4 bits", " in 4 bits"),
    ):
        label = label.replace(own, said)
    return label.replace(", momentum mixed too", f" {'and' if ' with ' in label else 'with'} mixed moments")


def step(label: str, rate: float) -> Claim:
    """Return the claim about the milliseconds of a step."""
    where = f"method {LINES[label].cell}, rate_gbit {rate / 4:g}: the median over repeats of fleet_step_ms, over 4"
    return Claim(FILES, where, lambda *rows: seconds(*rows).loc[(label, rate), "ms"], "{:.0f} ms")


STEPS_SAID = {
    "ms_ddp": "DDP",
    "ms_ddp_fp16": "DDP, fp16 hook",
    "ms_sgp": "SGP, bfloat16",
    "ms_osgp": "Overlap SGP, bfloat16",
}
"""The labels whose steps at 1 Gbit/s pages say, by the names of the claims."""
DEFAULT: Mapping[str, Claim] = {
    "result": Claim(
        FILES,
        f"loss: {WORKERS} workers, {STEPS:,} steps, the mean test over seeds at the tuned rate; seconds: at an equal "
        "validation loss, the steps of a training of its own length times the median of fleet_step_ms",
        result,
    ),
    "fastest": Claim(
        FILES,
        "the fewest seconds at each speed of the links, as in result, and those of gossip within 2 %, with the share "
        "of the fastest of DDP with and without a hook",
        fastest,
    ),
    "won_elsewhere": Claim(
        (FILES[0], ANOTHER),
        "the speeds of the links at which DDP, with a hook or without, has the fewest seconds on another machine",
        won,
    ),
    "won": Claim(FILES, "the speeds of the links at which DDP, with a hook or without, has the fewest seconds", won),
    "target": Claim(
        FILES[:1],
        f"{WORKERS} workers, {STEPS:,} steps: the highest mean validation loss of the compared methods",
        target,
        "{:.3f}",
    ),
    **{name: step(label, 1.0) for name, label in STEPS_SAID.items()},
}
"""Claims about times and losses of eight workers."""

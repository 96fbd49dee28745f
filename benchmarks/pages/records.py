"""The page of records."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.pages.markdown import table
from benchmarks.record import RESULTS
from benchmarks.records.submission import entry
from benchmarks.records.tracks import TARGET_BITS, TRACKS

_MEASURES = ("gossip_modules/algorithms", "gossip_modules/lab", "gossip_modules/rounds")
_COLUMNS = {
    "track": ("track", "s"),
    "submission": ("submission", "s"),
    "setting": ("setting", "s"),
    "steps_to_target": ("steps", ".0f"),
    "seconds": ("s", ",.0f"),
    "megabytes": ("MB of a worker", ",.0f"),
    "final_bits": ("bits at the end", ".3f"),
    "cpu_seconds": ("processor, s", ".0f"),
}


ROWS = pd.read_csv(RESULTS / "records.csv")


def records(rows: pd.DataFrame) -> str:
    """A table for each track, the fastest first. A submission without a time has missed the target."""
    texts = []
    columns = {
        "title": ("submission", "s"),
        "seconds": (f"s to {TARGET_BITS:g} bits", ",.0f"),
        "seconds_low": ("from", ",.0f"),
        "seconds_high": ("to", ",.0f"),
        "steps_to_target": ("steps", ".0f"),
        "megabytes": ("MB of a worker", ",.0f"),
        "final_bits": ("bits at the end", ".3f"),
    }
    for name, own in rows.groupby("track", sort=False):
        titles = [entry(submission).title for submission in own["submission"]]
        texts.append(f"`{name}`: {TRACKS[str(name)].title}")
        texts.append(table(own.assign(title=titles).sort_values(["seconds", "final_bits"]), columns))
    return "\n\n".join(texts)


def headline(rows: pd.DataFrame) -> str:
    """The first one of each track and its time, beside all-reduce."""
    texts = []
    for name, own in rows.groupby("track", sort=False):
        reached = own.dropna(subset="seconds").sort_values("seconds")
        if reached.empty:
            texts.append(f"on `{name}` none of {len(own)}")
            continue
        first, exact = reached.iloc[0], reached.set_index("submission")["seconds"].get("all_reduce")
        rival = "" if exact is None else f" (AllReduce {exact:,.0f} s)"
        texts.append(f"on `{name}` {entry(first['submission']).title} in {first['seconds']:,.0f} s{rival}")
    return f"First to {TARGET_BITS:g} bits per byte: {'; '.join(texts)}."


def firsts(rows: pd.DataFrame) -> str:
    """The first one of each track, for the index."""
    reached = rows.dropna(subset="seconds").sort_values("seconds").groupby("track", sort=False)["submission"].first()
    names = [
        f"{entry(name).title} on {', '.join(f'`{x}`' for x in own)}"
        for name, own in reached.groupby(reached).groups.items()
    ]
    return f"First to {TARGET_BITS:g} bits per byte: {'; '.join(names)}."


RECORDS: Mapping[str, Page] = {
    "records": Page(
        "Records: seconds to a fixed loss in the Lab",
        "records.csv",
        f"**{headline(ROWS)}**",
        _COLUMNS,
        measures=_MEASURES,
        summary=records,
        setup="""\
Each submission trains a model of bytes, and the fastest one to the target is first: a number of bits per byte of the
averaged model on a test split. Seconds are those of [the Lab's clock](../guides/lab.md#time) for 10 million parameters:
the mean, the lowest and the highest of three seeds. Megabytes are until then. If a cell is empty, a seed missed the
target in 300 steps. `benchmarks/records/README.md` has the rules, and says how you enter a method of your own.""",
        parts=(
            Page(
                "Settings that were tried",
                "records_grid.csv",
                """\
Each submission tried the settings of its grid with another seed on a validation split: five learning rates, or three
with two periods. The fastest setting competes, or the one with the fewest bits per byte if none reached the target. If
it has the highest rate of its grid, a higher one was not tried.""",
                _COLUMNS,
                measures=_MEASURES,
            ),
        ),
        question="Is it as fast?",
        result=firsts(ROWS),
    )
}

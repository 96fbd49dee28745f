"""The page about the gap between gossip and all-reduce at equal samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from benchmarks.pages.base import Page

UNITS = {"language": "nats per byte", "images": "% errors"}


def best(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of each change at the rate that is best on the validation split with the lowest seed, a row per change.

    Args:
        rows: of gap.csv, of one task with one number of workers and of steps.

    Returns:
        By change and batch: rate, seeds, and of the test split mean, lowest and highest; own (of the models of single
        workers); distance of these from their mean, relative; from the lowest mean to the highest.
    """
    found = []
    for (change, batch), own in rows.groupby(["change", "batch"], sort=False):
        tuned = own[own["run_seed"] == own["run_seed"].min()]
        rate = tuned.loc[tuned["validation"].idxmin(), "rate"]
        own = own[own["rate"] == rate]
        test = own["test"]
        ends = (rate, len(own), test.mean(), test.min(), test.max(), own["test_own"].mean(), own["distance"].mean())
        found.append((change, batch, *ends))
    columns = ["change", "batch", "rate", "seeds", "mean", "lowest", "highest", "own", "distance"]
    return pd.DataFrame(found, columns=columns).sort_values("mean")


def parts(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield title, unit and the table of `best` for each part of the study."""
    for (task, workers, steps), own in rows.groupby(["task", "workers", "steps"], sort=False):
        yield f"{task.capitalize()}, {workers} workers, {steps:,} steps", UNITS[task], best(own)


def tables(rows: pd.DataFrame) -> str:
    """A table for each part of the study, then how it was measured."""
    texts = []
    for title, unit, table in parts(rows):
        base = table[table["change"] == "all-reduce"].iloc[0]
        digits = 3 if unit.startswith("nats") else 1
        lines = [
            f"| change | batch | rate | seeds | {unit} | lowest to highest | beyond all-reduce |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for row in table.itertuples():
            mean, low, high, gap = (
                f"{value:.{digits}f}" for value in (row.mean_, row.lowest, row.highest, row.mean - base["mean"])
            )
            lines.append(
                f"| {row.change} | {row.batch} | {row.rate:g} | {row.seeds} | {mean} | {low} to {high} | {gap} |"
            )
        texts += [f"## {title}", "\n".join(lines)]
    sources = []
    for (command, commit), part in rows.groupby(["command", "commit"], sort=False):
        first = part.iloc[0]
        made = f"{first['date']}, commit {commit}, torch {first['torch']}, {first['device']}, {len(part)} trainings."
        sources.append(f"    {command}\n\n{made}")
    return "\n\n".join([*texts, "## Measured by", *sources]) + "\n"


GAP: Mapping[str, Page] = {
    "gap": Page(
        "What separates gossip from all-reduce",
        "gap.csv",
        """\
TEXT""",
        render=tables,
    ),
}

"""Pieces of a page: folded parts, and the commands of rows."""

from __future__ import annotations

import textwrap

import pandas as pd

from benchmarks.tables import grid, table

__all__ = ["fold", "grid", "names_data", "sources", "table"]

SHOWN = 2
"""Commands of a page that are shown; more than these are folded."""


def fold(title: str, text: str) -> str:
    """A part that is closed until the reader opens it."""
    return f'??? note "{title}"\n\n{textwrap.indent(text, "    ")}'


def sources(rows: pd.DataFrame) -> str:
    """Command, day, commit and machine of the rows, an entry for each that differs."""
    entries = []
    for (command, commit), part in rows.groupby(["command", "commit"], sort=False):
        first, days = part.iloc[0], sorted({str(date)[:10] for date in part["date"]})
        day = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        on = f"{first['machine']}, {first['cores']} cores" if "cores" in part else first["machine"]
        seeds = ", ".join(sorted({str(seed) for seed in part["seed"]})) if "seed" in part else ""
        made = f"{day}, commit {commit}, torch {first['torch']}, {on}{f', seed {seeds}' if seeds else ''}."
        entries.append(f"```sh\n{command}\n```\n\n{made}")
    text = "\n\n".join(entries)
    return text if len(entries) <= SHOWN else fold(f"{len(entries)} commands, with commits and machines", text)


def names_data(rows: pd.DataFrame) -> bool:
    """Whether rows have a hash of the data, if a command of them reads some."""
    reads = rows["command"].str.contains(r"\$GOSSIP_DATA|--data |--images ").any()
    return not reads or ("data" in rows and bool(rows["data"].str.contains(r"\b[0-9a-f]{12,}\b").all()))

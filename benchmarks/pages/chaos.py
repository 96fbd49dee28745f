"""The figures of the soak: a column for each method, and what each kind of fault costs."""

from __future__ import annotations

import pandas as pd

from benchmarks.record import PROVENANCE


def chaos(rows: pd.DataFrame) -> str:
    """The command of each method, and a table with a column for each."""
    names = [name for name in rows if name not in (*PROVENANCE, "method")]
    shown = rows.astype(object).where(rows.notna(), "")
    lines = [*_sources(rows), f"| | {' | '.join(rows['method'])} |", f"|---|{'---:|' * len(rows)}"]
    lines += [f"| {name.replace('_', ' ')} | {' | '.join(map(_number, shown[name]))} |" for name in names]
    return "\n".join(lines) + "\n"


def chaos_faults(rows: pd.DataFrame) -> str:
    """The command of each method, and a row for each method and kind of fault."""
    lines = _sources(rows.groupby("method", sort=False).first().reset_index())
    lines += [
        "| method | what | how often | median, ms | nine of ten, ms | slowest, ms |",
        "|---|---|---:|---:|---:|---:|",
    ]
    kinds = rows["kind"] + rows["lasts_seconds"].map(lambda seconds: f", {seconds:g} s" if seconds else "")
    for (method, kind), own in rows[rows["slowest_ms"] > 0].groupby(["method", kinds.rename("what")], sort=False):
        times = own["slowest_ms"]
        figures = f"{times.median():.0f} | {times.quantile(0.9):.0f} | {times.max():.0f}"
        lines.append(f"| {method} | {kind} | {len(own)} | {figures} |")
    return "\n".join(lines) + "\n"


def _sources(rows: pd.DataFrame) -> list[str]:
    return [
        f"{row['method']}: `{row['command']}`, {row['date']}, commit {row['commit']}, torch {row['torch']}, "
        f"{row['machine']}, {row['cores']} cores, seed {row['seed']}.\n"
        for row in rows.to_dict("records")
    ]


def _number(value: object) -> str:
    return f"{value:.1e}" if isinstance(value, float) and 0 < value < 1e-3 else f"{value}"

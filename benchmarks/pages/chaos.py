"""The figures of the soak: a column for each method, and what each kind of fault costs."""

from __future__ import annotations

import pandas as pd

from benchmarks.pages.markdown import table
from benchmarks.record import PROVENANCE


def chaos(rows: pd.DataFrame) -> str:
    """A table with a column for each method."""
    names = [name for name in rows if name not in (*PROVENANCE, "method")]
    shown = rows.astype(object).where(rows.notna(), "")
    lines = [f"| column | {' | '.join(rows['method'])} |", f"|---|{'---:|' * len(rows)}"]
    lines += [f"| {name.replace('_', ' ')} | {' | '.join(map(_number, shown[name]))} |" for name in names]
    return "\n".join(lines) + "\n"


def outcomes(rows: pd.DataFrame) -> str:
    """Faults, failures and accuracy of each method."""
    shown = rows.assign(gap=rows["accuracy"] - rows["undisturbed_accuracy"])
    columns = {
        "method": ("method", "s"),
        "faults": ("faults", "d"),
        "failed": ("workers that failed", "d"),
        "hung": ("workers that hung", "d"),
        "median_ms": ("median step, ms", ".0f"),
        "slowest_ms": ("slowest step, ms", ".0f"),
        "accuracy": ("accuracy, %", ".2f"),
        "undisturbed_accuracy": ("without faults", ".2f"),
        "gap": ("difference", "+.2f"),
    }
    return table(shown, columns)


def chaos_faults(rows: pd.DataFrame) -> str:
    """A row for each method and kind of fault."""
    lines = [
        "| method | what | how often | median, ms | nine of ten, ms | slowest, ms |",
        "|---|---|---:|---:|---:|---:|",
    ]
    kinds = rows["kind"] + rows["lasts_seconds"].map(lambda seconds: f", {seconds:g} s" if seconds else "")
    for (method, kind), own in rows[rows["slowest_ms"] > 0].groupby(["method", kinds.rename("what")], sort=False):
        times = own["slowest_ms"]
        figures = f"{times.median():.0f} | {times.quantile(0.9):.0f} | {times.max():.0f}"
        lines.append(f"| {method} | {kind} | {len(own)} | {figures} |")
    return "\n".join(lines) + "\n"


def _number(value: object) -> str:
    return f"{value:.1e}" if isinstance(value, float) and 0 < value < 1e-3 else f"{value}"

"""The section about the doctor's choice for two regions, beside the measurement of all its candidates."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.markdown import table

KEY = ["inside_region", "method"]


def medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the medians over repeats by method, the fastest to the target first."""
    numbers = ["predicted_ms", "step_ms", "steps_to_target", "predicted_s", "seconds", "counted_bytes", "line_bytes"]
    found = rows.groupby([*KEY, "is_chosen"])[numbers].median().reset_index()
    found["ratio"] = found["predicted_ms"] / found["step_ms"]
    found["headers"] = found["line_bytes"] / found["counted_bytes"] - 1
    return found.sort_values("seconds", kind="stable")


def summary(rows: pd.DataFrame) -> str:
    """Write the result in words, and a table of methods."""
    found = medians(rows)
    ((_, chosen),) = found[found["is_chosen"]].iterrows()
    place = 1 + int((found["seconds"] < chosen["seconds"]).sum())
    within = int(((found["ratio"] - 1).abs() <= 0.15).sum())
    low, high = found["headers"].min(), found["headers"].max()
    load, count = rows["load"].median(), len(rows) // len(found)
    repeats = "once" if count == 1 else f"{count} times"
    said = (
        f"**The doctor's choice, {chosen['method']} with {chosen['inside_region']} inside, has place {place} of "
        f"{len(found)} by measured time.** Predictions of {within} methods are within 15 % of the measured step, from "
        f"{found['ratio'].min():.2f} to {found['ratio'].max():.2f} times as long. The line counted {low:.1%} to "
        f"{high:.1%} more bytes than `comm_stats()`: headers and acknowledgements. Each method was timed "
        f"{repeats}. On the machine {load:.1f} processes wanted a core."
    )
    columns = {
        "inside_region": ("inside a region", "s"),
        "method": ("between regions", "s"),
        "predicted_ms": ("predicted, ms per step", ".0f"),
        "step_ms": ("measured", ".0f"),
        "ratio": ("ratio", ".2f"),
        "predicted_s": ("predicted, s to the target", ".1f"),
        "seconds": ("measured", ".1f"),
        "headers": ("more bytes on the line", ".1%"),
    }
    return f"{said}\n\n{table(found, columns)}"


TWO_REGIONS: Mapping[str, Page] = {
    "two_regions": Page(
        "The doctor's choice for two regions",
        "two_regions.csv",
        "[The doctor](../guides/doctor.md#regions) runs on [emulated hosts](index.md#emulated-hosts) in two regions, "
        "and each of its candidates is timed there.",
        {
            "inside_region": ("inside a region", "s"),
            "method": ("between regions", "s"),
            "repeat": ("repeat", "d"),
            "predicted_ms": ("predicted, ms per step", ".0f"),
            "step_ms": ("measured", ".0f"),
            "counted_bytes": ("bytes counted", ",d"),
            "line_bytes": ("bytes on the line", ",d"),
            "load": ("load", ".1f"),
        },
        summary=summary,
        setup="""\
Two hosts in each of two regions have links of 1 Gbit/s; the regions have one line of 200 Mbit/s each way and a round
trip of 20 ms. A step computes for 150 ms, and the model has 2.8 million parameters. The seconds to the target are the
steps that the doctor's small models take, times the seconds of a step: predicted, or measured as the mean of the
slowest rank. Figures are medians if a method was timed several times.""",
        measures=("gossip_modules/doctor.py", "gossip_modules/lab", "gossip_modules/transport"),
        question=QUESTIONS[4],
        result="The doctor's choice for two regions stands beside the measured time of all its candidates.",
    )
}

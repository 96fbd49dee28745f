"""Claims about training under a random fault every two seconds."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.claims.base import Claim

CSV = ("chaos.csv",)


def gaps(rows: pd.DataFrame) -> pd.Series:
    """Return the points of accuracy above the run without faults, by method."""
    return (rows["accuracy"] - rows["undisturbed_accuracy"]).set_axis(rows["method"])


def pair(method: str) -> Claim:
    """Return the claim about the accuracy of a method with and without faults."""

    def query(rows: pd.DataFrame) -> str:
        own = rows.set_index("method").loc[method]
        return f"{own['accuracy']:.1f} %, and {own['undisturbed_accuracy']:.1f} % without faults"

    return Claim(CSV, f"{method}: accuracy and undisturbed_accuracy, one run each", query)


def far(rows: pd.DataFrame) -> str:
    """Return the number of methods within half a point of their run without faults, and the others in words."""
    found = gaps(rows)
    others = found[found.abs() > 0.5].sort_values()
    said = [f"{name} ends {abs(gap):.1f} {'above' if gap > 0 else 'below'}" for name, gap in others.items()]
    return f"{len(found) - len(others)} of {len(found)} methods end within 0.5 points of it; {', '.join(said)}"


CHAOS: Mapping[str, Claim] = {
    "adpsgd": pair("AD-PSGD"),
    "wagma": pair("WAGMA"),
    "num_faults": Claim(
        CSV,
        "all methods: the fewest and the most faults",
        lambda rows: f"{rows['faults'].min()} to {rows['faults'].max()}",
    ),
    "failed": Claim(
        CSV,
        "all methods: the sum of failed and hung",
        lambda rows: {0: "no"}.get(int(rows["failed"].sum() + rows["hung"].sum()), "some"),
    ),
    "far": Claim(CSV, "all methods: the absolute value of accuracy - undisturbed_accuracy, at most 0.5 or not", far),
}

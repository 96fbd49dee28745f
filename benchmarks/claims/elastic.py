"""Claims about workers that are killed, stopped or started."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import pandas as pd

from benchmarks.claims.base import Claim


def sentence(rows: pd.DataFrame) -> str:
    """Return a sentence about kills with SGP."""
    own = rows[rows["method"] == "SGP"]
    killed, failed = sorted(own["killed"].unique()), own["survivors_that_failed"].sum()
    assert list(killed) == [1, 2, 3]
    assert set(own["num_workers"]) == {8}
    return textwrap.fill(
        f"In {len(own)} runs of eight workers that train by SGP, one to three workers were killed at once. "
        f"{'No' if failed == 0 else int(failed)} other worker failed. The slowest step after a kill took "
        f"{own['slowest_after_kill_ms'].max():.0f} ms, where the median step takes {own['median_ms'].median():.0f} ms.",
        width=118,
    )


CSV = ("elastic.csv",)
OTHERS = ("AllReduce", "torchft, all-reduce")
"""Methods of which all workers must begin anew after a kill."""


def lockstep(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of the methods that train on while a worker is gone."""
    return rows[~rows["method"].isin(OTHERS)]


def within(rows: pd.DataFrame) -> str:
    """Return in how many runs the slowest step after a kill is within the bound."""
    own = lockstep(rows)
    return f"{(own['met'] == 'yes').sum()} of {len(own)}"


def beyond(rows: pd.DataFrame) -> str:
    """Return the runs beyond the bound in words."""
    own = lockstep(rows)
    return " and ".join(
        f"{row.method.partition(',')[0]} takes {row.slowest_after_kill_ms:.0f} ms for {row.target_ms:.0f}"
        for row in own[own["met"] != "yes"].itertuples()
    )


def joined(rows: pd.DataFrame) -> str:
    """Return the slowest step after a restart of three methods."""
    worst = rows.groupby("method")["slowest_after_join_ms"].max()
    return ", ".join(f"{worst[name]:,.0f} ms with {name}" for name in ("SGP", "Overlap SGP", "DiLoCo"))


def reduced(store: str, form: str) -> Claim:
    """Return the claim about the slowest steps of all-reduce after a kill."""

    def query(rows: pd.DataFrame) -> str:
        own = rows[(rows["method"] == "AllReduce") & (rows["store"] == store)]["slowest_after_kill_ms"]
        return form.format(low=own.min(), high=own.max())

    return Claim(CSV, f"AllReduce, store {store}: the lowest and the highest slowest_after_kill_ms", query)


ELASTIC: Mapping[str, Claim] = {
    "sentence": Claim(CSV, "SGP, all runs: the highest slowest_after_kill_ms, and the median of median_ms", sentence),
    "survivors": Claim(
        CSV,
        "all methods but AllReduce and torchft: the sum of survivors_that_failed",
        lambda rows: {0: "No"}.get(int(lockstep(rows)["survivors_that_failed"].sum()), "Some"),
    ),
    "within": Claim(CSV, "all methods but AllReduce and torchft: the runs with met == yes, of all", within),
    "beyond": Claim(CSV, "the runs without met == yes: slowest_after_kill_ms and target_ms", beyond),
    "joined": Claim(CSV, "the highest slowest_after_join_ms of each method", joined),
    "reduced": reduced("lives", "{low:.0f} to {high:.0f} ms"),
    "reduced_store": reduced("killed", "up to {high:.0f} ms"),
}

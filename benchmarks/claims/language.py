"""Claims about the loss of the small language model, from gap.csv; each reads the rows of `losses`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd

from benchmarks.claims.base import Claim
from benchmarks.claims.default import losses, times
from benchmarks.studies.ends import gaps

CSV = ("gap.csv",)
WHERE = "task language, 320 steps, 8 workers, the mean test of three seeds at the tuned rate"
REDUCED, SGP, OVERLAP = "all-reduce", "SGP, GossipAdamW", "Overlap SGP, GossipAdamW"
MIXED = "SGP, momentum mixed too, GossipAdamW"
NUMBERS = ("none", "one", "two", "three")


def mean(change: str) -> Claim:
    """Return the claim about the mean loss of a change."""
    return Claim(CSV, f"{WHERE}: {change}", lambda gap: losses(gap).loc[change, "mean"], "{:.3f}")


def above(change: str, base: str = REDUCED, form: str = "{:.2f} nats") -> Claim:
    """Return the claim about the distance between the mean losses of two changes."""

    def query(gap: pd.DataFrame) -> float:
        found = losses(gap)["mean"]
        assert found[change] > found[base], f"{change} is better than {base}: the words of the page do not hold"
        return float(found[change] - found[base])

    return Claim(CSV, f"{WHERE}: {change} less {base}, at equal steps", query, form)


def beside_seeds(gap: pd.DataFrame) -> str:
    """Return in words how the mean of SGP lies beside the seeds of all-reduce."""
    rows = gap[(gap["task"] == "language") & (gap["steps"] == 320) & (gap["change"] == REDUCED)]
    found = losses(gap)
    seeds = rows[rows["rate"] == found.loc[REDUCED, "rate"]]["test"]
    count = int((seeds < found.loc[SGP, "mean"]).sum())
    return f"{NUMBERS[count]} of its {NUMBERS[len(seeds)]} seeds"


def share(of: Callable[[pd.DataFrame], pd.Series]) -> Callable[[pd.DataFrame], float]:
    """Return the query for the percentage of the gap of SGP with AdamW that second moments make."""

    def query(gap: pd.DataFrame) -> float:
        found = of(gap)
        plain, exact = found["SGP"], found["SGP, second moments of the mean gradient"]
        return float(100 * (plain - exact) / (plain - found[REDUCED]))

    return query


def at_one_rate(gap: pd.DataFrame) -> pd.Series:
    """Return the losses of the first seed at the rate 0.004, by change."""
    own = gap[(gap["task"] == "language") & (gap["steps"] == 320) & (gap["rate"] == 0.004) & (gap["run_seed"] == 1)]
    return own.drop_duplicates("change").set_index("change")["test"]


def long(method: str, workers: int) -> Claim:
    """Return the claim about the distance of a method from all-reduce after 3,000 steps."""

    def query(rows: pd.DataFrame) -> float:
        found = gaps(rows, "all-reduce, AdamW").set_index(["method", "workers"])
        return float(found.loc[(method, workers), "beyond"])

    where = f"{workers} workers, 3,000 steps, no tuning rows, the mean of the seeds of {method} less all-reduce, test"
    return Claim(("language.csv",), where, query, "{:.3f}")


LANGUAGE: Mapping[str, Claim] = {
    "long_sgp": long(SGP, 8),
    "long_mixed": long(MIXED, 8),
    "long_mixed_64": long(MIXED, 64),
    "reduced": mean(REDUCED),
    "reduced_seeds": Claim(
        CSV,
        "task language, 320 steps, all-reduce at the tuned rate: the lowest and the highest test of three seeds",
        lambda gap: "from {lowest:.3f} to {highest:.3f}".format(**losses(gap).loc[REDUCED]),
    ),
    "sgp": mean(SGP),
    "sgp_adamw": mean("SGP"),
    "two_peers": mean("SGP, 2 peers, GossipAdamW"),
    "local_4": mean("local SGD, 4, GossipAdamW"),
    "local_16": mean("local SGD, 16, GossipAdamW"),
    "sgp_gap": above(SGP),
    "osgp_gap": above(OVERLAP, form="{:.2f}"),
    "late": above(OVERLAP, SGP, "{:.3f}"),
    "beside_seeds": Claim(
        CSV, f"{WHERE}: SGP, GossipAdamW, and the seeds of all-reduce whose test is lower than this mean", beside_seeds
    ),
    "moments": Claim(
        CSV,
        f"{WHERE}: (SGP - SGP with the second moments of the mean gradient) / (SGP - all-reduce), of the tuned gap",
        share(lambda gap: losses(gap)["mean"]),
        "{:.0f} %",
    ),
    "moments_untuned": Claim(
        CSV,
        "the share of moments at the rate 0.004 with the first seed: an untuned gap",
        share(at_one_rate),
        "{:.0f} %",
    ),
    "osgp_share": Claim(
        ("default_cells.csv",),
        "rate_gbit 10: the median of fleet_step_ms of osgp over that of ddp, at equal steps; one run",
        lambda cells: times(cells).loc["osgp", 10.0] / times(cells).loc["ddp", 10.0],
        "{:.2f}",
    ),
}

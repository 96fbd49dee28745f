"""Claims about training with 176 outer steps, and about short fine-tuning with six."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd

from benchmarks.claims.base import Claim
from benchmarks.studies.ends import gaps, trainings

ALL, ADAPTERS = "all parameters", "LoRA"
BASE, DILOCO, AVERAGES = "all-reduce", "DiLoCo", "plain averages"


def with_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with the columns `part`, the method without its suffix, and `trained`, the trained parameters."""
    is_lora = rows["method"].str.endswith(f", {ADAPTERS}")
    return rows.assign(
        part=rows["method"].str.removesuffix(f", {ADAPTERS}"),
        trained=is_lora.map({True: ADAPTERS, False: ALL}),
    )


def short_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the test losses of each method at its best rate and at the best rate of all-reduce.

    A rate is the best one by the validation loss, in the mean over seeds.

    Args:
        rows: of outer_short.csv.

    Returns:
        trained, workers, method, rate, seeds, loss, lowest, highest; own and equal (per cent above all-reduce, in the
        mean over seeds: each method at its best rate, and both at the best rate of all-reduce).
    """
    found = []
    for (trained, workers), cell in with_parts(trainings(rows)).groupby(["trained", "workers"], sort=False):
        best = {name: own.groupby("rate")["validation"].mean().idxmin() for name, own in cell.groupby("part")}
        ends = cell.set_index(["part", "rate", "seed"])["test"].sort_index()
        base = ends[BASE, best[BASE]]
        for name, rate in best.items():
            own, equal = ends[name, rate], ends[name, best[BASE]]
            above = (100 * (each / base - 1).mean() for each in (own, equal))
            found.append((trained, workers, name, rate, len(own), own.mean(), own.min(), own.max(), *above))
    names = ["trained", "workers", "method", "rate", "seeds", "loss", "lowest", "highest", "own", "equal"]
    return pd.DataFrame(found, columns=names).sort_values(["trained", "workers", "loss"], ascending=[False, True, True])


def above(method: str, column: str) -> Callable[[pd.DataFrame], float]:
    """Return the query of a method with two workers: per cent above all-reduce, by a column of `short_ends`."""

    def query(rows: pd.DataFrame) -> float:
        found = short_ends(rows).set_index(["trained", "workers", "method"])[column]
        return float(found.loc[(ALL, 2, method)])

    return query


LONG_STEPS, LONG_WORKERS = 88_000, 4


def alone(rows: pd.DataFrame) -> float:
    """Return the distance of one worker alone from all-reduce of `LONG_WORKERS`, of the seeds that both have."""
    last = rows[(rows["step"] == LONG_STEPS) & ~rows["is_tuning"]]
    own, base = (
        last[(last["method"] == method) & (last["workers"] == workers)].set_index("seed")["test"]
        for method, workers in (("one worker alone", 1), (BASE, LONG_WORKERS))
    )
    return float((own - base).dropna().mean())


def long(method: str) -> Claim:
    """Return the claim about the distance of a method from all-reduce after 176 outer steps."""

    def query(rows: pd.DataFrame) -> float:
        found = gaps(rows, BASE, LONG_STEPS).set_index(["method", "workers"])
        return float(found.loc[(method, LONG_WORKERS), "beyond"])

    where = f"{LONG_WORKERS} workers, {LONG_STEPS:,} steps, no tuning rows: test of {method} less that of {BASE}"
    return Claim(("outer_long.csv",), f"{where} with equal seeds, the mean", query, "{:.3f}")


_SHORT: Mapping[str, Claim] = {
    name: Claim(
        ("outer_short.csv",),
        f"{method}, 2 workers, all parameters trained, at {at}: per cent of loss above all-reduce, mean over seeds",
        above(method, column),
        "{:+.1f} %",
    )
    for name, method, column, at in (
        ("short_diloco", DILOCO, "equal", "the best rate of all-reduce"),
        ("short_averages", AVERAGES, "equal", "the best rate of all-reduce"),
        ("short_diloco_tuned", DILOCO, "own", "the best rate of each"),
    )
}
_ALONE = Claim(
    ("outer_long.csv",),
    f"{LONG_STEPS:,} steps, no tuning rows: test of one worker alone less that of {BASE} with {LONG_WORKERS} workers, "
    "equal seeds",
    alone,
    "{:.3f}",
)
OUTER: Mapping[str, Claim] = {
    **_SHORT,
    "long_diloco": long(DILOCO),
    "long_averages": long("local SGD"),
    "long_alone": _ALONE,
}

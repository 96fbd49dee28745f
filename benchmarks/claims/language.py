"""Claims about the loss of the small language model by gossip, with 2 to 64 workers."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.claims.base import Claim
from benchmarks.studies.ends import gaps

CSV, TWO = ("language.csv",), ("language_two.csv",)
STEPS = 3000
BASE, SGP, MIXED = "all-reduce, AdamW", "SGP, GossipAdamW", "SGP, momentum mixed too, GossipAdamW"
NAMES: Mapping[str, str] = {
    "sgp": SGP,
    "mixed": MIXED,
    "two_mixed": "SGP, 2 peers, momentum mixed too, GossipAdamW",
    "local2_mixed": "local SGD, H = 2, momentum mixed too, GossipAdamW",
    "local4_mixed": "local SGD, H = 4, momentum mixed too, GossipAdamW",
    "local4_coded": "local SGD, H = 4, 4 bits, momentum mixed too, GossipAdamW",
    "osgp": "Overlap SGP, GossipAdamW",
    "local": "local SGD, H = 10, GossipAdamW",
    "diloco": "DiLoCo, H = 30, GossipAdamW",
    "sgp_adamw": "SGP, AdamW",
    "local_adamw": "local SGD, H = 10, AdamW",
    "osgp_adamw": "Overlap SGP, AdamW",
}
"""By the beginning of the name of a claim."""


def at_equal_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `gaps` after `STEPS` steps."""
    return gaps(rows, BASE, STEPS)


def mean_test(method: str, workers: int) -> Claim:
    """Return the claim about the mean test loss of a method."""
    where = f"{workers} workers, {STEPS:,} steps, no tuning rows: the mean test of the seeds of {method}"
    return Claim(CSV, where, lambda rows: _of(rows, method, workers)["test"], "{:.3f}")


def above(method: str, workers: int) -> Claim:
    """Return the claim about the distance of a method from all-reduce, with its sign."""
    where = f"{workers} workers, {STEPS:,} steps, no tuning rows: test of {method} less that of {BASE} with equal seeds"
    csv = TWO if workers == 2 else CSV
    return Claim(csv, f"{where}, the mean", lambda rows: _of(rows, method, workers)["beyond"], "{:.3f}")


def moments(rows: pd.DataFrame) -> float:
    """Return the percentage of the distance of SGP with AdamW that GossipAdamW takes away, with 8 workers."""
    found = _common(rows)
    return float(100 * (found[NAMES["sgp_adamw"]] - found[SGP]) / (found[NAMES["sgp_adamw"]] - found[BASE]))


def adamw(method: str) -> Claim:
    """Return the claim about the distance of SGP from all-reduce by an optimizer, on the seeds of SGP by AdamW."""
    where = f"8 workers, {STEPS:,} steps: test of {method} less that of {BASE}, the seeds that SGP by AdamW has too"
    return Claim(CSV, where, lambda rows: _common(rows)[method] - _common(rows)[BASE], "{:.3f}")


def _common(rows: pd.DataFrame) -> pd.Series:
    """Return the mean test losses of all-reduce and of SGP by both optimizers, over the seeds that all three have."""
    last = rows[(rows["workers"] == 8) & (rows["steps"] == STEPS) & (rows["step"] == STEPS) & ~rows["is_tuning"]]
    return last.pivot(index="seed", columns="method", values="test")[[BASE, SGP, NAMES["sgp_adamw"]]].dropna().mean()


def _of(rows: pd.DataFrame, method: str, workers: int) -> pd.Series:
    return at_equal_steps(rows).set_index(["method", "workers"]).loc[(method, workers)]


SHOWN: Mapping[str, str] = {
    "mixed": "SGP, mixed moments",
    "two_mixed": "two peers, mixed moments",
    "local2_mixed": "Local SGD, H = 2, mixed moments",
    "local4_mixed": "Local SGD, H = 4, mixed moments",
    "local4_coded": "Local SGD, H = 4, 4 bits, mixed moments",
    "sgp": "SGP",
    "osgp": "Overlap SGP",
    "local": "Local SGD, H = 10",
    "diloco": "DiLoCo, H = 30",
}
"""The columns of `by_workers`, by the names of `NAMES`."""


def by_workers(two: pd.DataFrame, rows: pd.DataFrame) -> str:
    """Return a table of the distances from all-reduce, a row for each number of workers."""
    found = at_equal_steps(pd.concat([two, rows])).set_index(["workers", "method"])
    lines = [f"| workers | {' | '.join(SHOWN.values())} |", "|---:|" + "---:|" * len(SHOWN)]
    for workers in found.index.unique("workers"):
        own = found.loc[workers]["beyond"]
        cells = (f"{own[NAMES[name]]:+.3f}" if NAMES[name] in own else "" for name in SHOWN)
        lines.append(f"| {workers} | {' | '.join(cells)} |")
    return "\n".join(lines)


SEARCHED: Mapping[str, str] = {
    "sgp": SGP,
    "mixed": MIXED,
    "two": "SGP, 2 peers, GossipAdamW",
    "two_mixed": "SGP, 2 peers, momentum mixed too, GossipAdamW",
    "exact": "exact average in each step, GossipAdamW",
}
"""Methods of the search, by the end of the name of a claim."""


def search(method: str) -> Claim:
    """Return the claim about the distance of a method from all-reduce in the search."""

    def query(rows: pd.DataFrame) -> float:
        found = gaps(rows, BASE, int(rows["steps"].max())).set_index("method")
        return float(found.loc[method, "beyond"])

    where = f"64 workers, 600 steps, one rate: test of {method} less that of {BASE}, one seed"
    return Claim(("language_search.csv",), where, query, "{:.3f}")


SAID = (
    *(("mixed", workers) for workers in (8, 16)),
    *(("local2_mixed", workers) for workers in (8, 16, 32, 64)),
    ("two_mixed", 16),
    *(("local4_coded", workers) for workers in (8, 16)),
    ("local4_mixed", 8),
    *((name, 8) for name in ("sgp", "osgp", "local", "diloco")),
    *((name, 2) for name in ("sgp", "sgp_adamw", "osgp", "osgp_adamw", "local", "local_adamw", "local4_coded")),
)
"""The names and the numbers of workers of the distances that pages say."""
LANGUAGE: Mapping[str, Claim] = {
    "by_workers": Claim(
        (*TWO, *CSV),
        f"{STEPS:,} steps, no tuning rows: test of each method less that of {BASE}, equal workers and seeds, the mean",
        by_workers,
    ),
    "reduced_8": mean_test(BASE, 8),
    **{f"{name}_{workers}": above(NAMES[name], workers) for name, workers in SAID},
    **{f"search_{name}": search(method) for name, method in SEARCHED.items()},
    "adamw_8": adamw(NAMES["sgp_adamw"]),
    "gossip_adamw_8": adamw(SGP),
    "moments": Claim(
        CSV,
        f"8 workers, {STEPS:,} steps: (SGP, AdamW - SGP, GossipAdamW) / (SGP, AdamW - all-reduce), test, common seeds",
        moments,
        "{:.0f} %",
    ),
}
"""A name of `NAMES` with a number of workers has the nats of the test split above all-reduce."""

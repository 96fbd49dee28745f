"""How far gossip ends below all-reduce on CIFAR-10 by SGD, by the number of workers, in all studies that have both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import pandas as pd

from benchmarks.claims.base import Claim
from benchmarks.record import RESULTS
from benchmarks.sections import address
from benchmarks.studies.ends import ends, trainings

BASE = "all-reduce"
KEY = ["workers", "steps", "batch"]


@dataclass(frozen=True)
class ImageStudy:
    """A study of CIFAR-10 that has all-reduce and SGP.

    Attributes:
        page: the name of its page and of its CSV file.
        model: the model.
        optimizer: the optimizer, each with momentum 0.9.
        batch_size: the images of a worker in a step.
    """

    page: str
    model: str
    optimizer: str
    batch_size: int


IMAGE_STUDIES = (
    ImageStudy("worker_numbers", "two layers, BatchNorm", "SGD, Nesterov", 8),
    ImageStudy("accuracy_bytes", "two layers", "SGD, Nesterov", 8),
    ImageStudy("resnet", "ResNet-20, BatchNorm", "SGD, untuned", 16),
)
"""The studies, in the order of the table."""


def trained(study: ImageStudy, rows: pd.DataFrame) -> pd.DataFrame:
    """Return workers, steps, batch, seed, method and accuracy of each training at its tuned rate.

    Args:
        study: the study.
        rows: of its CSV file.
    """
    return trainings(rows).assign(batch=study.batch_size)


def gaps(last: pd.DataFrame) -> pd.DataFrame:
    """Return how many points methods end below all-reduce with the same seed.

    Args:
        last: see `trained`.

    Returns:
        workers, steps, batch and method, with seeds, accuracy, gap (the mean over seeds), and the lowest and the
        highest gap of a seed.
    """
    base = last[last["method"] == BASE].set_index([*KEY, "seed"])["accuracy"]
    both = last.join(base.rename("base"), on=[*KEY, "seed"], how="inner")
    both["gap"] = both["base"] - both["accuracy"]
    grouped = both.groupby([*KEY, "method"])
    spread = grouped["gap"].agg(seeds="count", gap="mean", lowest="min", highest="max")
    return spread.assign(accuracy=grouped["accuracy"].mean()).reset_index()


def points(gap: float) -> str:
    """Return a gap with its sign, and no sign of minus before zero."""
    return f"{round(gap, 1) + 0.0:+.1f}"


def with_spread(row: pd.Series) -> str:
    """Return a gap with the lowest and the highest gap of a seed: "+0.7 (+0.2 to +1.1)"."""
    spread = f" ({points(row['lowest'])} to {points(row['highest'])})"
    return points(row["gap"]) + (spread if row["seeds"] > 1 else "")


SHOWN = ("SGP", "SGP, 2 peers", "Overlap SGP", "SGP, momentum mixed too")
"""The methods of the table."""


def every_study(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return the table of all studies, a row for each number of workers, steps and batch.

    Args:
        tables: the rows of the studies by page; a study may be missing.
    """
    heads = ("workers", "model", "optimizer", "batch", "images read", "seeds", "all-reduce, %", *SHOWN)
    lines = [f"| {' | '.join(heads)} |", "|---:|---|---|" + "---:|" * (len(heads) - 3)]
    found: list[tuple[int, str]] = []
    for study in IMAGE_STUDIES:
        if study.page not in tables:
            continue
        for (workers, steps, batch), own in gaps(trained(study, tables[study.page])).groupby(KEY):
            by_method = own.set_index("method")
            if not {BASE, "SGP"} <= set(by_method.index):
                continue
            cells = (
                *(str(workers), f"[{study.model}]({address(study.page)})", study.optimizer, str(batch)),
                *(f"{workers * steps * batch:,}", str(by_method.loc["SGP", "seeds"])),
                f"{by_method.loc[BASE, 'accuracy']:.1f}",
                *(with_spread(by_method.loc[name]) if name in by_method.index else "" for name in SHOWN),
            )
            found.append((workers, f"| {' | '.join(cells)} |"))
    return "\n".join([*lines, *(line for _, line in sorted(found, key=lambda each: each[0]))])


def of_sgp(tables: Mapping[str, pd.DataFrame], workers: int) -> pd.DataFrame:
    """Return `gaps` of SGP with a number of workers, of each study, steps and batch with several seeds."""
    every = pd.concat([gaps(trained(each, tables[each.page])) for each in IMAGE_STUDIES if each.page in tables])
    return every[(every["method"] == "SGP") & (every["workers"] == workers) & (every["seeds"] > 1)]


def measured() -> tuple[str, ...]:
    """Return the pages of the studies that have rows."""
    return tuple(each.page for each in IMAGE_STUDIES if (RESULTS / f"{each.page}.csv").is_file())


def sgp(workers: int) -> Claim:
    """Return the claim about the points by which SGP ends below all-reduce, over all studies."""
    pages = measured()

    def text(*rows: pd.DataFrame) -> str:
        found = of_sgp(dict(zip(pages, rows, strict=True)), workers)["gap"]
        low, high = (f"{round(x, 1) + 0.0:.1f}" for x in (found.min(), found.max()))
        return low if low == high else f"{low} to {high}"

    where = f"{workers} workers, images, several seeds: the accuracy of all-reduce less that of SGP with the same seed"
    rates = "mean over seeds, at tuned rates but for ResNet-20; the lowest and the highest of all studies"
    return Claim(tuple(f"{name}.csv" for name in pages), f"{where}, {rates}", text)


def by_workers(rows: pd.DataFrame, method: str) -> str:
    """Return the points by which a method ends below all-reduce, by the number of workers.

    Args:
        rows: of worker_numbers.csv.
        method: the name.
    """
    found = ends(rows, BASE)
    own = found[found["method"] == method].sort_values("workers")
    texts = [f"{round(row.gap, 1) + 0.0:.1f} with {row.workers}" for row in own.itertuples()]
    return f"{', '.join(texts[:-1])} and {texts[-1]} workers"


def times_bytes(rows: pd.DataFrame, method: str, workers: int) -> float:
    """Return the bytes of a worker over those of all-reduce.

    Args:
        rows: of worker_numbers.csv.
        method: the name.
        workers: their number.
    """
    found = ends(rows, BASE)
    megabytes = found[found["workers"] == workers].set_index("method")["megabytes"]
    return float(megabytes[method] / megabytes[BASE])


def distances(rows: pd.DataFrame) -> str:
    """Return the largest consensus distance of SGP in a run, by the number of workers.

    Args:
        rows: of worker_numbers.csv.
    """
    own = rows[~rows["is_tuning"] & (rows["method"] == "SGP")]
    peaks = own.groupby(["workers", "seed"])["consensus"].max().groupby("workers").mean()
    texts = [f"{peak:.1f} with {workers}" for workers, peak in peaks.items()]
    return f"{', '.join(texts[:-1])} and {texts[-1]} workers"


IMAGES: Mapping[str, Claim] = {
    **{f"sgp_{workers}": sgp(workers) for workers in (8, 16, 32)},
    **{
        name: Claim(
            ("worker_numbers.csv",),
            f"{method}: the accuracy of all-reduce less that of it at tuned rates, mean over the seeds that both have",
            partial(by_workers, method=method),
        )
        for name, method in {"qgdsgdm": "QG-DSGDm", "wagma": "WAGMA-SGD"}.items()
    },
    "wagma_bytes": Claim(
        ("worker_numbers.csv",),
        "32 workers: megabytes of WAGMA-SGD over those of all-reduce, at the last step",
        partial(times_bytes, method="WAGMA-SGD", workers=32),
        "{:.1f}",
    ),
    "distance": Claim(
        ("worker_numbers.csv",),
        "SGP at tuned rates: the largest consensus distance at an evaluation of a run, the mean over seeds",
        distances,
    ),
}
"""Claims about images by SGD."""

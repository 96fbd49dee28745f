"""Goodput against the number of workers, with failures: pauses that were measured, in a formula.

    python -m benchmarks.studies goodput --output benchmarks/results/goodput.csv

The goodput is the useful part of the time of all workers, beside a run without failures. A worker fails once in M on
average, so n workers fail n times in M. At a failure all workers lose a pause, and the worker that failed is missing
until it is back:

    goodput = 1 / (1 + n pause / M) (1 - min(1, missing / M))

A job that restarts loses the work since the last checkpoint, every C seconds. Failures come at random, so with a
failure every m = M / n and a restart of R seconds the time from one checkpoint to the next is (m + R) (exp(C / m) - 1)
on average. The pause of a failure is the time beyond C, by the failures in C.

Pauses are those of `elastic_scale.csv` and `elastic.csv`; see `pauses`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks.record import DTYPES, RESULTS
from benchmarks.studies.computed import Cell, Computed

WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024)
GPUS = 8
"""Of a worker."""
LLAMA_HOURS = 54 * 24 * 16_384 / 419
"""Hours between unexpected interruptions of one GPU in the training of Llama 3: 419 in 54 days with 16,384 GPUs."""
WORKER_HOURS = {"Llama 3": LLAMA_HOURS / GPUS, "100 times as often": LLAMA_HOURS / GPUS / 100, "one an hour": 1.0}
"""Hours between failures of a worker, by name."""
CHECKPOINT_SECONDS = (600.0, 30.0)
"""Between checkpoints of jobs that restart, an assumption; writing one takes no time here."""
START_SECONDS = 15.0
"""From the failure of a worker, or of a job, until it is started and trains again: an assumption."""


class Pause(NamedTuple):
    """What a failure costs, in seconds.

    all_seconds: the time that all workers lose, as a function of their number and of M.
    missing_seconds: the time for which the worker that failed is missing.
    """

    all_seconds: Callable[[int, float], float]
    missing_seconds: float


def goodput(num_workers: int, between_seconds: float, pause: Pause) -> float:
    """Return the useful part of the time.

    Args:
        num_workers: n.
        between_seconds: M, the time between failures of one worker.
        pause: the cost of a failure.
    """
    lost = num_workers * pause.all_seconds(num_workers, between_seconds) / between_seconds
    return (1 - min(1.0, pause.missing_seconds / between_seconds)) / (1 + lost)


def pauses() -> dict[str, Pause]:
    """Return the costs of a failure by system.

    - A membership, with SGP: the slowest step after a kill less the median step, and likewise after the join.
    - torchft: the slowest step after a kill less the median step, most of it the time limit for heartbeats, 5 s.
    - DDP: the job starts again, and repeats the work since its last checkpoint.

    Pauses after a kill were measured with 8, 16 and 32 workers. Beyond 32 they go on along the line from 16 to 32,
    although two cores shared by all processes make most of this growth.
    """
    scale, elastic = (pd.read_csv(RESULTS / f"{name}.csv", dtype=DTYPES) for name in ("elastic_scale", "elastic"))
    steps = scale.set_index(["method", "num_workers"])
    killed = (steps["slowest_after_kill_ms"] - steps["median_ms"]) / 1e3
    lives = elastic[(elastic["store"] == "lives") & (elastic["method"] == "SGP")]
    joined = float((lives["slowest_after_join_ms"] - lives["median_ms"]).median()) / 1e3
    torchft = "torchft, all-reduce"
    return {
        "SGP with a membership": Pause(partial(_along, killed["SGP"], joined), START_SECONDS),
        torchft: Pause(partial(_along, killed[torchft], 0.0), START_SECONDS),
        **{f"DDP, a checkpoint every {c:g} s": Pause(partial(_restart, c), 0.0) for c in CHECKPOINT_SECONDS},
    }


def _restart(checkpoint_seconds: float, num_workers: int, between_seconds: float) -> float:
    """Return the mean time that a failure costs a job that restarts."""
    between = between_seconds / num_workers
    with np.errstate(over="ignore"):
        whole = (between + START_SECONDS) * np.expm1(checkpoint_seconds / between)
    return float((whole - checkpoint_seconds) * between / checkpoint_seconds)


def _along(measured: pd.Series, more: float, num_workers: int, between_seconds: float) -> float:
    """Return a pause between the measured ones, or beyond them along the last line; and more seconds."""
    counts, seconds = measured.index.to_numpy(), measured.to_numpy()
    slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
    beyond = max(0.0, num_workers - counts[-1]) * slope
    return float(np.interp(num_workers, counts, seconds) + beyond + more)


def cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each time between failures, system and number of workers."""
    for failures, hours in WORKER_HOURS.items():
        for system, pause in pauses().items():
            for n in WORKERS:
                yield {"failures": failures, "system": system, "workers": n}, partial(_row, n, 3600 * hours, pause)


def _row(num_workers: int, between_seconds: float, pause: Pause) -> Mapping[str, Any]:
    return {
        "worker_hours": round(between_seconds / 3600, 3),
        "pause_seconds": round(pause.all_seconds(num_workers, between_seconds), 4),
        "missing_seconds": pause.missing_seconds,
        "goodput": round(goodput(num_workers, between_seconds, pause), 6),
    }


GOODPUT: Mapping[str, Computed] = {
    "goodput": Computed(
        cells, ("failures", "system", "workers", "worker_hours", "pause_seconds", "missing_seconds", "goodput")
    )
}
"""The study by name."""

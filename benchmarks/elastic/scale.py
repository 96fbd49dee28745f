"""How long 8, 16 and 32 workers take to begin, to go on without one that was killed, and to take one in."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.elastic.kills import Killing, killing
from benchmarks.elastic.worker import ElasticJob, StoreProcess


def measure(job: ElasticJob, store: StoreProcess, folder: Path) -> dict[str, Any]:
    """One row: the first rank is killed, and started again."""
    with killing(job, 1, store, folder) as run:
        return {"method": job.method, "num_workers": job.num_workers, "slept_ms": job.step_ms, **figures(run)}


def figures(run: Killing) -> dict[str, Any]:
    """From what workers have said; times are those of the last of them."""
    steps = [event for worker in run.alive for event in worker.events("step")]
    after = [event["ms"] for event in steps if run.killed_at < event["at"] < run.started_at]
    ready = max(event["at"] for worker in run.workers for event in worker.events("ready"))
    first = max(worker.events("step")[0]["at"] for worker in run.workers)
    return {
        "seconds_to_begin": round(first - ready, 2),
        "median_ms": round(statistics.median(event["ms"] for event in steps if event["at"] < run.killed_at), 1),
        "seconds_to_form": _seconds_to_form(run),
        "slowest_after_kill_ms": round(max(after, default=float("nan")), 1),
        "seconds_to_join": round(run.newcomer.events("step")[0]["at"] - run.newcomer.events("ready")[0]["at"], 2),
        "survivors_that_failed": sum(worker.has_failed for worker in run.alive),
    }


def _seconds_to_form(run: Killing) -> float | None:
    """From the kill until the last worker begins the next generation; None: the method names no generations."""
    changes = [
        [event["at"] for event in worker.events("change") if run.killed_at < event["at"] < run.started_at]
        for worker in run.alive
    ]
    if not all(changes):
        return None
    return round(max(times[-1] for times in changes) - run.killed_at, 2)

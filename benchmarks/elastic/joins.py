"""What a join costs the donor: its slowest step while it gives its state, and the bytes of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.elastic.worker import ElasticJob, WorkerProcess, killed_at_the_end, make_model, until


def state_bytes(width: int) -> int:
    """Of the parameters and the momentum of each."""
    return 2 * sum(x.numel() * torch.float32.itemsize for x in make_model(width, 0).parameters())


def measure(job: ElasticJob, num_joins: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each of several workers that come one after the other."""
    rows: list[dict[str, Any]] = []
    with killed_at_the_end() as workers:
        workers += [WorkerProcess(job, folder, f"founder_{i}") for i in range(job.num_workers)]
        until(workers, 100)
        for i in range(num_joins):
            newcomer = WorkerProcess(job, folder, f"newcomer_{i}")
            until([newcomer], max(worker.last_step() for worker in workers) + 50)
            (donor,) = (worker for worker in workers if any(e["at"] > _ready(newcomer) for e in worker.events("gave")))
            gave = donor.events("gave")[-1]
            steps = [event for event in donor.events("step") if event["step"] > 20]
            served = [e["ms"] for e in steps if _overlap(e, gave)]
            others = [e["ms"] for e in steps if not any(_overlap(e, each) for each in donor.events("gave"))]
            median = statistics.median(others)
            first = newcomer.events("step")[0]
            begins = first["at"] - first["ms"] / 1000
            rows.append(
                {
                    "method": job.method,
                    "num_workers": len(workers),
                    "state_bytes": state_bytes(job.width),
                    "sent_bytes": gave["num_bytes"],
                    "seconds": round(gave["at"] - gave["start"], 3),
                    "rounds_until_joined": sum(_ready(newcomer) < e["at"] < begins for e in donor.events("step")),
                    "median_ms": round(median, 1),
                    "slowest_alone_ms": round(max(others), 1),
                    "slowest_serving_ms": round(max(served), 1),
                    "ratio": round(max(served) / median, 3),
                }
            )
            workers.append(newcomer)
    return rows


def _overlap(step: Mapping[str, Any], gave: Mapping[str, Any]) -> bool:
    """Whether a part of the state was given during a part of the step."""
    return bool(step["at"] - step["ms"] / 1000 < gave["at"] and gave["start"] < step["at"])


def _ready(worker: WorkerProcess) -> float:
    return float(worker.events("ready")[0]["at"])

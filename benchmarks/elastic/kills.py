"""Workers that are killed, and one that is started again."""

from __future__ import annotations

import signal
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.elastic.worker import ElasticJob, WorkerProcess, killed_at_the_end, until


def measure(job: ElasticJob, kills: int, folder: Path) -> dict[str, Any]:
    """One row: the pause of those who live."""
    with killed_at_the_end() as workers:
        workers += [WorkerProcess(job, folder, f"{kills}_{i}") for i in range(job.num_workers)]
        until(workers, 100)
        killed_at = time.time()
        for worker in workers[:kills]:
            worker.process.send_signal(signal.SIGKILL)
        alive = workers[kills:]
        last = max(worker.last_step() for worker in alive)
        until(alive, last + 100)
        started_at = time.time()
        newcomer = WorkerProcess(job, folder, f"{kills}_again")
        workers.append(newcomer)
        until([newcomer], last + 101)
        until([newcomer, *alive], newcomer.last_step() + 50)
        steps = [event for worker in alive for event in worker.events("step")]
        ready, begins = newcomer.events("ready")[0], newcomer.events("begins")[0]
        waited = sum(ready["at"] < event["at"] < begins["at"] for event in alive[0].events("step"))
        return {
            "method": job.method,
            "num_workers": job.num_workers,
            "killed": kills,
            "median_ms": round(statistics.median(e["ms"] for e in steps if e["at"] < killed_at), 1),
            "slowest_before_ms": round(max(e["ms"] for e in steps if e["step"] > 10 and e["at"] < killed_at), 1),
            "slowest_after_kill_ms": round(max(e["ms"] for e in steps if killed_at < e["at"] < started_at), 1),
            "slowest_after_join_ms": round(max(e["ms"] for e in steps if e["at"] > ready["at"]), 1),
            "rounds_until_joined": waited,
            "survivors_that_failed": sum(worker.has_failed for worker in alive),
        }

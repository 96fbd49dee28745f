"""Workers that are killed, alone or with the store, and one that is started again."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.elastic import torchft_worker
from benchmarks.elastic.worker import (
    ElasticJob,
    NetworkHost,
    StoreProcess,
    WorkerProcess,
    killed_at_the_end,
    train,
    until,
    until_or_failed,
)


def start_store(method: str, host: NetworkHost | None = None) -> StoreProcess:
    """What the workers of a method meet in; see `StoreProcess`."""
    return StoreProcess(torchft_worker.LIGHTHOUSE, host) if method == torchft_worker.NAME else StoreProcess(host=host)


@dataclass(frozen=True)
class Killing:
    """A run in which workers were killed, and one was started again.

    Attributes:
        workers: those of the beginning.
        alive: of these, those that were not killed.
        newcomer: the one that was started again.
        killed_at: when, in seconds since 1970.
        started_at: when the newcomer was started.
    """

    workers: Sequence[WorkerProcess]
    alive: Sequence[WorkerProcess]
    newcomer: WorkerProcess
    killed_at: float
    started_at: float


@contextlib.contextmanager
def killing(
    job: ElasticJob,
    kills: int,
    store: StoreProcess,
    folder: Path,
    *,
    with_store: bool = False,
    hosts: Sequence[NetworkHost] = (),
    num_steps: int = 100,
) -> Iterator[Killing]:
    """Train, kill and start again; workers end with the block.

    Args:
        job: of all workers.
        kills: how many die: rank 0, 1, ...
        store: of the job.
        folder: for what workers print.
        with_store: whether it is killed with them. It comes back, empty, when a worker is started again.
        hosts: one for each worker; none: all live on this machine. Who is started again has that of who died.
        num_steps: before the kill, and from it to the start of the newcomer.
    """
    body: Callable[[ElasticJob], None] = torchft_worker.train if job.method == torchft_worker.NAME else train
    name = f"{job.num_workers}_{kills}_{with_store}"
    with killed_at_the_end() as workers:
        places: Sequence[NetworkHost | None] = hosts or [None] * job.num_workers
        workers += [WorkerProcess(job, folder, f"{name}_{i}", body, host) for i, host in enumerate(places)]
        first = list(workers)
        until(workers, num_steps)
        by_rank = sorted(workers, key=lambda worker: worker.events("step")[-1]["rank"])
        killed_at = time.time()
        if with_store:
            store.kill()
        for worker in by_rank[:kills]:
            worker.process.kill()
        alive = by_rank[kills:]
        last = max(worker.last_step() for worker in alive)
        until_or_failed(alive, last + num_steps)
        started_at = time.time()
        if with_store:
            store.start()
        newcomer = WorkerProcess(job, folder, f"{name}_again", body, places[first.index(by_rank[0])])
        workers.append(newcomer)
        if not all(worker.has_failed for worker in alive):
            until([newcomer], last + num_steps + 1)
            until_or_failed([newcomer, *alive], newcomer.last_step() + 50)
        yield Killing(first, alive, newcomer, killed_at, started_at)


def measure(job: ElasticJob, kills: int, store: StoreProcess, folder: Path, *, with_store: bool) -> dict[str, Any]:
    """One row: the pause of those who live; see `killing`."""
    with killing(job, kills, store, folder, with_store=with_store) as run:
        return {
            "method": job.method,
            "num_workers": job.num_workers,
            "killed": kills,
            "store": "killed" if with_store else "lives",
            **figures(run.alive, run.newcomer, run.killed_at, run.started_at),
        }


def figures(
    alive: Sequence[WorkerProcess], newcomer: WorkerProcess, killed_at: float, started_at: float
) -> dict[str, Any]:
    """From what workers have said; a slowest step is that of any worker which lived."""
    steps = [event for worker in alive for event in worker.events("step")]
    median = statistics.median(event["ms"] for event in steps if event["at"] < killed_at)
    target = 2 * median + 50
    after = [event["ms"] for event in steps if killed_at < event["at"] < started_at]
    for worker in (*alive, newcomer):
        if worker.has_failed:
            print(f"{worker.path.name} failed: {worker.error()}", file=sys.stderr)
    failed = [worker for worker in alive if worker.has_failed]
    for worker in failed:
        began = worker.events("step")[-1]["at"]  # a step that did not end
        after += [1000 * (event["at"] - began) for event in worker.events("failed")]
    slowest = max(after, default=float("nan"))
    return {
        "median_ms": round(median, 1),
        "slowest_before_ms": round(max(e["ms"] for e in steps if e["step"] > 10 and e["at"] < killed_at), 1),
        "target_ms": round(target, 1),
        "slowest_after_kill_ms": round(slowest, 1),
        "met": "yes" if slowest <= target and not failed else "no",
        "survivors_that_failed": len(failed),
        **_join(alive, newcomer),
    }


def _join(alive: Sequence[WorkerProcess], newcomer: WorkerProcess) -> dict[str, Any]:
    """What the others did meanwhile; empty where it has not joined."""
    own = newcomer.events("step")
    others = next((worker.events("step") for worker in alive if not worker.has_failed), [])
    if not own or not others:
        return {"slowest_after_join_ms": None, "rounds_until_joined": None}
    ready, begins = newcomer.events("ready")[0]["at"], own[0]["at"] - own[0]["ms"] / 1000
    slowest = max(event["ms"] for worker in alive for event in worker.events("step") if event["at"] > ready)
    return {
        "slowest_after_join_ms": round(slowest, 1),
        "rounds_until_joined": sum(ready < event["at"] < begins for event in others),
    }

"""Workers that are killed, alone or with the store, and one that is started again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks.elastic.job import Job

Lines: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Killing:
    """What workers have written of a run in which some were killed, and one was started again.

    Args:
        alive: the steps of each worker of the beginning that was not killed.
        newcomer: the steps of the worker that was started again.
        failed_at: when a worker of `alive` failed, for each that did.
        ready_at: when the newcomer was ready to join.
        killed_at: when workers were killed, in seconds since 1970.
        started_at: when the newcomer was started.
        formed_at: when the last of `alive` began the generation without the killed ones; None: the method names none.
        seconds_to_begin: from when the last worker was ready until the last took its first step.
    """

    alive: Sequence[Lines]
    newcomer: Lines
    failed_at: Sequence[float]
    ready_at: float
    killed_at: float
    started_at: float
    formed_at: float | None
    seconds_to_begin: float

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """Of all workers that were not killed."""
        return [line for own in self.alive for line in own]

    @property
    def median_ms(self) -> float:
        """Of the steps before the kill."""
        return statistics.median(line["ms"] for line in self.steps if line["at"] < self.killed_at)

    @property
    def slowest_after_ms(self) -> float:
        """Of the steps after the kill, those that failed included; NaN: there is none."""
        times = [line["ms"] for line in self.steps if self.killed_at < line["at"] < self.started_at]
        last = max((line["at"] for line in self.steps), default=self.killed_at)
        return max([*times, *(1000 * (at - last) for at in self.failed_at)], default=float("nan"))


def kill(job: Job, kills: int, *, with_store: bool = False, num_steps: int = 100) -> Killing:
    """Train, kill some workers and start one again.

    Args:
        job: before its first worker.
        kills: how many die: rank 0, 1, ...
        with_store: whether the store is killed with them. It comes back, empty, when a worker is started again.
        num_steps: before the kill, and from it to the start of the newcomer.

    Raises:
        RuntimeError: a worker fails before the kill, or one hangs.
    """
    workers = job.start(job.training.num_workers)
    job.until_step(workers, num_steps)
    if job.backend.errors:
        raise RuntimeError(f"got workers that failed before the kill: {job.backend.errors}")
    ready = max(job.lines(worker, "ready")[0]["at"] for worker in workers)
    first = max(job.lines(worker)[0]["at"] for worker in workers)
    by_rank = sorted(workers, key=lambda worker: job.lines(worker)[-1]["rank"])
    killed_at = time.time()
    if with_store:
        job.backend.kill_store()
    for worker in by_rank[:kills]:
        job.backend.kill(worker)
    alive = by_rank[kills:]
    last = max(map(job.last_step, alive))
    job.until_step(alive, last + num_steps)
    started_at = time.time()
    if with_store:
        job.backend.start_store()
    (newcomer,) = job.start()
    if job.backend.running & {*alive}:
        job.until_step([newcomer], last + num_steps + 1)
        job.until_step([newcomer, *alive], job.last_step(newcomer) + 50)
    changes = [
        [line["at"] for line in job.lines(worker, "change") if killed_at < line["at"] < started_at] for worker in alive
    ]
    return Killing(
        [job.lines(worker) for worker in alive],
        job.lines(newcomer),
        [line["at"] for worker in alive for line in job.lines(worker, "failed")],
        next((line["at"] for line in job.lines(newcomer, "ready")), float("nan")),
        killed_at,
        started_at,
        max(own[-1] for own in changes) if all(changes) else None,
        first - ready,
    )


def figures(run: Killing) -> dict[str, Any]:
    """The pause of the workers that live; a slowest step is that of any of them."""
    target = 2 * run.median_ms + 50
    slowest, num_failed = run.slowest_after_ms, len(run.failed_at)
    before = [line["ms"] for line in run.steps if line["step"] > 10 and line["at"] < run.killed_at]
    row = {
        "median_ms": round(run.median_ms, 1),
        "slowest_before_ms": round(max(before), 1),
        "target_ms": round(target, 1),
        "slowest_after_kill_ms": round(slowest, 1),
        "met": "yes" if slowest <= target and not num_failed else "no",
        "survivors_that_failed": num_failed,
        "slowest_after_join_ms": None,
        "rounds_until_joined": None,
    }
    if run.newcomer and num_failed < len(run.alive):
        begins = run.newcomer[0]["at"] - run.newcomer[0]["ms"] / 1000
        row["slowest_after_join_ms"] = round(max(line["ms"] for line in run.steps if line["at"] > run.ready_at), 1)
        row["rounds_until_joined"] = max(sum(run.ready_at < line["at"] < begins for line in own) for own in run.alive)
    return row


def scale_figures(run: Killing) -> dict[str, Any]:
    """How long the workers take to begin, to go on without one that was killed, and to take one in."""
    return {
        "seconds_to_begin": round(run.seconds_to_begin, 2),
        "median_ms": round(run.median_ms, 1),
        "seconds_to_form": None if run.formed_at is None else round(run.formed_at - run.killed_at, 2),
        "slowest_after_kill_ms": round(run.slowest_after_ms, 1),
        "seconds_to_join": round(run.newcomer[0]["at"] - run.ready_at, 2) if run.newcomer else None,
        "survivors_that_failed": len(run.failed_at),
    }

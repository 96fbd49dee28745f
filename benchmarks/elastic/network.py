"""Workers that are stopped or cut off, and links that are slow or lose packets: the pause of the others.

Each worker is a host of its own, a network namespace behind a router; see `Chaos` with backend="network".
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.elastic.job import Job
from benchmarks.elastic.training import Training
from gossip_modules.testing import Chaos, Delay, Event, Loss, Partition, Stop

AT = 100
"""The step of the event."""
HIT = 1
"""The worker that it hits."""
SECONDS = 5.0
NUM_STEPS = 400
FAULTS: Mapping[str, Event] = {
    "stopped for 5 s": Stop(AT, HIT, SECONDS),
    "stopped for ever": Stop(AT, HIT),
    "cut off for 5 s": Partition(AT, (HIT,), SECONDS),
    "cut off for ever": Partition(AT, (HIT,)),
    "5 % of packets lost for 5 s": Loss(AT, HIT, 0.05, SECONDS),
    "200 ms of delay for 5 s": Delay(AT, HIT, 0.2, SECONDS),
}
_AFTERWARDS = 100  # steps whose speed is that of training after the fault


def measure(training: Training, fault: str) -> dict[str, Any]:
    """One row."""
    with Job(training) as job:
        job.end_at(NUM_STEPS)
        results = Chaos([FAULTS[fault]], backend="network", seconds=300.0).run(job.training, training.num_workers)
        lines = [job.lines(rank) for rank in results if rank != HIT]
    before = _times(lines, range(20, AT))
    return {
        "method": training.method,
        "num_workers": training.num_workers,
        "fault": fault,
        "deadline_ms": round(1000 * max(own[AT - 10]["deadline"] for own in lines), 1),
        "median_ms": round(statistics.median(before), 1),
        "slowest_before_ms": round(max(before), 1),
        "slowest_after_ms": round(max(_times(lines, range(AT, NUM_STEPS))), 1),
        "slow_steps": sum(
            max(_times(lines, [step])) > 2 * statistics.median(before) + 50 for step in range(AT, NUM_STEPS)
        ),
        "median_afterwards_ms": round(statistics.median(_times(lines, range(NUM_STEPS - _AFTERWARDS, NUM_STEPS))), 1),
        "members_afterwards": max(len(own[-1]["members"]) for own in lines),
        "others_that_failed": training.num_workers - 1 - len(lines),
    }


def _times(lines: Sequence[Sequence[Mapping[str, Any]]], steps: Sequence[int]) -> list[float]:
    """The milliseconds of these steps, of all workers."""
    wanted = set(steps)
    return [line["ms"] for own in lines for line in own if line["step"] in wanted]

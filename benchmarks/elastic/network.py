"""Workers that are stopped or cut off, and links that are slow or lose packets: the pause of the others.

Each worker is a host of its own, a network namespace behind a router; see `Chaos` with backend="network".
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.elastic.methods import METHODS
from benchmarks.elastic.worker import make_model
from gossip_modules.testing import Chaos, Delay, Event, Loss, Partition, Stop, Worker

AT = 100
"""The step of the event."""
HIT = 1
"""The worker that it hits."""
SECONDS = 5.0
FAULTS: Mapping[str, Event] = {
    "stopped for 5 s": Stop(AT, HIT, SECONDS),
    "stopped for ever": Stop(AT, HIT),
    "cut off for 5 s": Partition(AT, (HIT,), SECONDS),
    "cut off for ever": Partition(AT, (HIT,)),
    "5 % of packets lost for 5 s": Loss(AT, HIT, 0.05, SECONDS),
    "200 ms of delay for 5 s": Delay(AT, HIT, 0.2, SECONDS),
}
_AFTERWARDS = 100  # steps whose speed is that of training after the fault


@dataclass(frozen=True)
class FaultTraining:
    """What each worker does; picklable, as processes get it.

    Args:
        method: of METHODS.
        num_workers: that begin.
        step_ms: of computation, which is slept: the workers share the cores of one machine.
        num_steps: of each.
        min_deadline: see `Membership`.
    """

    method: str
    num_workers: int
    step_ms: float
    num_steps: int
    min_deadline: float = 1.0

    def __call__(self, worker: Worker) -> dict[str, Any]:
        """Milliseconds of each step, by its number, and the deadline before the fault; how often it has joined."""
        torch.set_num_threads(1)
        membership = worker.membership(min_workers=self.num_workers, min_deadline=self.min_deadline)
        model = METHODS[self.method](make_model(128, 1), membership=membership)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        membership.track(optimizer=optimizer)
        x, deadline = torch.randn(16, 64), 0.0
        steps: list[tuple[int, float, int]] = []
        start = time.perf_counter()
        for step in membership.steps(self.num_steps):
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(self.step_ms / 1000)
            steps.append((step, 1000 * (time.perf_counter() - start), membership.world_size))
            start = time.perf_counter()
            if step == AT - 1:
                deadline = membership.stats()["deadline"]
        result = {"steps": steps, "deadline": deadline, "members": membership.world_size}
        model.close()
        return result


def measure(training: FaultTraining, fault: str) -> dict[str, Any]:
    """One row."""
    results = Chaos([FAULTS[fault]], backend="network", seconds=300.0).run(training, training.num_workers)
    others = [result for rank, result in results.items() if rank != HIT]
    before = _times(others, range(20, AT))
    after = _times(others, range(AT, training.num_steps))
    last = _times(others, range(training.num_steps - _AFTERWARDS, training.num_steps))
    return {
        "method": training.method,
        "num_workers": training.num_workers,
        "fault": fault,
        "deadline_ms": round(1000 * max(result["deadline"] for result in others), 1),
        "median_ms": round(statistics.median(before), 1),
        "slowest_before_ms": round(max(before), 1),
        "slowest_after_ms": round(max(after), 1),
        "slow_steps": sum(
            max(_times(others, [step])) > 2 * statistics.median(before) + 50 for step in _steps(training)
        ),
        "median_afterwards_ms": round(statistics.median(last), 1),
        "members_afterwards": max(result["members"] for result in others),
        "others_that_failed": training.num_workers - 1 - len(others),
    }


def _steps(training: FaultTraining) -> range:
    return range(AT, training.num_steps)


def _times(results: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[float]:
    """Of these steps, of all workers."""
    wanted = set(steps)
    return [ms for result in results for step, ms, _ in result["steps"] if step in wanted]

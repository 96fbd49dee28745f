"""The soak itself: a random fault every few seconds, on processes."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.elastic.job import Job
from benchmarks.elastic.training import Training

HANG_SECONDS = 90.0
"""In which training must begin, or end after its last step is due: longer than any limit in the library."""
SLOW_STEP = 0.2
"""Seconds that a step may take in the mean, where the machine does other work too."""
_CALM = 3  # times the seconds between faults until the first one


@dataclass(frozen=True)
class HappenedFault:
    """Something that was done to the job.

    Args:
        at: of time.time().
        kind: kill, stop, join, store.
        ranks: of the workers.
        seconds: that it lasted, where it ended by itself.
        live: number of workers that were not killed, afterwards.
    """

    at: float
    kind: str
    ranks: tuple[int, ...]
    seconds: float
    live: int


@dataclass(frozen=True)
class SoakRun:
    """What has happened in one run.

    Args:
        faults: in their order.
        results: of the workers that lived, by rank.
        errors: texts of the errors of workers that nobody had killed, by rank.
        hung: ranks that had to be killed at the end.
        lines: that each worker wrote, by rank.
        seconds: from the first step to the end.
    """

    faults: list[HappenedFault]
    results: dict[int, dict[str, float]]
    errors: dict[int, str]
    hung: tuple[int, ...]
    lines: dict[int, list[dict[str, Any]]]
    seconds: float


class Soak(Job):
    """One run of a job, with faults or without.

    The worker that begins last is never killed, so that its resources tell of leaks; it is stopped like all others. At
    the end there are as many workers as at the beginning.

    Args:
        training: of the workers.
        every: seconds between two faults; 0: there are none.
        seed: of the faults.
    """

    def __init__(self, training: Training, *, every: float, seed: int) -> None:
        super().__init__(training)
        self.every, self.random = every, random.Random(seed)
        self.faults: list[HappenedFault] = []
        self.stopped: dict[int, float] = {}  # by rank, when it goes on
        self.store_returns = 0.0

    def run(self, *, seconds: float = 0.0, steps: int = 0) -> SoakRun:
        """Train for so long, or for so many steps.

        After the last fault as many workers as are missing are started, and `end_steps` follow.
        """
        size, end_steps = self.training.num_workers, self.training.end_steps
        if steps:
            self.end_at(steps)
        self.until_step(self.start(size), 0)
        start = time.time()
        due = start + _CALM * self.every
        while seconds and time.time() < start + seconds and self.backend.running:
            self.turn()
            if self.every and time.time() >= due:
                due += self.every
                self._fault()
        self.until(lambda: not self.stopped and not self.store_returns, HANG_SECONDS)
        limit = 3600.0
        if seconds:
            ranks = self.start(size - len(self.backend.running))
            self.until(lambda: all(self.last_step(rank) >= 0 for rank in ranks), HANG_SECONDS)
            self.end_at(max(map(self.last_step, self.backend.running), default=0) + end_steps)
            limit = HANG_SECONDS + SLOW_STEP * end_steps
        self.until(lambda: not self.backend.running, limit)
        return SoakRun(
            faults=self.faults,
            results=dict(self.backend.results),
            errors={rank: str(error) for rank, error in self.backend.errors.items()},
            hung=tuple(sorted(self.backend.running)),
            lines={rank: self.lines(rank) for rank in range(self.num_started)},
            seconds=time.time() - start,
        )

    def turn(self) -> None:
        """See `Job`; ends what is to end."""
        super().turn()
        now = time.time()
        for rank in [rank for rank, until in self.stopped.items() if until <= now]:
            del self.stopped[rank]
            self.backend.resume(rank)
        if self.store_returns and self.store_returns <= now:
            self.store_returns = 0.0
            self.backend.start_store()

    def _fault(self) -> None:
        """Draw one: the fewer workers there are, the more likely one joins; at least half of them are kept."""
        witness, least = self.training.num_workers - 1, self.training.num_workers // 2
        running = sorted(self.backend.running)
        free = [rank for rank in running if rank not in self.stopped]
        mortal = [rank for rank in free if rank != witness]
        missing = self.training.num_workers - len(running)
        kinds = {
            "join": 2 * missing,
            "kill": 3 if len(running) > least and mortal else 0,
            "kill two": 1 if len(running) > least + 1 and len(mortal) > 1 else 0,
            "stop": 3 if not self.stopped else 0,
            "store": 0 if self.store_returns else 1,
        }
        kind = self.random.choices(list(kinds), list(kinds.values()))[0]
        ranks: tuple[int, ...] = ()
        seconds = 0.0
        if kind == "join":
            ranks = tuple(self.start())
        elif kind == "stop":
            ranks = (self.random.choice(free),)
            seconds = self.random.choice([0.5, 1.0, 5.0, 8.0])
            self.backend.stop(ranks[0])
            self.stopped[ranks[0]] = time.time() + seconds
        elif kind == "store":
            seconds = self.random.choice([0.5, 2.0, 5.0])
            self.backend.kill_store()
            self.store_returns = time.time() + seconds
        else:
            ranks = tuple(sorted(self.random.sample(mortal, 2 if kind == "kill two" else 1)))
            for rank in ranks:
                self.backend.kill(rank)
        live = len(running) + (kind == "join") - len(ranks) * kind.startswith("kill")
        self.faults.append(HappenedFault(time.time(), kind.split()[0], ranks, seconds, live))

"""A soak over a mailbox: a random fault every few seconds, on processes that share an S3 server."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.mailbox.faults import compared_anchors, weight_error
from benchmarks.mailbox.job import WireRun
from benchmarks.mailbox.training import PUSH_SUM, WireTraining

KINDS = ("kill", "stop", "join", "away", "refuse")
END_SECONDS = 180.0
"""In which training must begin, or end after its last step is due."""
_CALM = 10.0  # seconds after the last fault
_RESOURCES = ("megabytes", "descriptors", "threads")


class WireSoak(WireRun):
    """One run with faults: workers are killed, stopped and started; the server stands still, or refuses requests.

    The first worker is never killed, so that its resources tell of leaks; it is stopped like all others.

    Args:
        training: of the workers.
        every: seconds between two faults.
        seed: of the faults.
    """

    def __init__(self, training: WireTraining, *, every: float, seed: int) -> None:
        super().__init__(training)
        self.every, self.random = every, random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.stopped: dict[int, float] = {}  # by rank, when it goes on
        self.away_until = self.refuses_until = 0.0

    def run(self, seconds: float) -> dict[str, Any]:
        """Train for so long with faults; returns the figures."""
        ranks = self.start(self.training.num_workers)
        if not self.until(lambda: all(self.last_step(rank) >= 0 for rank in ranks), END_SECONDS):
            raise RuntimeError(f"got no first step of all workers in {END_SECONDS:g} s; {self.backend.errors}")
        start, due = time.time(), time.time() + self.every
        while time.time() < start + seconds and self.backend.running:
            self.turn()
            if time.time() >= due:
                due += self.every
                self._fault()
        self.until(lambda: not (self.stopped or self.away_until or self.refuses_until), END_SECONDS)
        self.until(lambda: False, _CALM)
        ended = time.time()
        self.end_at(0)
        self.until(lambda: not self.backend.running, END_SECONDS)
        return self._figures(start, ended)

    def turn(self) -> None:
        """See `Job`; ends what is to end."""
        super().turn()
        now = time.time()
        for rank in [rank for rank, until in self.stopped.items() if until <= now]:
            del self.stopped[rank]
            self.backend.resume(rank)
        if self.away_until and self.away_until <= now:
            self.away_until = 0.0
            self.backend.resume_store()
        if self.refuses_until and self.refuses_until <= now:
            self.refuses_until = 0.0
            self.refuse(0.0)

    def _fault(self) -> None:
        """Draw one: the fewer workers there are, the more likely one joins; at least half of them are kept."""
        running = sorted(self.backend.running)
        free = [rank for rank in running if rank not in self.stopped]
        mortal, missing = [rank for rank in free if rank != 0], self.training.num_workers - len(running)
        weights = {
            "kill": 3 if len(running) > self.training.num_workers // 2 and mortal else 0,
            "stop": 3 if not self.stopped else 0,
            "join": 3 * missing,
            "away": 0 if self.away_until else 2,
            "refuse": 0 if self.refuses_until or self.away_until else 2,
        }
        kind = self.random.choices(list(weights), list(weights.values()))[0]
        seconds = self.random.choice([0.5, 2.0, 5.0, 8.0])
        if kind == "kill":
            self.backend.kill(self.random.choice(mortal))
        elif kind == "stop":
            rank = self.random.choice(free)
            self.backend.stop(rank)
            self.stopped[rank] = time.time() + seconds
        elif kind == "join":
            self.start()
        elif kind == "away":
            self.backend.stop_store()
            self.away_until = time.time() + seconds
        else:
            self.refuse(self.random.choice([0.3, 0.8, 1.0]))
            self.refuses_until = time.time() + seconds
        self.faults[kind] += 1

    def _figures(self, start: float, ended: float) -> dict[str, Any]:
        lines = {rank: self.lines(rank) for rank in range(self.num_started)}
        results = dict(self.backend.results)
        num_anchors, num_different = compared_anchors(lines)
        is_push_sum = self.training.method == PUSH_SUM
        return {
            "seconds": round(ended - start, 1),
            "faults": sum(self.faults.values()),
            **{f"{kind}s": self.faults[kind] for kind in KINDS},
            "workers_started": self.num_started,
            "survivors": len(results),
            "failed": len(self.backend.errors),
            "hung": len(self.backend.running),
            "steps": sum(map(len, lines.values())),
            "anchors_compared": num_anchors,
            "anchors_that_differ": num_different,
            "weight_error": weight_error(self.requests(), results) if is_push_sum else "",
            "longest_wait_s": round(max((each.get("longest_wait", 0.0) for each in results.values()), default=0.0), 2),
            "requests": len(self.requests()),
            **growth(lines[0], start, ended),
        }


def growth(own: Sequence[Mapping[str, Any]], start: float, ended: float) -> dict[str, float]:
    """The resources of a worker early and late: medians around a fifth of the time, and at its end.

    Of ten minutes, these are from 1:30 to 2:30, and the last minute.
    """
    tenth = (ended - start) / 10
    figures = {}
    for name in _RESOURCES:
        for when, begin in (("early", start + 1.5 * tenth), ("late", ended - tenth)):
            found = [line[name] for line in own if name in line and begin <= line["at"] < begin + tenth]
            figures[f"{name}_{when}"] = round(statistics.median(found), 1) if found else float("nan")
    return figures


def broken(row: Mapping[str, Any]) -> list[str]:
    """What must hold and did not, of a row."""
    wrong = [f"got {name}={row[name]}, expected 0" for name in ("failed", "hung", "anchors_that_differ") if row[name]]
    if row["weight_error"] != "" and not row["weight_error"] <= 1e-12:
        wrong.append(f"got weight_error={row['weight_error']}, expected at most 1e-12")
    for name, extra in (("megabytes", 20.0), ("descriptors", 4), ("threads", 4)):
        early, late = row[f"{name}_early"], row[f"{name}_late"]
        if late > 1.05 * early + extra:
            wrong.append(f"got {late} {name} late in the run and {early} early, expected no growth")
    return [f"{row['method']}: {text}" for text in wrong]


def measure(training: WireTraining, *, seconds: float, every: float, seed: int) -> dict[str, Any]:
    """One row."""
    with WireSoak(training, every=every, seed=seed) as soak:
        return {"method": training.method, "num_workers": training.num_workers, **soak.run(seconds)}

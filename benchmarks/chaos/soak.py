"""The soak itself: a random fault every few seconds, on processes."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.training import SoakTraining
from gossip_modules.testing.process_backend import ProcessBackend

HANG_SECONDS = 90.0
"""In which training must begin, or end after its last step is due: longer than any limit in the library."""
_CALM = 3  # times the seconds between faults until the first one
SLOW_STEP = 0.2
"""Seconds that a step may take in the mean, where the machine does other work too."""


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
        errors: texts of what ended others that nobody had killed, by rank.
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


class Soak:
    """One run of a job, with faults or without.

    The worker that begins last is never killed, so that its resources tell of leaks; it is stopped like all others. At
    the end there are as many workers as at the beginning.

    Args:
        training: of the workers; its folder is replaced by a temporary one.
        every: seconds between two faults; 0: there are none.
        seed: of the faults.
    """

    def __init__(self, training: SoakTraining, *, every: float, seed: int) -> None:
        self.training, self.every = training, every
        self.random = random.Random(seed)
        self.faults: list[HappenedFault] = []
        self.stopped: dict[int, float] = {}  # by rank, when it goes on
        self.store_returns = 0.0
        self.next_rank = training.num_workers
        self.folder = Path()
        self.backend: ProcessBackend = None  # type: ignore[assignment]

    def run(self, *, seconds: float = 0.0, steps: int = 0) -> SoakRun:
        """Train for so long, or for so many steps.

        After the last fault as many workers as are missing are started, and `end_steps` follow.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            if steps:
                (self.folder / "last").write_text(str(steps))
            self.backend = ProcessBackend(SoakTraining(**{**self.training.__dict__, "folder": folder}))
            try:
                return self._run(seconds)
            finally:
                self.backend.close()

    def _run(self, seconds: float) -> SoakRun:
        for rank in range(self.training.num_workers):
            self.backend.start(rank, [])
        self._until(lambda: all(self._num_lines(r) for r in range(self.training.num_workers)), HANG_SECONDS)
        start = time.time()
        due = start + _CALM * self.every
        while seconds and time.time() < start + seconds and self.backend.running:
            self._turn()
            if self.every and time.time() >= due:
                due += self.every
                self._fault()
        self._until(lambda: not self.stopped and not self.store_returns, HANG_SECONDS)
        if seconds:
            ranks = self._start(self.training.num_workers - len(self.backend.running))
            self._until(lambda: all(map(self._num_lines, ranks)), HANG_SECONDS)
            step = max((line["step"] for r in self.backend.running for line in self._lines(r)[-1:]), default=0)
            (self.folder / "last").write_text(str(step + self.training.end_steps))
            hung = not self._until(lambda: not self.backend.running, HANG_SECONDS + SLOW_STEP * self.training.end_steps)
        else:
            hung = not self._until(lambda: not self.backend.running, 3600.0)
        return SoakRun(
            faults=self.faults,
            results=dict(self.backend.results),
            errors={rank: str(error) for rank, error in self.backend.errors.items()},
            hung=tuple(sorted(self.backend.running)) if hung else (),
            lines={rank: self._lines(rank) for rank in range(self.next_rank)},
            seconds=time.time() - start,
        )

    def _turn(self) -> None:
        """Let a little time pass, and end what is to end."""
        failed = set(self.backend.errors)
        self.backend.wait(0.05)
        for rank in set(self.backend.errors) - failed:
            print(f"worker {rank}: {self.backend.errors[rank]}", file=sys.stderr, flush=True)
        time.sleep(0.02)
        now = time.time()
        for rank in [rank for rank, until in self.stopped.items() if until <= now]:
            del self.stopped[rank]
            self.backend.resume(rank)
        if self.store_returns and self.store_returns <= now:
            self.store_returns = 0.0
            self.backend.start_store()

    def _until(self, condition: Any, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self._turn()
        return True

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
            ranks = self._start(1)
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

    def _start(self, count: int) -> tuple[int, ...]:
        """Start so many workers; their ranks."""
        ranks = tuple(range(self.next_rank, self.next_rank + count))
        self.next_rank += count
        for rank in ranks:
            self.backend.start(rank, [])
        return ranks

    def _num_lines(self, rank: int) -> int:
        return len(self._lines(rank))

    def _lines(self, rank: int) -> list[dict[str, Any]]:
        """All that a worker has written; a last line that is not whole is that of one that was killed."""
        path = self.folder / f"{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

"""MembershipLog: who took part in an elastic run and when, and how long steps took meanwhile, as lines of JSON."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from train.job.outputs import membership_path

SPAN_SECONDS = 1.0


class MembershipLog:
    """What one worker notes for visualization/report.py, in membership_0000.jsonl.

    A line is a generation that begins:
        {"event": "generation", "unix_seconds": ..., "generation": 3, "step": 91, "batch": 273, "members": [1, 3],
         "joined": [3], "left": {"0": "its connection closed"}, ...}
    or the steps of about a second, which a generation ends early:
        {"event": "steps", "unix_seconds": <of their end>, "span_seconds": ..., "num_steps": 60, "median_seconds": ...,
         "slowest_seconds": ..., "live": 3, "deadline_seconds": 1.0}

    Args:
        folder: the folder of the run.
        stats: `Membership.stats`.
    """

    def __init__(self, folder: Path, stats: Callable[[], Mapping[str, float]]) -> None:
        self._folder, self._stats = folder, stats
        self._path: Path | None = None
        self._has_steps = False
        self._unwritten: list[str] = []
        self._steps: list[float] = []
        self._span_start = 0.0

    def open(self, number: int) -> None:
        """Write, with the first steps, what was noted before too.

        Until then the first worker may be about to clear the folder; steps wait for it.

        Args:
            number: the number of this worker.
        """
        self._path = membership_path(self._folder, number)

    def generation(self, change: Mapping[str, Any]) -> None:
        """A generation begins."""
        self._end_span()
        self._note({"event": "generation", **change})

    def step(self, seconds: float) -> None:
        """A step has taken so long."""
        if not self._steps:
            self._span_start = time.monotonic() - seconds
        self._steps.append(seconds)
        if time.monotonic() - self._span_start >= SPAN_SECONDS:
            self._end_span()

    def close(self) -> None:
        """Write the last steps; idempotent."""
        self._end_span()

    def _end_span(self) -> None:
        if self._steps:
            self._has_steps = True
            stats = self._stats()
            self._note(
                {
                    "event": "steps",
                    "unix_seconds": round(time.time(), 3),
                    "span_seconds": round(time.monotonic() - self._span_start, 3),
                    "num_steps": len(self._steps),
                    "median_seconds": round(statistics.median(self._steps), 6),
                    "slowest_seconds": round(max(self._steps), 6),
                    "live": int(stats["live"]),
                    "deadline_seconds": round(stats["deadline"], 3),
                }
            )
        self._steps = []

    def _note(self, line: Mapping[str, Any]) -> None:
        self._unwritten.append(json.dumps(line) + "\n")
        if self._path is not None and self._has_steps:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(self._unwritten)
            self._unwritten = []

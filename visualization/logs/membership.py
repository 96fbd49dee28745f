"""Who took part in an elastic run and when: membership_0000.jsonl, ... of all its workers, put together.

What cannot be read is a `FileProblem` that names file and line; the rest is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd

from visualization.logs.tables import FileProblem

PATTERN = "membership_*.jsonl"
AROUND_SECONDS = 3.0
"""Steps that end or begin so long before or after a generation begins are those around it."""
_STEP_COLUMNS = (
    *("unix_seconds", "span_seconds", "num_steps", "median_seconds", "slowest_seconds"),
    *("live", "deadline_seconds"),
)


@dataclass(frozen=True)
class Generation:
    """One that has begun.

    Attributes:
        seconds: since the start of the run, of the first worker that began it.
        number: the number of the generation.
        members: the numbers of its workers.
        joined: the members that were not in the generation before.
        left: why each of those left that are in it no more.
    """

    seconds: float
    number: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: Mapping[int, str]


@dataclass(frozen=True)
class LoggedMembership:
    """What the workers of a run have noted of each other.

    Attributes:
        generations: in the order in which they began.
        steps: a row for about a second of a worker: seconds (since the start of the run, of the end), span_seconds,
            num_steps, median_seconds, slowest_seconds, live, deadline_seconds, worker.
    """

    generations: tuple[Generation, ...]
    steps: pd.DataFrame

    def around(self, seconds: float) -> pd.DataFrame:
        """The rows of steps within `AROUND_SECONDS` of a moment."""
        begin = self.steps["seconds"] - self.steps["span_seconds"]
        return self.steps[(self.steps["seconds"] >= seconds - AROUND_SECONDS) & (begin <= seconds + AROUND_SECONDS)]


def read_membership(folder: Path) -> tuple[LoggedMembership | None, list[FileProblem]]:
    """What the workers of an elastic run have left in its folder, and what is wrong with it; None: no worker has.

    Generations are those of all workers, each once: with the time of the worker that began it first, in the order in
    which the last one did. A worker that joins begins as soon as it has links, maybe before the others have come to the
    step, or have begun the generation before; then both have the later of their times.
    """
    begun: dict[tuple[int, ...], dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    problems: list[FileProblem] = []
    for path in sorted(folder.glob(PATTERN)):
        for line, event in _events(path, problems):
            try:
                if event["event"] == "steps":
                    rows.append({name: float(event[name]) for name in _STEP_COLUMNS} | {"worker": path.stem[-4:]})
                elif event["event"] == "generation":
                    found = _generation_of(event)
                    key = (found["number"], found["batch"], *found["members"])
                    begun[key] = _merged(found, begun.get(key, found))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problems.append(FileProblem(path, line, f"got no event of an elastic run ({error!r}); it is left out"))
    if not begun:
        return None, problems
    start = min(found["unix_seconds"] for found in begun.values())
    in_order = sorted(begun.values(), key=lambda one: float(one["last_seconds"]))
    seconds = accumulate((one["unix_seconds"] - start for one in in_order), max)
    generations = (
        Generation(at, one["number"], one["members"], one["joined"], one["left"])
        for at, one in zip(seconds, in_order, strict=True)
    )
    steps = pd.DataFrame(rows, columns=[*_STEP_COLUMNS, "worker"])
    steps.insert(0, "seconds", steps.pop("unix_seconds").astype(float) - start)
    return LoggedMembership(tuple(generations), steps.sort_values("seconds", ignore_index=True)), problems


def _generation_of(event: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "unix_seconds": float(event["unix_seconds"]),
        "last_seconds": float(event["unix_seconds"]),
        "number": int(event["generation"]),
        "batch": int(event["batch"]),
        "members": tuple(int(number) for number in event["members"]),
        "joined": tuple(int(number) for number in event["joined"]),
        "left": {int(number): str(why) for number, why in event["left"].items()},
    }


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A generation as two of its workers have seen it: to one that comes all are new, and nobody has left."""
    return {
        **one,
        "unix_seconds": min(one["unix_seconds"], other["unix_seconds"]),
        "last_seconds": max(one["unix_seconds"], other["last_seconds"]),
        "joined": tuple(number for number in one["joined"] if number in other["joined"]),
        "left": one["left"] or other["left"],
    }


def _events(path: Path, problems: list[FileProblem]) -> Iterable[tuple[int, dict[str, Any]]]:
    """Numbered lines; those that are none are added to `problems`."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(FileProblem(path, None, f"got {error.strerror}, expected a file to read; it is left out"))
        return
    for line, words in enumerate(text.splitlines(), start=1):
        try:
            event = json.loads(words)
        except ValueError:
            event = None
        if isinstance(event, dict) and "event" in event:
            yield line, event
        else:
            problems.append(FileProblem(path, line, "got no event of an elastic run; the line is left out"))

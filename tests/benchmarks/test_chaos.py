"""The soak: what must hold is computed from what workers write; a short one is run."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import __main__ as command
from benchmarks.chaos import checks
from benchmarks.chaos.soak import HappenedFault, SoakRun


def line(step: int, *, generation: int = 1, members: tuple[int, ...] = (0, 1), **values: Any) -> dict[str, Any]:
    """What a worker writes for a step of 10 ms."""
    own = {"step": step, "number": 0, "generation": generation, "members": members, "weight": 1.0, "changes": 0}
    return {**own, "at": 100 + 0.01 * step, "ms": 10.0, **values}


def test_generations_and_steps_that_go_back_are_counted() -> None:
    lines = {0: [line(0), line(1, generation=2), line(2, generation=1), line(2, generation=3)], 1: [line(0), line(9)]}
    assert checks.backward_steps(lines) == 2
    assert checks.backward_steps({0: [line(9), line(5, generation=2, number=3)]}) == 0  # it has joined again


def test_generations_of_other_members_are_counted() -> None:
    same = {0: [line(0), line(1)], 1: [line(0)]}
    assert checks.disagreements(same) == 0
    assert checks.disagreements({**same, 2: [line(1, members=(1, 0))]}) == 1


def test_weights_are_summed_while_the_workers_stay_the_same() -> None:
    calm = {0: [line(0, weight=0.5), line(1, weight=1.25)], 1: [line(0, weight=1.5), line(1, weight=0.85)]}
    assert checks.largest_drift(calm) == pytest.approx(0.05)
    for other in (line(1, changes=1), line(1, generation=2), line(5)):
        assert checks.largest_drift({0: calm[0], 1: [calm[1][0], other]}) == 0.0


def test_steps_that_are_slow_by_themselves_are_left_out() -> None:
    stop = HappenedFault(at=100.05, kind="stop", ranks=(0,), seconds=1.0, live=2)
    lines = {
        0: [line(0), line(10), line(900)],
        1: [line(0), line(5, ms=30.0), line(9, ms=40.0, number=3), line(12, number=3)],
    }
    kept = checks.undisturbed_lines(lines, [stop])
    assert [(own["step"], own["ms"]) for own in kept] == [(900, 10.0), (5, 30.0), (12, 10.0)]
    kill = HappenedFault(at=100.11, kind="kill", ranks=(4,), seconds=0.0, live=1)
    never = HappenedFault(at=300.0, kind="join", ranks=(5,), seconds=0.0, live=2)
    assert checks.slowest_after(kept, [stop, kill, never]) == [30.0, 10.0, 0.0]
    assert checks.slowest_after(kept, []) == []


def test_growth_is_from_the_first_generation_to_the_last_steps_with_as_many_workers() -> None:
    first = [line(step, threads=10) for step in range(10)]
    then = [line(step, generation=2, threads=50) for step in range(10, 50)]
    end = [line(50, generation=3, threads=12), line(51, generation=4, members=(0,), threads=3)]
    end += [line(52, generation=4, threads=12)]
    assert checks.growth([*first, *then, *end], "threads", end_steps=36) == (10, 50)
    assert checks.growth([*first, *then, *end], "threads", end_steps=12) == (10, 12)
    assert str(checks.growth([], "threads", end_steps=4)) == "(nan, nan)"


def test_failed_claims_are_named() -> None:
    good = {"method": "SGP", "failed": 0, "hung": 0, "not_monotone": 0, "disagreements": 0, "weight_drift": 1e-7}
    good |= {"accuracy": 90.0, "undisturbed_accuracy": 90.4}
    good |= {f"{name}_{when}": 50.0 for name in ("threads", "descriptors", "megabytes") for when in ("early", "late")}
    assert command.broken(good) == []
    bad = {"hung": 1, "weight_drift": 0.1, "accuracy": 89.0, "threads_late": 90.0, "megabytes_late": 90.0}
    texts = command.broken({**good, **bad})
    assert [text.split(", expected")[0] for text in texts] == [
        "SGP: got hung=1",
        "SGP: got weight_drift=0.1",
        "SGP: got accuracy 89.0",
        "SGP: got 90.0 threads late in the run and 50.0 early",
        "SGP: got 90.0 megabytes late in the run and 50.0 early",
    ]
    assert command.broken({**good, "weight_drift": ""}) == []


def test_the_time_line_has_the_members_at_each_fault() -> None:
    faults = [HappenedFault(100.0 + at, "kill", (1, 2), 0.0, 5) for at in (0.016, 0.036)]
    lines = {0: [line(0), line(1), line(2, ms=50.0), line(3, members=(0,)), line(4)]}
    run = SoakRun(faults, {}, {}, (), lines, 1.0)
    assert [(row["at_seconds"], row["ranks"], row["members"], row["slowest_ms"]) for row in command.timeline(run)] == [
        (0.02, "1 2", 2, 50.0),
        (0.04, "1 2", 1, 10.0),
    ]


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_soak_of_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes, with faults for half of it. So short a run learns too little for its accuracy to be compared."""
    options = ["--num-workers", "4", "--seconds", "30", "--output", str(tmp_path / "a.csv")]
    options += ["--faults", str(tmp_path / "faults.csv"), "--min-deadline", "3", "--end-steps", "150"]
    monkeypatch.setattr(sys, "argv", ["chaos", *options])
    monkeypatch.setattr(command, "MAX_LOSS", 100.0)
    assert command.main() == 0
    with (tmp_path / "a.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert int(row["faults"]) >= 10
    assert int(row["steps"]) > 50
    with (tmp_path / "faults.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == int(row["faults"])

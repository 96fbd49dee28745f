"""Workers train while a random fault hits them every two seconds.

    python -m benchmarks.chaos --methods SGP --seconds 600

Eight workers on this machine train a small network, each a process of its own, with the store in another one. Every
two seconds a worker or two are killed (SIGKILL), one is stopped (SIGSTOP) for half a second to eight, one is started,
or the store is killed and comes back empty; the draw is seeded. Then as many workers as are missing are started, and
the learning rate, which is proportional to the number of workers, falls to zero in some more steps. Then the same
training runs for as many steps without faults. A row for each method is appended to benchmarks/results/chaos.csv, one
for each fault to chaos_faults.csv, which `python -m visualization.chaos` draws. The exit code is 1 where something that
must hold did not; stderr says what.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from benchmarks.chaos.checks import slowest_after, summary, undisturbed_lines
from benchmarks.chaos.soak import Soak, SoakRun
from benchmarks.elastic.methods import HAS_MESSAGES_IN_FLIGHT, METHODS
from benchmarks.elastic.training import Training
from benchmarks.record import RESULTS, append_row, append_rows


@dataclass
class ChaosBenchmark:
    """What is run."""

    methods: tuple[str, ...] = ("SGP",)
    num_workers: int = 8
    seconds: float = 600.0
    """With faults, of each method."""
    every: float = 2.0
    """Seconds between two faults."""
    step_ms: float = 50.0
    """Of computation, which is slept: eight workers share the cores of one machine."""
    undisturbed_step_ms: float = 1.0
    """The same in the run without faults, whose time is not measured."""
    end_steps: int = 1500
    """After the last fault, with all workers and a learning rate that falls to zero; as many in the run without. Longer
    than the timeout, 60 s, which is how long waits for a peer that died in the middle of a message last."""
    min_deadline: float = 2.0
    """Of the membership: seconds of silence after which a worker is left out."""
    seed: int = 1
    output: Path = RESULTS / "chaos.csv"
    faults: Path = RESULTS / "chaos_faults.csv"
    """A row for each fault, from which the picture is drawn."""

    def __post_init__(self) -> None:
        if unknown := [method for method in self.methods if method not in METHODS]:
            raise ValueError(f"got methods {unknown}, expected some of {list(METHODS)}")


MAX_DRIFT = 1e-5
"""Of the sum of float32 weights in one step."""
MAX_LOSS = 0.5
"""Of accuracy, in points."""


def broken(row: Mapping[str, Any]) -> list[str]:
    """What did not hold, of the figures of one method."""
    wrong = [
        f"{row['method']}: got {name}={row[name]}, expected 0"
        for name in ("failed", "hung", "not_monotone", "disagreements")
        if row[name]
    ]
    # Mass that is in flight is not in the sum.
    if row["weight_drift"] != "" and not row["weight_drift"] <= MAX_DRIFT:
        wrong.append(f"{row['method']}: got weight_drift={row['weight_drift']:.2g}, expected at most {MAX_DRIFT:g}")
    if not row["accuracy"] >= row["undisturbed_accuracy"] - MAX_LOSS:
        wrong.append(
            f"{row['method']}: got accuracy {row['accuracy']}, expected {row['undisturbed_accuracy']} as without "
            f"faults, or at most {MAX_LOSS} less"
        )
    for name, factor, extra in (("threads", 1.0, 20), ("descriptors", 1.0, 40), ("megabytes", 1.2, 20)):
        early, late = row[f"{name}_early"], row[f"{name}_late"]
        if not late <= factor * early + extra:
            wrong.append(f"{row['method']}: got {late} {name} late in the run and {early} early, expected no growth")
    return wrong


def measure(method: str, options: ChaosBenchmark) -> tuple[dict[str, Any], SoakRun]:
    """The figures of one method, and what has happened."""
    training = Training(
        method,
        options.num_workers,
        options.step_ms,
        options.seed,
        min_deadline=options.min_deadline,
        end_steps=options.end_steps,
    )
    with Soak(training, every=options.every, seed=options.seed) as soak:
        run = soak.run(seconds=options.seconds)
    row = {
        "method": method,
        "num_workers": options.num_workers,
        "step_ms": options.step_ms,
        **summary(run, witness=options.num_workers - 1, end_steps=options.end_steps),
    }
    if method in HAS_MESSAGES_IN_FLIGHT:
        row["weight_drift"] = ""
    accuracies = {rank: round(result["accuracy"], 2) for rank, result in sorted(run.results.items())}
    print(f"with faults: {row}; accuracy of each worker: {accuracies}", file=sys.stderr, flush=True)
    calm = replace(training, step_ms=options.undisturbed_step_ms)
    with Soak(calm, every=0.0, seed=options.seed) as soak:
        beside = soak.run(steps=int(row["steps"]))
    if beside.errors or beside.hung or not beside.results:
        raise RuntimeError(f"got errors {beside.errors} and hung workers {beside.hung} in a run without faults")
    row["undisturbed_accuracy"] = summary(beside, witness=0, end_steps=options.end_steps)["accuracy"]
    return row, run


def timeline(run: SoakRun) -> Iterable[dict[str, Any]]:
    """A row for each fault: seconds since the first step, kind, ranks, live workers, members, slowest step after."""
    lines = undisturbed_lines(run.lines, run.faults)
    start = min(line["at"] for own in run.lines.values() for line in own[:1])
    by_time = sorted((line["at"], len(line["members"])) for own in run.lines.values() for line in own)
    place = 0
    for fault, slowest in zip(run.faults, slowest_after(lines, run.faults), strict=True):
        while place + 1 < len(by_time) and by_time[place + 1][0] <= fault.at:
            place += 1
        yield {
            "at_seconds": round(fault.at - start, 2),
            "kind": fault.kind,
            "ranks": " ".join(map(str, fault.ranks)),
            "lasts_seconds": fault.seconds,
            "live": fault.live,
            "members": by_time[place][1],
            "slowest_ms": round(slowest, 1),
        }


def main() -> int:
    """One row for each method, appended as it comes; the exit code."""
    options = tyro.cli(ChaosBenchmark, description=__doc__)
    wrong = []
    for method in options.methods:
        row, run = measure(method, options)
        print(row, flush=True)
        append_row(options.output, row, seed=options.seed)
        if run.faults:
            append_rows(options.faults, [{"method": method, **fault} for fault in timeline(run)], seed=options.seed)
        wrong += broken(row)
    for text in wrong:
        print(f"error: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

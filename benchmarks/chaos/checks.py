"""What must hold in a soak, computed from what its workers have written."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.chaos.soak import HappenedFault, SoakRun

Lines = Mapping[int, Sequence[Mapping[str, Any]]]
REJOIN_SECONDS = 5.0
"""After it was stopped, a worker's own steps are not counted for so long: it finds out, and joins again."""


def backward_steps(lines: Lines) -> int:
    """How often the generation of a worker, or its step, was less than in its line before.

    Who was left out and joins again, under another number, takes the step of its donor: it may have trained on alone.
    """
    return sum(
        after["generation"] < before["generation"] or after["step"] <= before["step"]
        for own in lines.values()
        for before, after in itertools.pairwise(own)
        if after["number"] == before["number"]
    )


def disagreements(lines: Lines) -> int:
    """How many generations were not the same set of workers in the same order for all of them."""
    members: dict[int, set[tuple[int, ...]]] = {}
    for own in lines.values():
        for line in own:
            members.setdefault(line["generation"], set()).add(tuple(line["members"]))
    return sum(len(sets) > 1 for sets in members.values())


def largest_drift(lines: Lines) -> float:
    """The largest relative change, from one step to the next, of the sum of the weights of a generation.

    Only pairs of steps with lines of all members count between which nobody came, left or was lost.
    """
    at_step: dict[int, list[Mapping[str, Any]]] = {}
    for own in lines.values():
        for line in own:
            at_step.setdefault(line["step"], []).append(line)
    largest = 0.0
    for step, before in at_step.items():
        after = at_step.get(step + 1, [])
        both = [*before, *after]
        size = len(before[0]["members"])
        is_calm = (
            len(before) == len(after) == size
            and len({line["generation"] for line in both}) == 1
            and not any(line["changes"] for line in both)
        )
        if is_calm:
            first, second = (sum(line["weight"] for line in side) for side in (before, after))
            largest = max(largest, abs(second - first) / first)
    return largest


def undisturbed_lines(lines: Lines, faults: Iterable[HappenedFault]) -> list[Mapping[str, Any]]:
    """Lines without those that are slow by themselves: a worker's first, and where it was stopped or joined again."""
    stops: dict[int, list[tuple[float, float]]] = {}
    for fault in faults:
        if fault.kind == "stop":
            stops.setdefault(fault.ranks[0], []).append((fault.at - 0.5, fault.at + fault.seconds + REJOIN_SECONDS))
    kept = []
    for rank, own in lines.items():
        for before, line in itertools.pairwise(own):
            begins = line["at"] - line["ms"] / 1000
            is_own = any(begins < end and start < line["at"] for start, end in stops.get(rank, []))
            if not is_own and line["number"] == before["number"]:
                kept.append(line)
    return kept


def slowest_after(lines: Sequence[Mapping[str, Any]], faults: Sequence[HappenedFault]) -> list[float]:
    """For each fault, the slowest step of any worker that ended between it and the next one, in ms; 0: none did."""
    if not faults:
        return []
    ends = [*(fault.at for fault in faults[1:]), float("inf")]
    times = sorted((line["at"], line["ms"]) for line in lines)
    return [
        max((ms for at, ms in times if fault.at <= at < end), default=0.0)
        for fault, end in zip(faults, ends, strict=True)
    ]


def growth(own: Sequence[Mapping[str, Any]], name: str, *, end_steps: int) -> tuple[float, float]:
    """The median of a resource in a worker's first generation, and in the last sixth of the last `end_steps`.

    Both with the same number of workers, and when the links of other generations are closed: what a generation takes
    depends on that number, those before are closed some seconds after a change, and waits for a peer that died in the
    middle of a message last for the timeout.
    """
    if not own:
        return float("nan"), float("nan")
    first, last, size = own[0]["generation"], own[-1]["step"], len(own[0]["members"])
    calm = [line for line in own if name in line and len(line["members"]) == size]
    early = [line[name] for line in calm if line["generation"] == first]
    late = [line[name] for line in calm if line["step"] > last - end_steps // 6]
    first_median, last_median = (statistics.median(values) if values else float("nan") for values in (early, late))
    return first_median, last_median


def summary(run: SoakRun, *, witness: int, end_steps: int) -> dict[str, Any]:
    """The figures of a run.

    Args:
        run: that has ended.
        witness: the worker that was there from the beginning to the end.
        end_steps: that were without faults.
    """
    lines = undisturbed_lines(run.lines, run.faults)
    times = [line["ms"] for line in lines]
    slowest = slowest_after(lines, run.faults)
    kinds = {kind: sum(fault.kind == kind for fault in run.faults) for kind in ("kill", "stop", "join", "store")}
    accuracies = [result["accuracy"] for result in run.results.values()]
    figures = {
        "seconds": round(run.seconds, 1),
        "steps": max((line["step"] + 1 for own in run.lines.values() for line in own), default=0),
        "faults": len(run.faults),
        **{f"{kind}s": count for kind, count in kinds.items()},
        "mean_members": round(statistics.mean(len(x["members"]) for own in run.lines.values() for x in own), 2),
        "generations": max((line["generation"] for own in run.lines.values() for line in own), default=0),
        "failed": len(run.errors),
        "hung": len(run.hung),
        "not_monotone": backward_steps(run.lines),
        "disagreements": disagreements(run.lines),
        "weight_drift": largest_drift(run.lines),
        "median_ms": round(statistics.median(times), 1) if times else float("nan"),
        "slowest_median_ms": round(statistics.median(slowest), 1) if slowest else float("nan"),
        "slowest_ms": round(max(times, default=float("nan")), 1),
        "accuracy": round(statistics.mean(accuracies), 2) if accuracies else float("nan"),
    }
    for name in ("threads", "descriptors", "megabytes"):
        first, last = growth(run.lines.get(witness, ()), name, end_steps=end_steps)
        figures |= {f"{name}_early": round(first, 1), f"{name}_late": round(last, 1)}
    return figures

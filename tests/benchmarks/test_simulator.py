"""Rows of the simulator's table come with the fastest method first, and without seconds where the target was missed."""

from __future__ import annotations

from benchmarks.simulator import rows_of
from gossip_modules.lab import LabPlan, Prediction


def prediction(method: str, *, error: float, seconds: float, disagreement: float = 0.0) -> Prediction:
    return Prediction(
        plan=LabPlan.of(f"{method}:ring"),
        target=0.5,
        error=error,
        num_steps=10.0,
        step_seconds=seconds / 10,
        seconds=seconds,
        rank_bytes=2e6,
        waiting_share=0.25,
        disagreement=disagreement,
        max_disagreement=0.2,
    )


def test_rows_are_in_the_order_of_seconds_to_the_target() -> None:
    slow, fast = prediction("sgp", error=0.4, seconds=9.0), prediction("dpsgd", error=0.5, seconds=3.0)
    missed = prediction("choco", error=0.6, seconds=1.0, disagreement=0.3)
    rows = rows_of([missed, slow, fast])
    assert [(row["method"], row["seconds"], row["agreed"]) for row in rows] == [
        ("dpsgd on ring", 3.0, "yes"),
        ("sgp on ring", 9.0, "yes"),
        ("choco on ring", None, "no"),
    ]
    assert rows[0] == {
        "method": "dpsgd on ring",
        "steps": 10,
        "step_seconds": 0.3,
        "seconds": 3.0,
        "rank_megabytes": 2,
        "waiting_percent": 25,
        "disagreement": 0.0,
        "agreed": "yes",
    }

"""Killed workers: the figures of a row follow from what workers have said, and torchft is left out where it is not."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.elastic import kills, scale, torchft_worker
from benchmarks.elastic.__main__ import ElasticBenchmark, measured
from benchmarks.elastic.kills import Killing
from benchmarks.elastic.methods import METHODS
from gossip_modules import Membership


@dataclass
class PastWorker:
    """What a worker has said: a step of so many ms, of 100 ms each, from a time on."""

    times: list[float]
    start: float = 0.0
    has_failed: bool = False
    path: Path = field(default_factory=lambda: Path("worker"))
    changes: tuple[float, ...] = ()

    def events(self, kind: str) -> list[dict[str, Any]]:
        if kind == "change":
            return [{"at": at} for at in self.changes]
        if kind != "step":
            return [{"at": {"ready": self.start, "failed": 3.5}[kind]}]
        return [{"step": i, "at": self.start + 0.1 * (i + 1), "ms": ms} for i, ms in enumerate(self.times)]

    def error(self) -> str:
        return "RuntimeError: a reason"


def figures(alive: list[PastWorker], newcomer: PastWorker) -> dict[str, Any]:
    return kills.figures(alive, newcomer, killed_at=2.0, started_at=4.0)  # type: ignore[arg-type]


def test_the_slowest_step_after_the_kill_is_compared_with_twice_the_median_and_50_ms() -> None:
    calm = [60.0] * 60
    for slowest, met in ((170.0, "yes"), (170.1, "no")):
        late = [60.0] * 30 + [slowest] + [60.0] * 29
        row = figures([PastWorker(calm), PastWorker(late)], PastWorker([20.0] * 5, start=4.25))
        assert row == {
            "median_ms": 60.0,
            "slowest_before_ms": 60.0,
            "target_ms": 170.0,
            "slowest_after_kill_ms": slowest,
            "met": met,
            "survivors_that_failed": 0,
            "slowest_after_join_ms": 60.0,
            "rounds_until_joined": 1,
        }


def test_a_row_of_workers_that_failed_has_no_join(capsys: pytest.CaptureFixture[str]) -> None:
    row = figures([PastWorker([60.0] * 30, has_failed=True)] * 2, PastWorker([]))
    assert (row["slowest_after_kill_ms"], row["survivors_that_failed"], row["met"]) == (500.0, 2, "no")
    assert row["rounds_until_joined"] is row["slowest_after_join_ms"] is None
    assert capsys.readouterr().err.count("worker failed: RuntimeError: a reason") == 2


def test_the_last_worker_counts_in_the_figures_of_scale() -> None:
    calm = [60.0] * 60
    alive: Any = [PastWorker(calm, changes=(0.1, 2.25, 5.0)), PastWorker(calm, start=0.2, changes=(2.2, 2.5))]
    newcomer: Any = PastWorker(calm, start=4.0)
    founders: Any = [PastWorker(calm)]
    row = scale.figures(Killing([*alive, *founders], alive, newcomer, killed_at=2.0, started_at=4.0))
    assert row == {
        "seconds_to_begin": 0.1,
        "median_ms": 60.0,
        "seconds_to_form": 0.5,
        "slowest_after_kill_ms": 60.0,
        "seconds_to_join": 0.1,
        "survivors_that_failed": 0,
    }
    newcomer.times = []
    assert scale.figures(Killing(alive, alive, newcomer, killed_at=2.0, started_at=4.0))["seconds_to_join"] is None
    alive[1].changes = ()
    assert scale.figures(Killing(alive, alive, newcomer, killed_at=2.0, started_at=4.0))["seconds_to_form"] is None


@pytest.mark.parametrize("method", METHODS)
def test_each_method_takes_a_membership_of_any_number_of_workers(method: str) -> None:
    membership = Membership(dist.HashStore(), min_workers=1)
    model = METHODS[method](nn.Linear(64, 8), membership=membership)
    assert model(torch.zeros(2, 64)).shape == (2, 8)
    model.close()


def test_torchft_is_left_out_with_a_remedy_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_installed in (True, False):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=is_installed: there or None)
        expected = [*METHODS, *([torchft_worker.NAME] if is_installed else [])]
        assert list(measured(ElasticBenchmark())) == expected
        assert ("make cluster-venv" in capsys.readouterr().err) is not is_installed
    assert list(measured(ElasticBenchmark(figure="joins"))) == list(METHODS)

"""Killed workers: the figures of a row follow from what workers have written; short jobs of processes are run."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.elastic import torchft_worker
from benchmarks.elastic.__main__ import ElasticBenchmark, measured, of_width
from benchmarks.elastic.cost import CostTraining
from benchmarks.elastic.cost import measure as measure_cost
from benchmarks.elastic.job import Job
from benchmarks.elastic.kills import Killing, figures, kill, scale_figures
from benchmarks.elastic.methods import METHODS
from benchmarks.elastic.training import Training
from gossip_modules import Membership


def steps(times: Sequence[float], start: float = 0.0) -> list[dict[str, Any]]:
    """The lines of a worker: steps of so many ms, which end every 100 ms from a time on."""
    return [{"step": i, "at": start + 0.1 * (i + 1), "ms": ms} for i, ms in enumerate(times)]


def killing(*alive: list[dict[str, Any]], newcomer: list[dict[str, Any]], **values: Any) -> Killing:
    """Of workers that were killed at 2 s, and of one that was started again at 4 s."""
    times = {"failed_at": [], "ready_at": 4.25, "formed_at": 2.5, "seconds_to_begin": 0.1, **values}
    return Killing(alive, newcomer, killed_at=2.0, started_at=4.0, **times)


def test_the_slowest_step_after_the_kill_is_compared_with_twice_the_median_and_50_ms() -> None:
    calm = steps([60.0] * 60)
    for slowest, met in ((170.0, "yes"), (170.1, "no")):
        late = steps([60.0] * 30 + [slowest] + [60.0] * 29)
        row = figures(killing(calm, late, newcomer=steps([20.0] * 5, start=4.25)))
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


def test_a_row_of_workers_that_failed_has_no_join() -> None:
    row = figures(killing(*[steps([60.0] * 30)] * 2, newcomer=[], failed_at=[3.5, 3.5]))
    assert (row["slowest_after_kill_ms"], row["survivors_that_failed"], row["met"]) == (500.0, 2, "no")
    assert row["rounds_until_joined"] is row["slowest_after_join_ms"] is None


def test_the_last_worker_counts_in_the_figures_of_scale() -> None:
    calm = steps([60.0] * 60)
    run = killing(calm, calm, newcomer=steps([60.0], start=4.25))
    assert scale_figures(run) == {
        "seconds_to_begin": 0.1,
        "median_ms": 60.0,
        "seconds_to_form": 0.5,
        "slowest_after_kill_ms": 60.0,
        "seconds_to_join": 0.1,
        "survivors_that_failed": 0,
    }
    run = killing(calm, newcomer=[], formed_at=None)
    assert scale_figures(run)["seconds_to_join"] is scale_figures(run)["seconds_to_form"] is None


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
    assert list(measured(ElasticBenchmark(figure="cost"))) == list(METHODS)


@pytest.mark.e2e
@pytest.mark.soak
@pytest.mark.timeout(180)
def test_workers_go_on_without_one_that_is_killed_with_the_store() -> None:
    with Job(Training("SGP", 3, 5.0, seed=1, **of_width(16))) as job:
        run = kill(job, 1, with_store=True, num_steps=30)
    assert len(run.alive) == 2
    assert not run.failed_at
    for own in run.alive:
        assert all(before["step"] < after["step"] for before, after in itertools.pairwise(own))
    row = figures(run)
    assert row["survivors_that_failed"] == 0
    assert row["rounds_until_joined"] >= 0
    assert run.newcomer[-1]["step"] >= run.newcomer[0]["step"] > 30


@pytest.mark.e2e
@pytest.mark.soak
@pytest.mark.timeout(180)
def test_steps_with_and_without_a_membership_take_turns() -> None:
    row = measure_cost(CostTraining("SGP", 2, 0.0, seed=1, min_deadline=10.0, turns=3, **of_width(16)))
    assert (row["num_workers"], row["turns"]) == (2, 3)
    assert 0 < row["ratio_quarter"] <= row["ratio"] <= row["ratio_three_quarters"]

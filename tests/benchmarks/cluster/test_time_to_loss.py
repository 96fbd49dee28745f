"""The page of the time to a loss: steps that trainings take, times the seconds of a step on the emulated cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import pages
from benchmarks.cluster.table import frame, rows_of
from benchmarks.pages import time_to_loss as page
from tests.benchmarks.cluster.test_cluster import answer

EVEN = {
    "hosts": 2,
    "rate_gbit": 1.0,
    "num_parameters": 1e6,
    "planned_ms": 20.0,
    "spread": 0.0,
    "straggle_chance": 0.0,
    "slow_factor": 10.0,
    "slow_host": 1.0,
    "slow_link_share": 0.0,
}


def trained(method: str, *losses: float, rate: float = 0.1, seed: int = 1) -> pd.DataFrame:
    """An evaluation every 40 steps; none: it failed."""
    points = [{"num_steps": 40.0 * (k + 1), "score": value, "error": None} for k, value in enumerate(losses)]
    failed = [{"num_steps": np.nan, "score": np.nan, "error": "no"}]
    own = {"method": method, "learning_rate": rate, "seed": seed}
    return pd.DataFrame([{**point, **own} for point in points or failed])


def test_steps_to_a_loss_are_those_at_the_rate_that_is_best_with_the_lowest_seed() -> None:
    rows = pd.concat(
        [
            trained("ddp", 4, 3, 2, seed=2),  # 2.5 after 100
            trained("ddp", 4, 3, 2),
            trained("ddp", 2.2, 2.9, 2.8, rate=0.05),  # the best before the end does not count
            trained("ddp", rate=0.3),  # failed
            trained("ddp", 4, 2, 2, seed=3),  # 70
            trained("ddp", 1, 1, 1, rate=0.05, seed=3),
            trained("sgp", 4, 3, 2.6),
            trained("choco"),
        ]
    )
    found = page.steps_to(rows, 2.5)
    assert found.loc["ddp"].tolist() == [100, 70, 100, 2, 0.1, 3]
    assert found.loc["sgp", "num_steps"] == found.loc["choco", "num_steps"] == float("inf")


def cluster_rows(method: str, *step_ms: float, cell: dict[str, float] = EVEN) -> list[dict[str, Any]]:
    return rows_of({**cell, "method": method, "repeat": 0}, [answer(value) for value in step_ms], rate=1e9)


def test_time_is_steps_times_seconds() -> None:
    slow = {**EVEN, "straggle_chance": 0.05}
    steps = page.steps_to(pd.concat([trained("ddp", 2), trained("sgp", 6, 2), trained("choco", 5)]), 2.0)
    rows = cluster_rows("ddp", 500, 500) + cluster_rows("sgp", 100, 300) + cluster_rows("choco", 50, 50)
    rows += cluster_rows("ddp", 900, 900, cell=slow)
    seconds = page.seconds_per_step(frame(rows))
    text = page.markdown(steps, seconds, 2.0)
    assert "2 hosts, 1 M parameters, 1 Gbit/s, compute 20 ms | 2 hosts" in text
    assert "compute 20 ms, 5 % stragglers 10 times slower |" in text
    assert "| DDP | 2.00 | 0.1 | 1 | 40 | 40 | 20 | 36 |" in text
    assert "| SGP, one-peer exponential | 2.00 | 0.1 | 1 | 80 | 80 | 12 |  |" in text, "2 steps take 100 and 300"
    assert "| CHOCO, sign, ring | 5.00 | 0.1 | 1 | never | never | never |  |" in text
    assert "| fastest of ours | | | | | | SGP, one-peer exponential 12 | none |" in text
    assert "| fastest of the others | | | | | | DDP 20 | DDP 36 |" in text
    assert "| DDP | 500 | 900 |" in page.paces(seconds)


def test_the_page_has_the_times_to_each_target_and_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "TARGETS", (2.6, 2.4))
    made = {"command": "c", "commit": "abc", "date": "d", "torch": "2", "machine": "m", "cores": 2, "seed": 1}
    steps = pd.concat([trained("ddp", 5, 3, 2), trained("sgp", 5, 3, 2.5), trained("slowmo")])
    made.pop("seed")
    steps = steps.assign(**made)
    cells = frame(cluster_rows("ddp", 500) + cluster_rows("sgp", 100) + cluster_rows("local", 50))
    cells = cells.assign(**made, seed=1)
    text = page.figures(steps, cells)
    # 2.6 nats are 0.4 of 1 below 3 of ddp, and 0.4 of 0.5 of sgp; sgp never has 2.4.
    assert "| DDP | 2.00 | 0.1 | 1 | 96 | 96 | 48 |" in text
    assert "| SGP, one-peer exponential | 2.50 | 0.1 | 1 | 112 | 112 | 11 |" in text
    assert "| SGP, one-peer exponential | 2.50 | 0.1 | 1 | never | never | never |" in text
    assert "| fastest of ours | | | | | | none |" in text
    assert "Steps:\n\n    c\n\nd to d, commit abc, torch 2, m, 2 cores, seed 1." in text
    assert "- slowmo: `no`" in text


def test_a_page_is_made_when_both_of_its_files_are_there(tmp_path: Path) -> None:
    for name in ("loss_steps.csv", "loss_cells.csv"):
        assert "time_to_loss" not in pages.measured(pages.LISTED, tmp_path)
        (tmp_path / name).touch()
    assert "time_to_loss" in pages.measured(pages.LISTED, tmp_path)

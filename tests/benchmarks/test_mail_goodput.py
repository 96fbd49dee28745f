"""Goodput with deaths: the same deaths for all systems, steps that count, and a resumed study."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from benchmarks import mail_goodput
from benchmarks.mail_goodput import BY_SPEED, SPEEDS, GoodputCell, by_mailbox, in_lockstep, that_waits
from benchmarks.pages.mail_goodput import goodputs
from gossip_modules.lab import Digits, Join, Kill, LabTask

CELL = GoodputCell("lockstep", 5, seconds=40.0)


class SmallTask:
    """Digits, whose rounds take no time to compute."""

    def lab_task(self) -> LabTask:
        digits = Digits()

        def batch(worker: int, step: int, generator: torch.Generator) -> Any:
            chosen = torch.randint(len(digits.images), (2,), generator=generator)
            return digits.images[chosen], digits.labels[chosen]

        return LabTask(digits.model, digits.loss, batch, digits.optimizer)

    def score(self, model: torch.nn.Module) -> dict[str, float]:
        return {"loss": 1.0, "test": 1.0}


def last(points: Any) -> dict[str, Any]:
    return list(points)[-1]


def test_every_place_dies_once_before_any_dies_again_and_a_newcomer_has_its_speed() -> None:
    cell = replace(CELL, seconds=400.0)
    assert set(Counter(cell.victims()[:16]).values()) == {2}
    assert cell.setting().compute.speeds[8:] == tuple(SPEEDS[place] for place in cell.victims())
    changes = cell.changes()
    assert [at for at, _ in changes[:4]] == [20.0, 30.0, 40.0, 50.0]
    killed = [change.worker for _, change in changes if isinstance(change, Kill)]
    assert len(set(killed)) == len(killed) == sum(isinstance(change, Join) for _, change in changes)


def test_lockstep_waits_for_the_slowest_and_loses_the_drift_of_the_dead() -> None:
    still = last(in_lockstep(replace(CELL, deaths=False), SmallTask(), [40.0]))  # type: ignore[arg-type]
    assert still["counted"] in (8 * 30, 8 * 35)  # a step is a second
    dying = last(in_lockstep(CELL, SmallTask(), [40.0]))  # type: ignore[arg-type]
    assert 0.75 * still["counted"] < dying["counted"] < still["counted"]
    assert dying["counted"] <= dying["trained"]


@pytest.mark.parametrize("system", ["mailbox", BY_SPEED])
def test_a_mailbox_counts_steps_in_closes(system: str) -> None:
    cell = replace(CELL, system=system, quorum=4, grace=0.1, poll=0.1, interval=5.0, seconds=16.0)
    point = last(by_mailbox(cell, SmallTask(), [16.0]))  # type: ignore[arg-type]
    assert 0.4 * 20 * 16 < point["counted"] < point["trained"] < 20 * 16


def test_data_parallel_that_waits_loses_ten_seconds_a_death() -> None:
    curve = pd.DataFrame({"at": [50.0, 100.0], "counted": [400, 800], "loss": [2.0, 1.0], "test": [2.0, 1.0]})
    cell = replace(CELL, seconds=100.0)  # deaths at 20, 40, 60 and 80; ten seconds each are lost
    points = list(that_waits(curve, cell, [19.0, 35.0, 100.0]))
    assert [point["counted"] for point in points] == [8 * 19, 8 * 25, 8 * 60]
    assert points[2]["loss"] == pytest.approx(1.8)


def test_a_study_goes_on_and_its_page_has_the_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_goodput, "GoodputTask", SmallTask)
    monkeypatch.setattr(SmallTask, "text", type("Data", (), {"data": "0"}), raising=False)
    path = tmp_path / "rows.csv"
    cells = [replace(CELL, deaths=deaths, seconds=40.0) for deaths in (False, True)]
    assert not mail_goodput.GoodputStudy(path, end=0.0, num_points=2).run(cells)
    assert mail_goodput.GoodputStudy(path, num_points=2).run(cells[:1])
    assert mail_goodput.GoodputStudy(path, num_points=2).run(cells)
    rows = pd.read_csv(path)
    assert len(rows) == 4
    own = goodputs(rows).iloc[0]
    counted = rows[rows["at"] == 40.0].set_index("deaths")["counted"]
    assert own["goodput_percent"] == pytest.approx(100 * counted[True] / counted[False])
    assert own["capacity_percent"] == pytest.approx(100 * counted[False] / 800)

"""Records: a tiny submission runs, all submissions fit their tracks, and the log follows the rules."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from benchmarks.pages.records import headline
from benchmarks.record import DTYPES, digest
from benchmarks.records import __main__ as records
from benchmarks.records import task
from benchmarks.records.submission import Submission, entry, names
from benchmarks.records.tracks import MAX_STEPS, TARGET_BITS, TRACKS, Track
from gossip_modules import DPSGD, MuonAdamW
from gossip_modules.lab import Join, Kill, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.models import Models, WorkerParameters

TINY = Track("two workers", 2, Network("1 Gbit/s"))


@dataclass(frozen=True)
class Mine(Submission):
    title = "Mine"
    grid = ({"rate": 0.01},)

    def method(self) -> DPSGD:
        return DPSGD()


def test_a_submission_runs_and_its_figures_are_those_of_the_curves() -> None:
    result = records.train(TINY, Mine(0.01), [1, 2], "test", steps=20)
    assert [row["step"] for row in result.rows] == [0, 10, 20] * 2
    ends = [row["evaluation"] for row in result.rows if row["step"] == 20]
    found = records.figures(result, 1.5, target=max(ends))
    assert found["steps_to_target"] in (15.0, 20.0)
    assert found["seconds"] == pytest.approx(np.mean([found["seconds_low"], found["seconds_high"]]), abs=1e-3)
    assert found["final_bits"] == pytest.approx(np.mean(ends), abs=1e-4)
    assert found["cpu_seconds"] == 1.5
    missed = records.figures(result, 1.5, target=min(ends) + (max(ends) - min(ends)) / 2)
    assert np.isnan(missed["seconds"]), "one of the seeds has not reached it"


def test_the_best_setting_is_the_fastest_on_the_validation_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "entry", lambda name: Mine)
    assert records.setting_of("slow", "mine") == {"rate": 0.01}
    monkeypatch.setattr(Mine, "grid", ({"rate": 0.01}, {"rate": 0.02}, {"rate": 0.04}))
    path = tmp_path / "grid.csv"
    with pytest.raises(ValueError, match=r"got mine on slow without rows of .*0\.04.*expected all; add --grid"):
        records.setting_of("slow", "mine", path)
    for rate, seconds, bits in ((0.01, None, 2.0), (0.02, 9.0, 3.0), (0.04, 9.0, 2.5)):
        row: dict[str, object] = dict.fromkeys(records.COLUMNS, 0.0)
        row |= {"track": "slow", "submission": "mine", "setting": str({"rate": rate})}
        records.append_row(path, {**row, "seconds": seconds, "final_bits": bits}, seed=0)
    assert records.setting_of("slow", "mine", path) == {"rate": 0.04}


def test_a_row_belongs_to_an_optimizer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Momentum(Mine):
        def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9)

    class Grouped(Mine):
        def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            matrices, vectors = ([p for p in parameters if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
            groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95))

    class Constant(Mine):
        def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    class Hidden(Mine):
        def optimizer(self, parameters: WorkerParameters) -> torch.optim.Optimizer:
            return MuonAdamW(parameters.model, lr=self.rate)

    texts = []
    for submission in (Mine, Momentum, Constant, Grouped, Hidden):
        monkeypatch.setattr(records, "entry", lambda name, submission=submission: submission)
        texts.append(records.text_of("mine", {"rate": 0.01}))
    assert texts[0] == "{'rate': 0.01}"
    assert "'optimizer': 'SGD(" in texts[1]
    assert "momentum=0.9" in texts[1]
    assert "'rates'" not in texts[1]
    assert texts[2].startswith("{'rate': 0.01, 'rates': '")
    assert re.findall(r"weight_decay=([\d.]+)", texts[3]) == ["0.01"]  # none in the other group
    assert re.findall(r"kind=(\w+)", texts[4]) == ["Muon", "AdamW", "AdamW"]
    assert "'rates'" not in texts[3] + texts[4]


def test_an_optimizer_may_take_the_model_of_a_worker() -> None:
    class Hidden(Mine):
        def optimizer(self, parameters: WorkerParameters) -> torch.optim.Optimizer:
            return MuonAdamW(parameters.model, lr=self.rate)

    by_muon, by_adam = (records.train(TINY, kind(0.01), [1], "test", steps=20).rows for kind in (Hidden, Mine))
    assert by_muon[0]["evaluation"] == by_adam[0]["evaluation"]
    assert by_muon[-1]["evaluation"] < by_muon[0]["evaluation"] - 1
    assert by_muon[-1]["evaluation"] != by_adam[-1]["evaluation"]


@pytest.mark.parametrize("name", names())
def test_the_rows_of_a_submission_name_its_optimizer(name: str) -> None:
    rows = pd.read_csv(records.GRID)
    known = set(rows.loc[rows["submission"] == name, "setting"])
    assert known or len(entry(name).grid) == 1, "add the rows of --grid"
    assert known <= {records.text_of(name, setting) for setting in entry(name).grid}


def test_the_command_prints_and_appends_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "entry", lambda name: Mine)
    monkeypatch.setattr(records, "TRACKS", {"slow": TINY})
    monkeypatch.setattr(records, "MAX_STEPS", 10)
    monkeypatch.setattr(records, "LOG", tmp_path / "log.csv")
    train = records.train
    monkeypatch.setattr(records, "train", lambda *arguments: train(*arguments, steps=10))
    for flags in (["--dry"], []):
        monkeypatch.setattr(sys, "argv", ["records", "slow", "sgp", *flags])
        assert records.main() == 0
        assert (tmp_path / "log.csv").exists() != bool(flags)
    assert "setting: {'rate': 0.01}" in capsys.readouterr().out
    rows = pd.read_csv(tmp_path / "log.csv", dtype=DTYPES)
    assert records.main() == 0
    assert "sgp on slow has a row" in capsys.readouterr().out
    monkeypatch.setattr(Mine, "grid", ({"rate": 0.02},))
    with pytest.raises(
        ValueError, match=r"got rows of sgp on slow with .*0.01.*, expected .*0.02.*; remove these rows"
    ):
        records.main()
    assert pd.read_csv(tmp_path / "log.csv", dtype=DTYPES).equals(rows)
    assert rows[["track", "submission", "seeds", "seed"]].to_numpy().tolist() == [["slow", "sgp", "1 2 3", 1]]


@pytest.mark.parametrize("name", names())
def test_a_submission_fits_every_track_with_every_setting(name: str) -> None:
    kind = entry(name)
    assert 1 <= len(kind.grid) <= 6
    for track in TRACKS.values():
        plan = LabPlan.of(kind(**kind.grid[0]).method())
        one = LabTask(lambda: torch.nn.Linear(2, 2), task.loss, lambda *_: None, lambda p: torch.optim.SGD(p, lr=0.1))
        setting = Setting(track.workers, 10, records.COMPUTE, track.network)
        assert plan.make(setting, Models(one, track.workers), elastic=bool(track.events)).driver
    assert {kind(**setting).rate > 0 for setting in kind.grid} == {True}


def test_one_worker_dies_every_50_steps_and_another_one_joins() -> None:
    events = TRACKS["deaths"].events
    assert [event.step for event in events if isinstance(event, Kill)] == [50, 100, 150, 200, 250]
    assert [event.step for event in events if isinstance(event, Join)] == [70, 120, 170, 220, 270]
    assert [track.events for name, track in TRACKS.items() if name != "deaths"] == [[], [], []]


def test_splits_share_no_byte() -> None:
    sizes = [task.split(name).numel() for name in ("train", "validation", "test")]
    assert sum(sizes) == task.NUM_PARTS * task.PART_BYTES == task.parts().numel()
    assert sizes[1] == sizes[2] == sizes[0] // 14


def test_uneven_data_has_shares_of_its_own_for_each_worker() -> None:
    draw = torch.Generator()
    starts = {part: bytes(task.split("train")[part, :64].tolist()) for part in range(task.NUM_PARTS)}
    assert len(set(starts.values())) == task.NUM_PARTS
    uneven, even = task.batches(8, 0.1), task.batches(8, float("inf"))
    assert uneven(1, 0, draw.manual_seed(1)).shape == (task.BATCH, task.CONTEXT + 1)
    assert torch.equal(uneven(1, 0, draw.manual_seed(1)), uneven(9, 3, draw.manual_seed(1))), "a worker that joins"
    assert not torch.equal(uneven(1, 0, draw.manual_seed(1)), even(1, 0, draw.manual_seed(1)))


def test_the_log_follows_the_rules() -> None:
    log = pd.read_csv(records.LOG, dtype=DTYPES)
    grid = pd.read_csv(records.GRID, dtype=DTYPES)
    assert not log.duplicated(["track", "submission", "setting"]).any()
    assert not grid.duplicated(["track", "submission", "setting"]).any()
    for row in log.itertuples():
        best = records.setting_of(str(row.track), str(row.submission))
        assert row.setting == records.text_of(str(row.submission), best), row
        assert row.seeds == "1 2 3", row
        assert row.cpu_seconds <= 600, row
    for rows in (log, grid):
        assert set(rows["steps"]) == {MAX_STEPS}
        assert set(rows["data"]) == {digest(task.TEXT)}
        assert (rows["steps_to_target"].dropna() <= MAX_STEPS).all()
    assert 0 < TARGET_BITS < 8


def test_a_track_without_a_finished_run_has_a_sentence() -> None:
    rows = pd.DataFrame({"track": ["deaths"], "submission": ["sgp"], "seconds": [np.nan]})
    assert headline(rows) == f"First to {TARGET_BITS:g} bits per byte: on `deaths` none of 1."

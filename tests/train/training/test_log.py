"""Meters, the CSV of a rank, random states, and the comparison table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from train.compare import compare
from train.training.log import EpochRow, RunLog
from train.training.meters import Meters
from train.training.rng import rng_state, set_rng_state

CPU = torch.device("cpu")
ROW = EpochRow(
    epoch=1,
    step=11,
    own_steps=12,
    time_seconds=1.5,
    data_seconds=0.1,
    wait_seconds=0.2,
    learning_rate=0.1,
    loss=0.5,
    train_accuracy_percent=90.0,
    consensus_distance=0.01,
    bytes_sent=1000,
    num_rounds=11,
    mean_staleness_forwards=0.0,
    max_staleness_forwards=0,
    own_test={"accuracy_percent": 91.0},
    averaged_test={"accuracy_percent": 92.0},
)


def test_meters_weigh_batches_by_their_items() -> None:
    meters = Meters(CPU)
    meters.update(torch.tensor(1.0), torch.tensor(3), 3)
    meters.update(torch.tensor(3.0), torch.tensor(0), 1)
    assert meters.loss == pytest.approx((3 * 1.0 + 1 * 3.0) / 4)
    assert meters.accuracy_percent == 75.0


def test_meters_go_on_from_their_state() -> None:
    meters, other = Meters(CPU), Meters(CPU)
    meters.update(torch.tensor(1.0), torch.tensor(2), 3)
    meters.train_seconds = 4.0
    other.load_state_dict(meters.state_dict(bytes_sent=100.0))
    assert (other.loss, other.accuracy_percent) == (meters.loss, meters.accuracy_percent)
    assert (other.train_seconds, other.bytes_sent_before) == (4.0, 100.0)
    assert other.state_dict(bytes_sent=10.0)["bytes_sent"] == 110.0
    other.start_epoch()
    assert meters.loss == 1.0


def test_csv_has_a_row_per_epoch_with_named_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, rank=2)
    log.epoch(ROW)
    log.epoch(replace(ROW, epoch=2, step=22, own_test={}, averaged_test={}, consensus_distance=None))
    log.close()
    log.close()
    table = pd.read_csv(tmp_path / "rank_0002.csv")
    assert table["step"].tolist() == [11, 22]
    assert table["own_test_accuracy_percent"].isna().tolist() == [False, True]
    assert {"own_steps", "time_seconds", "loss", "train_accuracy_percent"} <= set(table)
    assert {"bytes_sent", "consensus_distance"} <= set(table)
    assert capsys.readouterr().out == ""  # rank 0 speaks for all


def test_a_rank_without_a_step_in_an_epoch_has_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats = dict.fromkeys(("wait_seconds", "bytes_sent", "num_rounds", "mean_staleness", "max_staleness"), 0.0)
    row = EpochRow.of(1, 11, 0, 0.1, Meters(CPU), stats, None)
    assert (row.loss, row.train_accuracy_percent) == (None, None)
    log = RunLog(tmp_path, rank=0)
    log.epoch(row)
    log.close()
    assert pd.read_csv(tmp_path / "rank_0000.csv")[["loss", "train_accuracy_percent"]].isna().to_numpy().all()
    printed = capsys.readouterr().out
    assert "no steps of this rank" in printed
    assert "nan" not in printed


def test_csv_of_a_resumed_run_drops_rows_after_the_checkpoint(tmp_path: Path) -> None:
    log = RunLog(tmp_path, rank=1)
    for epoch in (1, 2, 3):
        log.epoch(replace(ROW, epoch=epoch, step=11 * epoch, loss=1.0))
    resumed = RunLog(tmp_path, rank=1, step=25)
    resumed.epoch(replace(ROW, epoch=3, step=33, loss=2.0))
    table = pd.read_csv(tmp_path / "rank_0001.csv")
    assert table["epoch"].tolist() == [1, 2, 3]
    assert table["loss"].tolist() == [1.0, 1.0, 2.0]


def test_rank_0_prints_and_writes_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, rank=0)
    log.point(10, {"bytes_sent": 3.0}, loss=0.5)
    log.epoch(ROW)
    log.hyper_parameters({"recipe": "sgp", "lr": 0.5, "milestones": (1, 2)}, {"accuracy_percent": 97.5})
    log.close()
    assert "epoch   1" in capsys.readouterr().out
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == 1  # of two, TensorBoard may drop what is in one
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.value for event in board.Scalars("result/accuracy_percent")] == [97.5]
    start = board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for word in (b"recipe", b"sgp", b"milestones", b"(1, 2)"):
        assert word in start


def test_random_states_survive_weights_only_loading(tmp_path: Path) -> None:
    def draw() -> float:
        return float(torch.rand(()))

    torch.save(rng_state(CPU), tmp_path / "rng.pt")
    expected = draw()
    assert draw() != expected
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True), CPU)
    assert draw() == expected
    with pytest.raises(ValueError, match=r"got a checkpoint of a CPU run, expected one of a run on cuda"):
        set_rng_state(rng_state(CPU), torch.device("cuda"))


def test_comparison_table_is_relative_to_the_first_recipe() -> None:
    rank = {"own_test_accuracy_percent": 97.0, "bytes_sent": 2e6, "time_seconds": 3.0}

    def accuracy(percent: float) -> dict[str, Any]:
        return {"score": "accuracy_percent", "averaged_test": {"accuracy_percent": percent}}

    text = compare(
        {
            "ar": {**accuracy(98.0), "consensus_distance": 0.0, "ranks": [rank]},
            "sgp": {**accuracy(97.5), "consensus_distance": 0.1, "ranks": [rank, rank]},
        }
    )
    header, first, second = text.splitlines()
    assert "to ar [points]" in header
    assert first.split() == ["ar", "98.00", "+0.00", "97.00", "0", "2.0", "3.0"]
    assert second.split() == ["sgp", "97.50", "-0.50", "97.00", "0.1", "2.0", "3.0"]

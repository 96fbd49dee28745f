"""The benchmark of consensus control, on images of noise: what a row counts, and how it goes on."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.cluster.workload.image_task import SIZE, SPLITS
from benchmarks.consensus_control.__main__ import append, digits, missing
from benchmarks.consensus_control.training import METHODS, ControlTraining, arguments_of, run
from benchmarks.pages.control import summary


@pytest.fixture
def setting(tmp_path: Path) -> ControlTraining:
    """Two ranks, two steps an epoch."""
    generator = np.random.default_rng(0)
    for split in SPLITS:
        np.save(tmp_path / f"{split}.npy", generator.integers(256, size=(16, 3, SIZE, SIZE), dtype=np.uint8))
        np.save(tmp_path / f"{split}-labels.npy", generator.integers(10, size=16))
    return ControlTraining(tmp_path, "noise", ranks=2, epochs=2, lr=0.1, momentum=0.9, batch_size=4)


def test_rows_are_appended_and_runs_not_made_twice(setting: ControlTraining, tmp_path: Path) -> None:
    path, methods = tmp_path / "rows.csv", ["exponential", "ring-control-2", "average-every-2"]
    assert missing(path, setting, methods, [1, 2]) == [(method, seed) for seed in (1, 2) for method in methods]
    rows = [run(method, setting, 1) for method in methods]
    assert rows[0]["models_per_step"] == pytest.approx(1.0, abs=0.01)
    assert (rows[0]["steps"], rows[0]["rounds"]) == (4, 4)
    assert rows[1]["averages"] >= 1
    assert 0 <= rows[1]["accuracy"] <= 1
    assert rows[2]["models_per_step"] == pytest.approx(0.5, abs=0.01)  # of two ranks an average is one model
    for row in rows:
        append(path, row, seed=1)
    assert missing(path, setting, methods, [1, 2]) == [(method, 2) for method in methods]
    with path.open(newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == methods


def test_learning_rate_and_methods(setting: ControlTraining) -> None:
    assert [setting.lr_at(step) for step in range(4)] == pytest.approx([0.05, 0.1, 0.1, 0.05])
    assert all(isinstance(arguments_of(method, 4), dict) for method in METHODS)
    with pytest.raises(ValueError, match="got method 'star', expected one like allreduce"):
        arguments_of("star", 4)


def test_digits_are_arrays_of_that_size(tmp_path: Path) -> None:
    digits(tmp_path)
    train, test = (np.load(tmp_path / f"{split}.npy") for split in SPLITS)
    assert train.shape[1:] == test.shape[1:] == (3, SIZE, SIZE)
    assert len(train) + len(test) == 1797
    assert train.max() == 255


def test_the_page_compares_each_seed_with_all_reduce() -> None:
    figures = [("allreduce", 1, 0.60, 1.875), ("allreduce", 2, 0.62, 1.875), ("ring-every-4", 1, 0.58, 0.5)]
    figures += [("average-every-4", 1, 0.599, 0.4688), ("average-every-4", 2, 0.6160, 0.4688)]
    common = {"data": "noise", "ranks": 16, "epochs": 8, "lr": 0.1, "momentum": 0.9, "batch_size": 32, "rounds": 9}
    names = ("method", "seed", "accuracy", "models_per_step")
    text = summary(pd.DataFrame([{**common, **dict(zip(names, row, strict=True))} for row in figures]))
    assert "| allreduce | 2 | 9 | 1.875 | 61.00% | +0.00 | +0.00, +0.00 | no |" in text
    assert "| average-every-4 | 2 | 9 | 0.469 | 60.75% | -0.25 | -0.10, -0.40 | yes |" in text
    assert "| ring-every-4 | 1 | 9 | 0.500 | 58.00% | -2.00 | -2.00 | no |" in text
    assert "All-reduce with 2 seeds: 60.00% to 62.00%, 2.00 points apart." in text

"""The benchmark of consensus control, on images of noise: what a row counts, and how it goes on."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cluster.workload.training import SIZE, SPLITS
from benchmarks.consensus_control.__main__ import append, digits, missing
from benchmarks.consensus_control.training import METHODS, ControlTraining, arguments_of, run


@pytest.fixture
def setting(tmp_path: Path) -> ControlTraining:
    """Two ranks, two steps an epoch."""
    generator = np.random.default_rng(0)
    for split in SPLITS:
        np.save(tmp_path / f"{split}.npy", generator.integers(256, size=(16, 3, SIZE, SIZE), dtype=np.uint8))
        np.save(tmp_path / f"{split}-labels.npy", generator.integers(10, size=16))
    return ControlTraining(tmp_path, "noise", ranks=2, epochs=2, lr=0.1, momentum=0.9, batch_size=4)


def test_rows_are_appended_and_runs_not_made_twice(setting: ControlTraining, tmp_path: Path) -> None:
    path, methods = tmp_path / "rows.csv", ["exponential", "ring-control-2"]
    assert missing(path, setting, methods, [1, 2]) == [(method, seed) for seed in (1, 2) for method in methods]
    rows = [run(method, setting, 1) for method in methods]
    assert rows[0]["models_per_step"] == pytest.approx(1.0, abs=0.01)
    assert (rows[0]["steps"], rows[0]["rounds"]) == (4, 4)
    assert rows[1]["averages"] >= 1
    assert 0 <= rows[1]["accuracy"] <= 1
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

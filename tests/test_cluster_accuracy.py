"""Time to a fixed accuracy on the emulated cluster: shares of images, curves, the join; and, as root, all of it."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from benchmarks.cluster.accuracy import EVALUATE_EVERY, Accuracy, curve
from benchmarks.cluster.delays import Delays
from benchmarks.cluster.images import decode
from benchmarks.cluster.job import Job
from benchmarks.cluster.methods import METHODS, require_methods
from benchmarks.cluster.peers import PERIOD
from benchmarks.cluster.table import frame, rows_of
from benchmarks.cluster.time_to_accuracy import is_ours, markdown, seconds_per_step, steps_to, times
from benchmarks.cluster.training import SIZE, Images, Training, network
from benchmarks.cluster.trials import Trial
from tests.test_cluster import ROOT, answer, cannot_make_namespaces

# Images.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An ImageFolder tree: 24 training and 6 test images of three classes, each of one colour."""
    for split, num in (("train", 8), ("test", 2)):
        for label in range(3):
            (tmp_path / "images" / split / f"class{label}").mkdir(parents=True)
            for index in range(num):
                color = (80 * label, 10 * index, 255)
                Image.new("RGB", (40, 32), color).save(tmp_path / "images" / split / f"class{label}" / f"{index}.png")
    return tmp_path / "images"


def test_decoded_images_are_those_of_the_folder(folder: Path, tmp_path: Path) -> None:
    decode(folder, tmp_path / "arrays")
    images = Images(tmp_path / "arrays", "test")
    x, labels = images.batch(np.arange(len(images)))
    assert x.shape == (6, 3, SIZE, SIZE)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    expected = torch.tensor([[80 * label, 10 * index, 255] for label in range(3) for index in range(2)]) / 127.5 - 1
    torch.testing.assert_close(x, expected[:, :, None, None].expand_as(x))
    assert network(0)(x).shape == (6, 10)


def test_a_folder_without_splits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without train, test, expected train/ and test/"):
        decode(tmp_path, tmp_path / "arrays")


def test_ranks_share_an_epoch_and_flip_half_of_it(tmp_path: Path) -> None:
    images = np.zeros((64, 3, SIZE, SIZE), dtype=np.uint8)
    images[..., 0] = 255  # a white line at the left
    np.save(tmp_path / "train.npy", images)
    np.save(tmp_path / "train-labels.npy", np.arange(64))
    data = Images(tmp_path, "train")
    epochs = [list(islice(data.batches(rank, 2, size=8, seed=3), 8)) for rank in range(2)]
    first, second = (
        [int(y) for rank in epochs for _, labels in rank[part] for y in labels] for part in (slice(4), slice(4, 8))
    )
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
    is_left = torch.cat([x[:, 0, 0, 0] for rank in epochs for x, _ in rank]) > 0
    assert 0.3 < is_left.float().mean() < 0.7


# Jobs.


def test_jobs_survive_their_messages() -> None:
    shared: dict[str, Any] = {"method": "sgp", "number": 3, "num_steps": 5, "compute_seconds": 0.1}
    shared.update(delays=Delays(straggle_chance=0.5), limit_seconds=9.0)
    jobs: list[Job] = [
        Trial(**shared, num_parameters=1e6),
        Training(**shared, learning_rate=0.5, images="here", batch_size=2, evaluate_every=1, seed=4),
    ]
    for job in jobs:
        message = job.as_message()
        assert message["kind"] == type(job).__name__
        assert type(job).from_message(message) == job


@pytest.mark.parametrize("names", [(), ("ddp", "ddp"), ("ddp", "typo")])
def test_methods_are_there_and_named_once(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected some of local, hand"):
        require_methods(names)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"hosts": 1}, "expected 2 to"),
        ({"steps": 0}, "expected steps, batch_size and repeats >= 1"),
        ({"learning_rates": (0.1, -1.0)}, "expected one > 0"),
        ({"straggle_chance": 2.0}, "a straggle_chance from 0 to 1"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Accuracy(Path("data"), **wrong)


def test_evaluations_come_right_after_an_average() -> None:
    assert all(EVALUATE_EVERY % method.period == 0 for method in METHODS.values())
    assert EVALUATE_EVERY % PERIOD == 0


# Curves and the join.


def test_the_curve_counts_all_ranks() -> None:
    ranks: list[dict[str, list[float]]] = [
        {"num_steps": [40, 80], "num_correct": [10, 15], "num_tested": [50, 50], "mean_loss": [2.0, 1.0]},
        {"num_steps": [44, 90], "num_correct": [20, 48], "num_tested": [100, 100], "mean_loss": [4.0, 3.0]},
    ]
    assert curve(ranks) == [
        {"num_steps": 42.0, "accuracy": 20.0, "worst_accuracy": 20.0, "mean_loss": 3.0},
        {"num_steps": 85.0, "accuracy": 42.0, "worst_accuracy": 30.0, "mean_loss": 2.0},
    ]


def trained(method: str, *accuracy: float, rate: float = 0.1, chance: float = 0.0, repeat: int = 0) -> pd.DataFrame:
    """An evaluation every 40 steps."""
    points = [{"num_steps": 40.0 * (k + 1), "accuracy": value} for k, value in enumerate(accuracy)]
    own = {"method": method, "learning_rate": rate, "straggle_chance": chance, "repeat": repeat, "error": None}
    return pd.DataFrame([{**point, **own} for point in points])


def test_steps_to_a_target() -> None:
    rows = pd.concat(
        [
            trained("ddp", 30, 50, 70),  # 60 after 100
            trained("ddp", 30, 60, 70, repeat=1),  # 80
            trained("ddp", 20, 30, 90, rate=0.3),  # 100
            trained("ddp", 20, 30, 40, rate=0.3, repeat=1),  # never
            trained("sgp", 20, 30, 59),
            trained("sgp", 80, chance=0.05),  # 30
        ]
    )
    found = steps_to(rows, 60.0).set_index(["method", "straggle_chance"])
    assert found.loc[("ddp", 0.0), "num_steps"] == 90
    assert found.loc[("ddp", 0.0), "learning_rate"] == 0.1
    assert found.loc[("ddp", 0.0), "best"] == 90
    assert found.loc[("sgp", 0.0), "num_steps"] == float("inf")
    assert found.loc[("sgp", 0.05), "num_steps"] == 30


def cluster_rows(method: str, *step_ms: float, chance: float = 0.0) -> list[dict[str, Any]]:
    shared = {
        "slow_host": 1.0,
        "slow_link_share": 0.0,
        "num_parameters": 1e6,
        "straggle_chance": chance,
        "planned_ms": 20,
    }
    key = {"hosts": 2, "rate_gbit": 1.0, "method": method, "repeat": 0, **shared}
    return rows_of(key, [answer(value) for value in step_ms], rate=1e9)


def test_time_is_steps_times_seconds() -> None:
    steps = steps_to(
        pd.concat(
            [
                trained("ddp", 60),
                trained("adpsgd", 0, 60),
                trained("adpsgd", 0, 0, 60, chance=0.05),
                trained("choco", 5),
            ]
        ),
        60.0,
    )
    rows = cluster_rows("ddp", 500, 500) + cluster_rows("adpsgd", 100, 100) + cluster_rows("choco", 50, 50)
    slow = cluster_rows("ddp", 900, 900, chance=0.05) + cluster_rows("adpsgd", 100, 300, chance=0.05)
    table = times(steps, seconds_per_step(frame(rows + slow)))
    even = "2 hosts, 1 M parameters, 1 Gbit/s, compute 20 ms"
    straggling = f"{even}, 5% stragglers"
    assert table.loc["ddp", even] == pytest.approx(40 * 0.5)
    assert table.loc["ddp", straggling] == pytest.approx(40 * 0.9), "what it computes does not depend on stragglers"
    assert table.loc["adpsgd", even] == pytest.approx(80 * 0.1)
    assert table.loc["adpsgd", straggling] == pytest.approx(120 * 0.15), "2 steps take 100 and 300: 0.15 s each"
    assert table.loc["choco", even] == float("inf")
    assert np.isnan(table.loc["choco", straggling])
    text = markdown(table, 60.0)
    assert "| DDP | 60.0 | 0.1 | 40 | 20 | 36 |" in text
    assert "| fastest of ours | | | | AD-PSGD 8 | AD-PSGD 18 |" in text
    assert "| fastest of others | | | | DDP 20 | DDP 36 |" in text


def test_whose_methods_they_are() -> None:
    assert [name for name in METHODS if is_ours(name)][:2] == ["sgp", "osgp"]
    others = {name for name in METHODS if not is_ours(name)}
    assert {"local", "hand", "hand-overlap", "ddp", "ddp-view", "hivemind", "slowmo", "post-local"} <= others


@pytest.mark.e2e
@pytest.mark.timeout(560)
def test_one_command_from_images_to_a_curve(folder: Path, tmp_path: Path) -> None:
    if why := cannot_make_namespaces():
        pytest.skip(why)
    options = ["--data", str(folder), "--methods", "osgp", "--hosts", "2", "--steps", "40", "--batch-size", "4"]
    command = [sys.executable, "-m", "benchmarks.cluster.accuracy", *options, "--out", str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = pd.read_csv(tmp_path / "out" / "accuracy.csv")
    assert rows["num_steps"].tolist() == [EVALUATE_EVERY]
    assert rows["mean_loss"].item() < np.log(10), "better than a guess"
    assert 0 <= rows["worst_accuracy"].item() <= rows["accuracy"].item() <= 100
    print(rows)

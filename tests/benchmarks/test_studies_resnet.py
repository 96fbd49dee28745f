"""The study with ResNet-20: epochs, crops, and a training of every method."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from benchmarks.pages import resnet_study
from benchmarks.record import DTYPES
from benchmarks.studies import __main__ as studies
from benchmarks.studies import images, resnet
from benchmarks.studies.study import Study
from gossip_modules.lab import Compute, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining
from train.tasks.images.cifar10 import SIDE

NUM_TRAINED = 20
"""The images that workers learn, of a small archive."""


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive of few images; the red and the green of a pixel are its row and its column."""
    rows, columns = np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij")
    for split, count in (("train", 3), ("test", 1)):
        for label in range(10):
            for number in range(count):
                path = tmp_path / split / str(label) / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                blue = np.full((SIDE, SIDE), 3 * label + number)
                Image.fromarray(np.stack([rows, columns, blue], axis=-1).astype(np.uint8)).save(path)
    with tarfile.open(tmp_path / images.ARCHIVE, "w:gz") as tar:
        for split in ("train", "test"):
            tar.add(tmp_path / split, arcname=split)
    monkeypatch.setenv("GOSSIP_DATA", str(tmp_path))
    monkeypatch.setattr(resnet, "NUM_VALIDATION", 30 - NUM_TRAINED)


@pytest.mark.usefixtures("archive")
def test_an_epoch_has_each_image_once() -> None:
    task = resnet.WholeImages(2, 5)
    epochs = []
    for epoch in (0, 1):
        steps = (2 * epoch, 2 * epoch + 1)
        shown = [task.batch(w, step, torch.Generator().manual_seed(0)) for step in steps for w in (0, 1)]
        blue = torch.cat([x[:, 2, 16, 16] for x, _ in shown])
        assert torch.equal(blue // 3, torch.cat([labels for _, labels in shown]))
        epochs.append(blue.tolist())
    assert len(set(epochs[0])) == NUM_TRAINED
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert not set(epochs[0]) & set(task.splits[0][0][:, 0, 0, 2].tolist())


@pytest.mark.usefixtures("archive")
def test_images_are_cropped_and_mirrored() -> None:
    task = resnet.WholeImages(1, NUM_TRAINED)
    margin = {value.item() for value in task.images[0, 0, 0]}
    shifts, num_mirrored = set(), 0
    for step in range(10):
        crops, _ = task.batch(0, step, torch.Generator().manual_seed(step))
        assert crops.is_contiguous(memory_format=torch.channels_last)
        for crop in crops.long():
            row, column = crop[0, 16, 16].item(), crop[1, 16, 16].item()
            direction = crop[1, 16, 17].item() - column
            num_mirrored += direction == -1
            shifts |= {row - 16, (column - 16 if direction == 1 else SIDE - 1 - column - 16)}
            inner = crop[1, 16, 4:-4]
            assert inner.tolist() == [column + direction * (x - 16) for x in range(4, SIDE - 4)]
    assert shifts == set(range(-resnet.MAX_SHIFT, resnet.MAX_SHIFT + 1))
    assert 60 < num_mirrored < 140  # of 200, half: 5.6 standard deviations
    assert margin == {125, 123, 114}


def trained(method: Any, workers: int, by: str, **options: Any) -> LabTraining:
    """A training of two steps, in batches of two images."""
    task = resnet.WholeImages(workers, 2, **options)
    own = LabTask(task.model, task.loss, task.batch, lambda parameters: task.optimizer(parameters, 0.01))
    setting = Setting(workers, None, Compute(0.1), Network("1 Gbit/s"))
    training = LabTraining(LabPlan.of(method), setting, own, by=by)
    for _ in training.run(2):
        pass
    return training


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize("method", resnet.METHODS)
def test_every_method_trains(method: str) -> None:
    models = trained(resnet.METHODS[method], resnet.WORKERS, "loop").models
    assert models.x.shape == (resnet.WORKERS, 269_722)
    assert models.losses.isfinite().all()


@pytest.mark.usefixtures("archive")
def test_all_workers_at_once_train_as_one_by_one() -> None:
    at_once, one_by_one = (trained("sgp", 2, by, dtype=torch.float32).models for by in ("vmap", "loop"))
    torch.testing.assert_close(at_once.x, one_by_one.x, rtol=0, atol=2e-4)
    torch.testing.assert_close(at_once.losses, one_by_one.losses, rtol=1e-3, atol=0)


@pytest.mark.usefixtures("archive")
def test_the_command_writes_the_short_trainings_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = resnet.RESNET["resnet"]
    small = Study(
        lambda device: resnet.WholeImages(2, 2, device=device),
        lambda workers: {"SGP": "sgp"},
        cells=((2, 2, 1), (2, 4, 1)),
        rates=own.rates,
        points=own.points,
        by=own.by,
        has_device=True,
    )
    monkeypatch.setattr(studies, "STUDIES", {"resnet": small})
    path = tmp_path / "resnet.csv"
    assert studies.main(["resnet", "--output", str(path)]) == 0
    rows = pd.read_csv(path, dtype=DTYPES)
    assert rows["steps"].tolist() == [2, 2, 4, 4]
    assert rows["step"].tolist() == [1, 2, 2, 4]
    assert set(rows["by"]) == {"loop"}
    assert rows["test"].between(0, 100).all()
    assert [steps for _, steps, _ in own.cells] == [3510, 10_530, 10_530]


def test_a_study_for_the_cpu_refuses_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        studies.main(["accuracy_bytes", "--output", str(tmp_path / "a.csv"), "--device", "cuda"])
    assert "expected none: it trains on the CPU" in capsys.readouterr().err


def rows_of(errors: dict[tuple[str, int, int], float]) -> pd.DataFrame:
    """Rows of the ends of trainings, by method, epochs and seed."""
    return pd.DataFrame(
        {
            "method": method,
            "workers": resnet.WORKERS,
            "steps": epochs * resnet.STEPS_PER_EPOCH,
            "seed": seed,
            "step": epochs * resnet.STEPS_PER_EPOCH,
            "is_tuning": False,
            "test": error,
        }
        for (method, epochs, seed), error in errors.items()
    )


def test_the_page_has_the_longest_trainings_and_what_is_missing() -> None:
    short = {("all-reduce", 10, 1): 50.0, ("SGP", 10, 1): 52.5, ("Overlap SGP", 10, 1): 53.0}
    rows = rows_of(short)
    assert resnet_study.after_epochs(rows_of({("all-reduce", 10, 1): 50.0})) == {}
    assert resnet_study.said(rows) == (
        "**After 10 epochs, SGP ends 2.5 points below all-reduce, which reaches 50.0 % (1 seed).** Methods not "
        "measured yet: 4 after 10 epochs, all after 30 epochs."
    )
    assert resnet_study.summary(rows).splitlines()[-1] == "| Overlap SGP | 47.0 | +3.0 | 1 |"
    long = {(name, 30, seed): 9.0 + seed for name in resnet.METHODS for seed in (1, 2)}
    rows = rows_of({**short, **long, ("SGP", 30, 1): 9.5})
    text = resnet_study.said(rows)
    assert text.startswith(
        "**After 30 epochs, SGP ends 0.2 points above all-reduce, which reaches 89.5 % (2 seeds).** Methods not "
    )
    assert text.endswith("yet: 4 after 10 epochs.")
    assert "| SGP | 47.5 | +2.5 | 1 | 89.8 | -0.2 (-0.5 to +0.0) | 2 |" in resnet_study.summary(rows)
    assert sum(len(resnet.RESNET["resnet"].methods(n)) for n, *_ in resnet.RESNET["resnet"].cells) == 21
    assert resnet_study.PLANNED == 21


@pytest.mark.skipif("GOSSIP_DATA" not in os.environ, reason="GOSSIP_DATA names no folder with CIFAR-10")
@pytest.mark.soak  # decodes 60,000 images
def test_the_archive_is_cifar10() -> None:
    task: Any = resnet.RESNET["resnet"].task()
    assert len(task.labels) // (resnet.WORKERS * resnet.BATCH_SIZE) == resnet.STEPS_PER_EPOCH
    assert [len(labels) for _, labels in task.splits] == [resnet.NUM_VALIDATION, 10_000]
    assert task.labels.bincount().tolist() == pytest.approx([4500] * 10, rel=0.05)
    crops, _ = task.batch(0, 0, torch.Generator().manual_seed(0))
    found = task._normalised(crops)
    assert abs(float(found.mean())) < 0.3
    assert 0.7 < float(found.std()) < 1.3

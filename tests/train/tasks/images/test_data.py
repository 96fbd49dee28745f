"""Data: shards, batches as pure functions of (seed, epoch, rank, step), the three data sets and their errors."""

from __future__ import annotations

import multiprocessing
import os
import tarfile
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from train.tasks.images.config import Config
from train.tasks.images.data import Data
from train.tasks.images.images import BatchKey
from train.tasks.images.task import data_of


@pytest.fixture(scope="module")
def digits() -> Data:
    return data_of(Config(), rank=1, world_size=4)


def test_digits_are_real_and_always_split_the_same_way(digits: Data) -> None:
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert (digits.train.num_channels, digits.train.num_classes) == (1, 10)
    other = data_of(Config(seed=7), rank=0, world_size=2)
    everything = BatchKey(np.arange(359), seed=None)
    assert all(torch.equal(a, b) for a, b in zip(digits.test[everything], other.test[everything], strict=True))
    test_images = {image.numpy().tobytes() for image in digits.test[everything][0]}
    train_images = {image.numpy().tobytes() for image in digits.train[BatchKey(np.arange(1438), seed=None)][0]}
    assert not test_images & train_images


def assert_same_batches(first: Iterable[tuple[Tensor, Tensor]], second: Iterable[tuple[Tensor, Tensor]]) -> None:
    for (images, labels), (other_images, other_labels) in zip(first, second, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_from_a_step_is_the_tail_of_the_stream_from_the_start(digits: Data, num_workers: int) -> None:
    assert digits.steps_per_epoch == 11
    whole, tail = digits.train_stream(0), replace(digits, num_workers=num_workers).train_stream(18)
    assert_same_batches(islice(whole, 18, 25), islice(tail, 7))  # from the second epoch into the third
    tail.close()


def test_every_epoch_reads_other_images_of_the_shard_and_none_twice(digits: Data) -> None:
    keys = list(islice(digits.train_keys(0), 22))
    for epoch in (keys[:11], keys[11:]):
        indices = np.concatenate([key.indices for key in epoch])
        assert len(np.unique(indices)) == len(indices) == 11 * 32
        assert set(indices) <= set(digits.shard)
    assert len({key.seed for key in keys}) == 22


def test_order_differs_between_epochs_ranks_and_seeds(digits: Data) -> None:
    firsts = [
        next(data.train_stream(step))[0]
        for data, step in ((digits, 0), (digits, 11), (replace(digits, rank=2), 0), (replace(digits, seed=9), 0))
    ]
    assert not any(torch.equal(firsts[i], firsts[j]) for i in range(4) for j in range(i))


def test_loading_leaves_the_global_generator_alone(digits: Data) -> None:
    before = torch.get_rng_state()
    next(digits.train_stream(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_close_ends_the_processes_of_every_stream(digits: Data) -> None:
    data = replace(digits, num_workers=1)
    streams = [data.train_stream(0), data.test_batches(sharded=True)]
    for stream in streams:
        next(stream)
    assert len(multiprocessing.active_children()) == 2
    for _ in range(2):
        data.close()
    assert not multiprocessing.active_children()
    assert [list(stream) for stream in streams] == [[], []]


def test_sharded_test_batches_cover_the_test_set_once(digits: Data) -> None:
    num_images = [
        sum(len(labels) for _, labels in replace(digits, rank=rank).test_batches(sharded=True)) for rank in range(4)
    ]
    assert num_images == [90, 90, 90, 89]
    assert sum(len(labels) for _, labels in digits.test_batches(sharded=False)) == 359


def test_a_batch_larger_than_the_shard_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got a batch of 4096 images, expected at most the 359 .* lower --batch-size"):
        data_of(Config(batch_size=4096), rank=0, world_size=4)


def image_tree(root: Path, *, held_out: str = "val", classes: tuple[str, ...] = ("cat", "dog")) -> Config:
    generator = np.random.default_rng(0)
    for split in ("train", held_out):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for index in range(4):
                pixels = generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{index}.png")
    return Config(dataset="imagefolder", data_dir=str(root), model="resnet20", batch_size=2)


@pytest.mark.parametrize("held_out", ["val", "test"])
@pytest.mark.parametrize(("model", "size"), [("resnet20", 32), ("resnet50", 224)])
def test_image_folder(tmp_path: Path, held_out: str, model: str, size: int) -> None:
    config = replace(image_tree(tmp_path, held_out=held_out), model=model)
    data = data_of(config, rank=0, world_size=2)
    assert (len(data.train), len(data.test), data.steps_per_epoch) == (8, 8, 2)
    before = torch.get_rng_state()
    for batches in (data.train_stream(0), data.test_batches(sharded=False)):
        images, labels = next(batches)
        assert images.shape[1:] == (3, size, size)
        assert images.dtype == torch.uint8
        assert set(labels.tolist()) <= {0, 1}
    assert data.train[BatchKey(np.array([0, 5]), seed=3)][1].tolist() == [0, 1]
    assert torch.equal(torch.get_rng_state(), before)
    with_workers = data_of(replace(config, num_workers=1), rank=0, world_size=2)
    assert_same_batches(islice(data.train_stream(1), 2), islice(with_workers.train_stream(1), 2))
    with_workers.close()


def test_image_folder_errors(tmp_path: Path) -> None:
    config = image_tree(tmp_path / "a")
    with pytest.raises(ValueError, match=r"no such folder.*expected train/ and val/ or test/.*--data-dir"):
        data_of(replace(config, data_dir=str(tmp_path / "b")), rank=0, world_size=1)
    for index in range(9):
        (tmp_path / "c" / f"n{index}").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"\(with n0, n1, n2, n3, n4 and 4 more\), expected train/"):
        data_of(replace(config, data_dir=str(tmp_path / "c")), rank=0, world_size=1)
    (tmp_path / "a" / "val" / "dog").rename(tmp_path / "a" / "val" / "wolf")
    with pytest.raises(ValueError, match=r"got other classes in .*val.*'dog', 'wolf'"):
        data_of(config, rank=0, world_size=1)


def test_missing_cifar10_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got no CIFAR-10 in .*pass --download, or --data-dir"):
        data_of(Config(dataset="cifar10", data_dir=str(tmp_path)), rank=0, world_size=1)


@pytest.mark.skipif("GOSSIP_DATA" not in os.environ, reason="GOSSIP_DATA names no folder with cifar10-jpeg.tar.gz")
def test_cifar10_as_a_folder_of_jpegs(tmp_path: Path) -> None:
    with tarfile.open(Path(os.environ["GOSSIP_DATA"]) / "cifar10-jpeg.tar.gz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith("00.jpg"):
                archive.extract(member, tmp_path, filter="data")
    config = Config(dataset="imagefolder", data_dir=str(tmp_path), model="resnet20", batch_size=16)
    data = data_of(config, rank=0, world_size=2)
    assert data.train.num_classes == 10
    images, labels = next(data.train_stream(0))
    assert images.shape == (16, 3, 32, 32)
    assert 0.2 < data.train.prepare(images).std() < 2
    assert len(labels.unique()) > 4

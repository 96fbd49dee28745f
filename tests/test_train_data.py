"""Data: shards, batches as pure functions of (seed, epoch, rank, step), the three data sets and their errors."""

from __future__ import annotations

import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from train.config import Config
from train.data import Data, load_data
from train.images import BatchKey, TensorImages, random_shift
from train.shards import dirichlet_shards, iid_shards, log_dirichlet

LABELS = np.repeat(np.arange(5), 40)


@pytest.fixture(scope="module")
def digits() -> Data:
    return load_data(Config(), rank=1, world_size=4)


def test_digits_are_real_and_always_split_the_same_way(digits: Data) -> None:
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert (digits.train.num_channels, digits.train.num_classes) == (1, 10)
    other = load_data(Config(seed=7), rank=0, world_size=2)
    everything = BatchKey(np.arange(359), seed=None)
    assert all(torch.equal(a, b) for a, b in zip(digits.test[everything], other.test[everything], strict=True))
    test_images = {image.numpy().tobytes() for image in digits.test[everything][0]}
    train_images = {image.numpy().tobytes() for image in digits.train[BatchKey(np.arange(1438), seed=None)][0]}
    assert not test_images & train_images


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_shards_are_disjoint_and_of_equal_length(world_size: int) -> None:
    for shards in (iid_shards(200, world_size, seed=1), dirichlet_shards(LABELS, world_size, alpha=0.1, seed=1)):
        assert shards.shape == (world_size, 200 // world_size)
        assert len(np.unique(shards)) == shards.size


def test_dirichlet_alpha_sets_how_uneven_the_classes_are() -> None:
    def largest_share(alpha: float) -> float:
        shards = dirichlet_shards(LABELS, 4, alpha=alpha, seed=3)
        return float(np.mean([np.bincount(LABELS[shard], minlength=5).max() / len(shard) for shard in shards]))

    assert largest_share(0.05) > 0.6
    assert largest_share(1000.0) < 0.35  # 0.2 would be even
    assert np.array_equal(
        dirichlet_shards(LABELS, 4, alpha=0.1, seed=3), dirichlet_shards(LABELS, 4, alpha=0.1, seed=3)
    )


@pytest.mark.parametrize("alpha", [1e-320, 1e-100, 1e-4])
def test_dirichlet_of_tiny_alpha_gives_whole_classes(alpha: float) -> None:
    shards = dirichlet_shards(LABELS, 5, alpha=alpha, seed=3)
    assert len(np.unique(shards)) == 200
    # A shard is as long as a class: a class goes to one rank, or what is left of it to the next one that draws it.
    assert all(len(np.unique(LABELS[shard])) == 1 for shard in shards)


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    concentration = np.array([0.5, 1.0, 2.5])
    logs = np.array([log_dirichlet(concentration, np.random.default_rng([7, i])) for i in range(4000)])
    shares = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
    mean = concentration / 4
    variance = mean * (1 - mean) / 5
    assert np.allclose(shares.mean(axis=0), mean, atol=4 * np.sqrt(variance.max() / 4000))
    assert np.allclose(shares.var(axis=0), variance, rtol=0.15)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_dirichlet_refuses_alpha_that_is_not_positive(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"got alpha=.*, expected a positive number"):
        dirichlet_shards(LABELS, 4, alpha=alpha, seed=3)


def test_an_epoch_continued_from_a_step_is_the_tail_of_the_epoch(digits: Data) -> None:
    whole = list(digits.train_batches(2))
    tail = list(digits.train_batches(2, first_step=5))
    assert len(whole) == digits.steps_per_epoch == 11
    assert len(tail) == 6
    for (images, labels), (tail_images, tail_labels) in zip(whole[5:], tail, strict=True):
        assert torch.equal(images, tail_images)
        assert torch.equal(labels, tail_labels)


def test_order_differs_between_epochs_ranks_and_seeds(digits: Data) -> None:
    firsts = [
        next(iter(data.train_batches(epoch)))[0]
        for data, epoch in ((digits, 0), (digits, 1), (replace(digits, rank=2), 0), (replace(digits, seed=9), 0))
    ]
    assert not any(torch.equal(firsts[i], firsts[j]) for i in range(4) for j in range(i))


def test_loading_leaves_the_global_generator_alone(digits: Data) -> None:
    before = torch.get_rng_state()
    next(iter(digits.train_batches(0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_sharded_test_batches_cover_the_test_set_once(digits: Data) -> None:
    num_images = [
        sum(len(labels) for _, labels in replace(digits, rank=rank).test_batches(sharded=True)) for rank in range(4)
    ]
    assert num_images == [90, 90, 90, 89]
    assert sum(len(labels) for _, labels in digits.test_batches(sharded=False)) == 359


def test_a_batch_larger_than_the_shard_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got a batch of 4096 images, expected at most the 359 .* lower --batch-size"):
        load_data(Config(batch_size=4096), rank=0, world_size=4)


def test_random_shift_moves_every_image_on_its_own() -> None:
    images = torch.zeros(64, 2, 9, 9)
    images[:, :, 4, 4] = 1
    shifted = random_shift(images, 2, torch.Generator().manual_seed(0))
    assert torch.equal(shifted.sum(dim=(2, 3)), torch.ones(64, 2))
    assert torch.equal(shifted[:, 0], shifted[:, 1])
    places = {tuple(place.tolist()) for place in shifted[:, 0].nonzero()[:, 1:]}
    assert len(places) > 15
    assert all(2 <= row <= 6 and 2 <= column <= 6 for row, column in places)
    assert random_shift(images, 0, torch.Generator()) is images


def test_augmentation_is_a_function_of_the_key() -> None:
    images = TensorImages(torch.rand(8, 3, 4, 4), np.arange(8), num_classes=8, max_shift=1, flip=True)
    key = BatchKey(np.arange(8), seed=5)
    assert torch.equal(images[key][0], images[key][0])
    assert not torch.equal(images[key][0], images[key._replace(seed=6)][0])
    assert torch.equal(images[key._replace(seed=None)][0], images.images)


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
def test_image_folder(tmp_path: Path, held_out: str) -> None:
    data = load_data(image_tree(tmp_path, held_out=held_out), rank=0, world_size=2)
    before = torch.get_rng_state()
    key = BatchKey(np.array([0, 5]), seed=3)
    images, labels = data.train[key]
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [0, 1]
    assert torch.equal(images, data.train[key][0])
    assert not torch.equal(images, data.train[key._replace(seed=4)][0])
    assert torch.equal(torch.get_rng_state(), before)
    assert len(data.test) == 8


def test_image_folder_for_imagenet_sized_models(tmp_path: Path) -> None:
    data = load_data(replace(image_tree(tmp_path), model="resnet50"), rank=0, world_size=2)
    for seed in (None, 1):
        assert data.train[BatchKey(np.array([0]), seed=seed)][0].shape == (1, 3, 224, 224)


def test_image_folder_errors(tmp_path: Path) -> None:
    config = image_tree(tmp_path / "a")
    with pytest.raises(ValueError, match=r"no such folder.*expected train/ and val/ or test/.*--data-dir"):
        load_data(replace(config, data_dir=str(tmp_path / "b")), rank=0, world_size=1)
    for index in range(9):
        (tmp_path / "c" / f"n{index}").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"\(with n0, n1, n2, n3, n4 and 4 more\), expected train/"):
        load_data(replace(config, data_dir=str(tmp_path / "c")), rank=0, world_size=1)
    corrupt = tmp_path / "a" / "train" / "cat" / "0.png"
    corrupt.write_bytes(corrupt.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"got .*train/cat/0.png that does not decode \(.*\), expected an image"):
        load_data(config, rank=0, world_size=1).train[BatchKey(np.array([0]), seed=None)]
    (tmp_path / "a" / "val" / "dog").rename(tmp_path / "a" / "val" / "wolf")
    with pytest.raises(ValueError, match=r"got other classes in .*val.*'dog', 'wolf'"):
        load_data(config, rank=0, world_size=1)


def test_missing_cifar10_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got no CIFAR-10 in .*pass --download, or --data-dir"):
        load_data(Config(dataset="cifar10", data_dir=str(tmp_path)), rank=0, world_size=1)


@pytest.mark.skipif("GOSSIP_DATA" not in os.environ, reason="GOSSIP_DATA names no folder with cifar10-jpeg.tar.gz")
def test_cifar10_as_a_folder_of_jpegs(tmp_path: Path) -> None:
    with tarfile.open(Path(os.environ["GOSSIP_DATA"]) / "cifar10-jpeg.tar.gz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith("00.jpg"):
                archive.extract(member, tmp_path, filter="data")
    config = Config(dataset="imagefolder", data_dir=str(tmp_path), model="resnet20", batch_size=16)
    data = load_data(config, rank=0, world_size=2)
    assert data.train.num_classes == 10
    images, labels = next(iter(data.train_batches(0)))
    assert images.shape == (16, 3, 32, 32)
    assert 0.2 < images.std() < 2
    assert len(labels.unique()) > 4

"""CIFAR-10 from a local folder or archive, in each form in which it is handed out; nothing is fetched."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from train.tasks.images.cifar10 import LabelledImages, Splits, read_cifar10
from train.tasks.images.config import Config
from train.tasks.images.data import load_data
from train.tasks.images.images import TensorImages
from train.tasks.images.task import data_of

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
NUM_TRAIN, NUM_TEST = 20, 10


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def tree(root: Path, *, test: str = "test") -> Path:
    """A folder of PNG files, two of each class to learn from and one to test."""
    for split, count in (("train", 2), (test, 1)):
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.fromarray(pixels(100 * label + index)).save(folder / f"{index}.png")
    return root


def binary(root: Path) -> Path:
    """cifar-10-batches-bin, four images in each of the five files."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    rows = [
        np.concatenate([[label], pixels(100 * label + i).transpose(2, 0, 1).ravel()])
        for label in range(10)
        for i in (0, 1)
    ]
    for number in range(5):
        np.stack(rows[4 * number : 4 * number + 4]).astype(np.uint8).tofile(folder / f"data_batch_{number + 1}.bin")
    np.stack(rows[::2]).astype(np.uint8).tofile(folder / "test_batch.bin")
    return root


def packed(root: Path, target: Path) -> Path:
    """The folder as an archive, by the end of its name."""
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "w") as archive:
            for path in sorted(root.rglob("*")):
                archive.write(path, path.relative_to(root))
    else:
        with tarfile.open(target, "w:gz" if target.name.endswith("gz") else "w") as tar:
            tar.add(root, arcname=".")
    return target


def never(folder: Path) -> Splits:
    raise AssertionError(f"{folder} has no batches for Python")


def check(splits: Splits) -> None:
    train, test = splits
    assert (train.images.shape, test.images.shape) == ((NUM_TRAIN, 3, 32, 32), (NUM_TEST, 3, 32, 32))
    assert train.images.dtype == np.uint8
    assert train.labels.tolist() == [label for label in range(10) for _ in (0, 1)]
    assert test.labels.tolist() == list(range(10))
    assert np.array_equal(train.images[3], pixels(101).transpose(2, 0, 1))
    assert np.array_equal(test.images[7], pixels(700).transpose(2, 0, 1))


@pytest.mark.parametrize("make", [tree, binary])
@pytest.mark.parametrize("form", ["folder", "a.zip", "a.tar", "cifar10.tar.gz", "cifar-10.tgz", "folder of an archive"])
def test_every_form(tmp_path: Path, make: object, form: str) -> None:
    root = tree(tmp_path / "data") if make is tree else binary(tmp_path / "data")
    if form == "folder of an archive":
        (tmp_path / "archives").mkdir()
        packed(root, tmp_path / "archives" / "cifar-10-binary.tar.gz")
        (tmp_path / "archives" / "other.zip").write_bytes(b"")
        root = tmp_path / "archives"
    elif form != "folder":
        root = packed(root, tmp_path / form)
    before = sorted(root.rglob("*")) if root.is_dir() else []
    check(read_cifar10(root, read_python=never))
    assert (sorted(root.rglob("*")) if root.is_dir() else []) == before


def test_the_folder_of_batches_itself_and_a_set_called_val(tmp_path: Path) -> None:
    check(read_cifar10(binary(tmp_path / "a") / "cifar-10-batches-bin", read_python=never))
    check(read_cifar10(tree(tmp_path / "b", test="val"), read_python=never))


def test_batches_for_python_are_read_by_the_reader_that_checks_them(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    (folder / "data_batch_1").write_bytes(b"rows")
    seen = []
    empty = LabelledImages(np.zeros((0, 3, 32, 32), np.uint8), np.zeros(0, np.int64))

    def read(root: Path) -> Splits:
        seen.append((root / "cifar-10-batches-py" / "data_batch_1").read_bytes())
        return empty, empty

    for path in (folder, folder.parent, packed(folder.parent, tmp_path / "cifar-10-python.tar.gz")):
        read_cifar10(path, read_python=read)
    assert seen == [b"rows"] * 3
    with pytest.raises(ValueError, match=r"got no CIFAR-10 in .*expected cifar-10-batches-py/, whole; pass --dow"):
        load_cifar10(folder.parent)  # of another checksum


def load_cifar10(path: Path) -> object:
    return data_of(Config(dataset="cifar10", data_dir=str(path), batch_size=2), rank=0, world_size=1)


def test_a_run_gets_it_normalised_and_augmented(tmp_path: Path) -> None:
    data = data_of(Config(dataset="cifar10", data_dir=str(tree(tmp_path)), batch_size=5), rank=1, world_size=2)
    assert isinstance(data.train, TensorImages)
    assert isinstance(data.test, TensorImages)
    assert (data.train.max_shift, data.train.flip, data.test.max_shift) == (4, True, 0)
    assert data.train.num_classes == 10
    assert data.steps_per_epoch == 2
    mean = data.train.images.mean((0, 2, 3))
    assert torch.all((mean - (0.5 - torch.tensor([0.4914, 0.4822, 0.4465])) / 0.25).abs() < 0.05)
    images, labels = next(data.train_stream(0))
    assert images.shape == (5, 3, 32, 32)
    data.close()
    assert load_data.__module__ == "train.tasks.images.data"
    assert len(labels) == 5


def test_missing_files(tmp_path: Path) -> None:
    cases: dict[str, str] = {}
    cases[str(tmp_path / "nowhere")] = (
        r"no such file or folder\), expected cifar-10-batches-py/ or .*--data-dir with what"
    )
    (tmp_path / "empty").mkdir()
    cases[str(tmp_path / "empty")] = r"got no CIFAR-10 in .*\(empty\), expected"
    two = tmp_path / "two"
    two.mkdir()
    for name in ("cifar10.zip", "cifar-10.tar"):
        (two / name).write_bytes(b"")
    cases[str(two)] = r"\(archives cifar-10.tar, cifar10.zip\), expected"
    (tmp_path / "broken.tar.gz").write_bytes(b"no archive")
    cases[str(tmp_path / "broken.tar.gz")] = r"broken.tar.gz', which cannot be read \(.*\), expected"
    wide = tree(tmp_path / "wide")
    Image.fromarray(np.zeros((32, 64, 3), np.uint8)).save(wide / "train" / "cat" / "0.png")
    cases[str(wide)] = r"got train/cat/0.png in .* of 64 x 32 pixels, expected 32 x 32.*--dataset imagefolder"
    torn = tree(tmp_path / "torn")
    (torn / "test" / "dog" / "0.png").write_bytes(b"no image")
    cases[str(torn)] = r"got test/dog/0.png in .* that does not decode"
    few = tree(tmp_path / "few")
    (few / "train").rename(few / "trane")
    (few / "train").mkdir()
    cases[str(few)] = r"got 0 images for training and 10 for tests of 10 classes"
    short = binary(tmp_path / "short")
    (short / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"abc")
    cases[str(short)] = r"got test_batch.bin of 3 bytes .*expected whole rows of 3073"
    gone = binary(tmp_path / "gone")
    (gone / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    cases[str(gone)] = r"got no data_batch_4.bin in .*; unpack the archive again"
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message) as caught:
            load_cifar10(Path(path))
        assert "\n" not in str(caught.value)


@pytest.mark.skipif("GOSSIP_DATA" not in os.environ, reason="GOSSIP_DATA names no folder with cifar10-jpeg.tar.gz")
def test_the_archive_of_jpegs(tmp_path: Path) -> None:
    whole = Path(os.environ["GOSSIP_DATA"]) / "cifar10-jpeg.tar.gz"
    with tarfile.open(whole) as archive, tarfile.open(tmp_path / "cifar10-jpeg.tar.gz", "w:gz") as part:
        for member in archive:
            if member.isfile() and member.name.endswith("00.jpg"):
                file = archive.extractfile(member)
                assert file is not None
                part.addfile(member, io.BytesIO(file.read()))
    train, test = read_cifar10(tmp_path, read_python=never)
    assert set(train.labels) == set(test.labels) == set(range(10))
    assert 30 < train.images.std() < 90

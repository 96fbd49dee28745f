"""Data: one training shard per rank and the test set; a batch is a pure function of (seed, epoch, rank, step).

So a resumed run sees exactly the images that an uninterrupted one would have seen, without a loader state to save, and
whatever the number of loader processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from gossip_modules import partitions
from train.tasks.images.cifar10 import NUM_CLASSES, LabelledImages, Splits, read_cifar10
from train.tasks.images.folder_images import CroppedImages, ShiftedImages
from train.tasks.images.images import BatchKey, Images, TensorImages
from train.tasks.images.loader import Batches

TEST_FRACTION_DIGITS = 0.2
# First word of every seed, next to the streams of `gossip_modules.partitions`, so that draws are unrelated.
ORDER_STREAM, AUGMENTATION_STREAM = 2, 3
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Data:
    """A training set with one shard per rank, and a test set that every rank can read.

    Args:
        train: training images.
        test: test images.
        shard: indices of this rank's training images, int64; shards are disjoint and of equal length.
        rank: rank of this process.
        world_size: number of ranks.
        batch_size: images per rank and optimizer step.
        seed: the same on every rank.
        num_workers: loader processes of a stream of batches.
        timeout_seconds: longest wait for one of them.
    """

    train: Images
    test: Images
    shard: np.ndarray
    rank: int
    world_size: int
    batch_size: int
    seed: int
    num_workers: int = 0
    timeout_seconds: float = 300.0
    _open: WeakSet[Batches] = field(default_factory=WeakSet, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"got a batch of {self.batch_size} images, expected at most the {len(self.shard)} of a rank's shard; "
                "lower --batch-size or use fewer ranks"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in the shard of a rank; the images left over change from epoch to epoch."""
        return len(self.shard) // self.batch_size

    def train_keys(self, first_step: int, stride: int = 1) -> Iterator[BatchKey]:
        """Which images the batches of all epochs hold, without end, at every `stride`-th step from `first_step` on."""
        epoch, first = divmod(first_step, self.steps_per_epoch)
        while True:
            order = np.random.default_rng([ORDER_STREAM, self.seed, epoch, self.rank]).permutation(self.shard)
            while first < self.steps_per_epoch:
                yield BatchKey(
                    order[first * self.batch_size : (first + 1) * self.batch_size],
                    seed=_seed_of(AUGMENTATION_STREAM, self.seed, epoch, self.rank, first),
                )
                first += stride
            epoch, first = epoch + first // self.steps_per_epoch, first % self.steps_per_epoch

    def train_stream(self, first_step: int, stride: int = 1) -> Batches:
        """The batches of `train_keys`: images [B, C, H, W] and labels [B]."""
        return self._read(self.train, self.train_keys(first_step, stride))

    def test_batches(self, *, sharded: bool) -> Batches:
        """All test images, or with `sharded` every world_size-th one from `rank` on."""
        indices = np.arange(self.rank if sharded else 0, len(self.test), self.world_size if sharded else 1)
        size = max(self.batch_size, 128)
        return self._read(self.test, [BatchKey(indices[i : i + size], seed=None) for i in range(0, len(indices), size)])

    def close(self) -> None:
        """End the loader processes of all streams; idempotent."""
        for batches in tuple(self._open):
            batches.close()

    def _read(self, images: Images, keys: Iterable[BatchKey]) -> Batches:
        batches = Batches(images, keys, num_workers=self.num_workers, timeout_seconds=self.timeout_seconds)
        self._open.add(batches)
        return batches


def _seed_of(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    Args:
        dataset: a key of DATASETS.
        folder: the folder of the data set; digits needs none.
        download: whether torchvision may fetch cifar10 into the folder; otherwise nothing is fetched.
        image_size: side of the images of an imagefolder in pixels.
    """

    dataset: str = "digits"
    folder: str = "data"
    download: bool = False
    image_size: int = 32


def load_data(
    source: Source,
    *,
    rank: int,
    world_size: int,
    batch_size: int,
    seed: int,
    dirichlet_alpha: float = 0.0,
    num_workers: int = 0,
    timeout_seconds: float = 300.0,
) -> Data:
    """The data of `source` as seen by `rank`.

    Args:
        source: the data set.
        rank, world_size, batch_size, seed, num_workers, timeout_seconds: see `Data`.
        dirichlet_alpha: concentration of the classes of each rank's shard; 0: shards are alike.

    Raises:
        ValueError: the files are not there, or a shard is smaller than a batch.
    """
    train, test = DATASETS[source.dataset](source)
    if dirichlet_alpha > 0:
        shards = partitions.dirichlet(train.labels, world_size, alpha=dirichlet_alpha, seed=seed)
    else:
        shards = partitions.even(len(train), world_size, seed=seed)
    return Data(
        train,
        test,
        shards[rank],
        rank=rank,
        world_size=world_size,
        batch_size=batch_size,
        seed=seed,
        num_workers=num_workers,
        timeout_seconds=timeout_seconds,
    )


def _digits(source: Source) -> tuple[Images, Images]:
    """1797 handwritten digits of 8x8 pixels from scikit-learn; always the same fifth of each class is the test set."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels.reshape(-1, 1, 8, 8).astype(np.float32)) / 16
    images = (images - 0.3053) / 0.3761
    labels = labels.astype(np.int64)
    generator = np.random.default_rng(0)
    test_indices = np.sort(
        np.concatenate(
            [
                generator.permutation(members)[: round(len(members) * TEST_FRACTION_DIGITS)]
                for members in (np.flatnonzero(labels == label) for label in range(10))
            ]
        )
    )
    train_indices = np.setdiff1d(np.arange(len(labels)), test_indices)
    return (
        TensorImages(images[train_indices], labels[train_indices], num_classes=10),
        TensorImages(images[test_indices], labels[test_indices], num_classes=10),
    )


def _cifar10(source: Source) -> tuple[Images, Images]:
    """CIFAR-10, held in memory; shifts of up to four pixels and mirroring."""
    if source.download:
        splits = torchvision_cifar10(Path(source.folder), download=True)
    else:
        try:
            splits = read_cifar10(Path(source.folder), read_python=torchvision_cifar10)
        except ValueError as error:
            raise ValueError(f"{error}; pass --download, or --data-dir with what has it") from error
    train, test = splits
    return (
        TensorImages(_normalised(train.images), train.labels, num_classes=NUM_CLASSES, max_shift=4, flip=True),
        TensorImages(_normalised(test.images), test.labels, num_classes=NUM_CLASSES),
    )


def torchvision_cifar10(folder: Path, *, download: bool = False) -> Splits:
    """By torchvision, which compares the checksum of each file of cifar-10-batches-py before it reads it."""
    from torchvision.datasets import CIFAR10

    splits = []
    for is_train in (True, False):
        try:
            raw = CIFAR10(folder, train=is_train, download=download)
        except RuntimeError as error:
            raise ValueError(
                f"got no CIFAR-10 in {str(folder)!r} ({error}), expected cifar-10-batches-py/, whole"
            ) from error
        splits.append(LabelledImages(raw.data.transpose(0, 3, 1, 2), np.asarray(raw.targets, dtype=np.int64)))
    return splits[0], splits[1]


def _normalised(images: np.ndarray) -> Tensor:
    """Float32 of mean 0 and standard deviation 1, from uint8 [N, 3, H, W]."""
    return (torch.from_numpy(images).float() / 255 - _per_channel(CIFAR10_MEAN)) / _per_channel(CIFAR10_STD)


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, device="cpu")[None, :, None, None]


def _image_folder(source: Source) -> tuple[Images, Images]:
    """A tree with train/<class>/ and val/<class>/ or test/<class>/: ImageNet, or small images."""
    from torchvision.datasets import ImageFolder

    root = Path(source.folder)
    held_out = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if held_out is None or not (root / "train").is_dir():
        raise ValueError(
            f"got {source.folder!r} ({_contents(root)}), expected train/ and val/ or test/ with a folder per class "
            "in it; point --data-dir there"
        )
    train, test = ImageFolder(root / "train"), ImageFolder(held_out)
    if train.classes != test.classes:
        raise ValueError(
            f"got other classes in {held_out} than in {root / 'train'} (only in one: "
            f"{sorted(set(train.classes) ^ set(test.classes))[:5]}), expected the same folders; complete them"
        )
    size = source.image_size
    images = CroppedImages if size > 64 else ShiftedImages
    return images(train, size=size), images(test, size=size)


def _contents(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    names = sorted(path.name for path in folder.iterdir())
    return f"with {', '.join(names[:5])}{f' and {len(names) - 5} more' if names[5:] else ''}" if names else "empty"


DATASETS: Mapping[str, Callable[[Source], tuple[Images, Images]]] = {
    "digits": _digits,
    "cifar10": _cifar10,
    "imagefolder": _image_folder,
}

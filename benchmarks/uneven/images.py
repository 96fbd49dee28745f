"""CIFAR-10 at 16 pixels, decoded once, and batches of workers whose classes differ."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.cluster.workload.image_task import SPLITS, SplitImages
from benchmarks.cluster.workload.images import decode
from train.tasks.shards import dirichlet_shards, iid_shards

ARCHIVE = "cifar10-jpeg.tar.gz"
_ORDER_STREAM, _FLIP_STREAM = 11, 12
"""First words of seeds; shards are drawn from another one."""


def default_cache() -> Path:
    """Where decoded images are kept: outside the repository."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gossip_modules" / "cifar10-16"


def decoded(cache: Path) -> Path:
    """`cache`, with the arrays that `SplitImages` reads; made of the archive in GOSSIP_DATA where they are not there.

    Raises:
        ValueError: there is neither.
    """
    if all((cache / f"{split}-labels.npy").is_file() for split in SPLITS):
        return cache
    archive = Path(os.environ.get("GOSSIP_DATA", "")) / ARCHIVE
    if not archive.is_file():
        raise ValueError(f"got no {archive}, expected it; set GOSSIP_DATA to the folder that has {ARCHIVE}")
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        decode(Path(folder), Path(folder) / "arrays")
        (Path(folder) / "arrays").rename(cache)  # whole or not at all
    return cache


class UnevenBatches:
    """Batches of all workers at once, for ever; each reads its own shard in an order that changes every epoch.

    Args:
        images: of the training split.
        num_workers: n.
        alpha: of the Dirichlet distribution that the classes of a shard are drawn from; 0: shards are alike.
        batch_size: of each worker.
        seed: of shards, order and flips.

    Attributes:
        shards: indices of images, int64 [n, number of images // n].

    Raises:
        ValueError: a shard is smaller than a batch.
    """

    def __init__(self, images: SplitImages, num_workers: int, *, alpha: float, batch_size: int, seed: int) -> None:
        if len(images) // num_workers < batch_size:
            raise ValueError(
                f"got {len(images)} images for {num_workers} workers, expected a batch of {batch_size} for each; lower "
                "--batch-size"
            )
        self._images, self._batch_size, self._seed = images, batch_size, seed
        if alpha:
            self.shards = dirichlet_shards(images.labels, num_workers, alpha=alpha, seed=seed)
        else:
            self.shards = iid_shards(len(images), num_workers, seed=seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images, float32 [n, B, 3, 16, 16], and labels, int64 [n, B]."""
        epoch = 0
        while True:
            generator = np.random.default_rng([_ORDER_STREAM, self._seed, epoch])
            order = generator.permuted(self.shards, axis=1)
            flips = np.random.default_rng([_FLIP_STREAM, self._seed, epoch]).random(order.shape) < 0.5
            size = self._batch_size
            for first in range(0, order.shape[1] - size + 1, size):
                chosen = order[:, first : first + size]
                x, labels = self._images.batch(chosen.ravel(), is_flipped=flips[:, first : first + size].ravel())
                yield x.view(*chosen.shape, *x.shape[1:]), labels.view(chosen.shape)
            epoch += 1


def accuracy_percent(logits: Callable[[Tensor], Tensor], images: SplitImages) -> float:
    """On all images of the split.

    Args:
        logits: of images, float32 [B, 3, 16, 16] -> [B, classes].
        images: of the split.
    """
    num_correct = 0
    with torch.no_grad():
        for chosen in np.array_split(np.arange(len(images)), max(1, len(images) // 500)):
            x, labels = images.batch(chosen)
            num_correct += int((logits(x).argmax(dim=1) == labels).sum())
    return 100 * num_correct / len(images)

"""Learning to tell images of ten classes: a small network, the images of each rank, and the accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cluster.workload.task import LearningTask, Score

SPLITS = ("train", "test")
SIZE = 16
"""Of an image, in pixels; the network below is made for it."""
NUM_CLASSES = 10


class SmallNetwork(nn.Module):
    """Three convolutions and a linear layer, 26,154 parameters; without normalisation, of which methods average
    statistics in different ways.

    Args:
        seed: of the parameters.
    """

    NUM_PARAMETERS = 26_154

    def __init__(self, seed: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (SIZE // 8) ** 2, NUM_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Images, float32 (N, 3, SIZE, SIZE) -> float32 (N, NUM_CLASSES)."""
        logits: Tensor = self.layers(x)
        return logits


class SplitImages:
    """Images of a split, in memory that ranks share.

    Args:
        folder: with <split>.npy, uint8 of shape (N, 3, SIZE, SIZE), and <split>-labels.npy, int64 of shape (N,).
        split: one of SPLITS.

    Attributes:
        labels: int64 [N].
    """

    def __init__(self, folder: Path, split: str) -> None:
        self._images = np.load(folder / f"{split}.npy", mmap_mode="r")
        self.labels: np.ndarray = np.load(folder / f"{split}-labels.npy")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray, *, is_flipped: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Images, float32 from -1 to 1, those that are to be flipped from left to right; and labels."""
        pixels = self._images[indices]
        if is_flipped is not None:
            pixels = np.where(is_flipped[:, None, None, None], pixels[..., ::-1], pixels)
        return torch.from_numpy(pixels).float().div_(127.5).sub_(1.0), torch.from_numpy(self.labels[indices])

    def batches(self, rank: int, world_size: int, *, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of a rank, for ever: every epoch it gets another share, no image is two ranks'.

        Raises:
            ValueError: a rank's share is less than a batch.
        """
        if len(self) // world_size < size:
            raise ValueError(f"got {len(self)} images for {world_size} ranks, expected at least {size} for each")
        epoch = 0
        while True:
            order = np.random.default_rng([seed, epoch]).permutation(len(self))
            own = order[rank::world_size][: len(self) // world_size // size * size]
            flips = np.random.default_rng([seed, epoch, rank]).random(len(own)) < 0.5
            for first in range(0, len(own), size):
                chosen = slice(first, first + size)
                yield self.batch(own[chosen], is_flipped=flips[chosen])
            epoch += 1


class ClusterImages(LearningTask):
    """Images of ten classes; accuracy on the test images.

    Args:
        folder: of what `decode` of images.py has written.
    """

    score = Score("accuracy", "%", is_lower_better=False, scale=100.0, of_a_guess=0.0, of_perfection=100.0)
    items = "images"
    num_parameters = SmallNetwork.NUM_PARAMETERS

    def __init__(self, folder: Path) -> None:
        self._train, self._test = (SplitImages(folder, split) for split in SPLITS)

    @property
    def sizes(self) -> tuple[int, int]:
        """See `LearningTask`."""
        return len(self._train), len(self._test)

    def network(self, seed: int) -> nn.Module:
        """See `LearningTask`."""
        return SmallNetwork(seed)

    def batches(self, rank: int, world_size: int, *, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `LearningTask`."""
        return self._train.batches(rank, world_size, size=size, seed=seed)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `LearningTask`: the mean cross-entropy, in nats."""
        return F.cross_entropy(outputs, targets)

    def evaluate(self, model: nn.Module, rank: int, world_size: int) -> tuple[float, int]:
        """See `LearningTask`: how many images it tells right, and of how many."""
        indices = np.arange(rank, len(self._test), world_size)
        num_correct = 0
        for chosen in np.array_split(indices, max(1, len(indices) // 250)):
            x, labels = self._test.batch(chosen)
            num_correct += int((model(x).argmax(dim=1) == labels).sum())
        return num_correct, len(indices)

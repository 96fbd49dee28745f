"""One training: a method, on all ranks at once, on real images, until so many steps are done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cluster.job import Job
from benchmarks.cluster.methods import CLUSTER_METHODS
from benchmarks.cluster.network.place import Place

SPLITS = ("train", "test")
SIZE = 16
"""Of an image, in pixels; the network below is made for it."""
NUM_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Training(Job):
    """A method that learns, at a rate that falls linearly to zero.

    Args:
        num_steps: of each rank, or rounds, where a method counts those.
        compute_seconds: that a forward pass is made to take, times the step's delay, as the whole of a step's compute
            is waited there; the real backward pass comes on top. 0: as long as it takes, without delays.
        images: folder of what `decode` of images.py writes.
        batch_size: of each rank.
        num_parameters: of the model at least, most of which are ballast then: so much travels.
        evaluate_every: steps from one evaluation to the next.
        seed: of the first parameters and of the order of the images.
    """

    images: str
    batch_size: int
    num_parameters: float
    evaluate_every: int
    seed: int

    @property
    def num_warm_steps(self) -> int:
        """See `Place`: a tenth."""
        return self.num_steps // 10


class SmallNetwork(nn.Module):
    """Three convolutions and a linear layer, 26,154 parameters; without normalisation, of which methods average
    statistics in different ways.

    Args:
        seed: of the parameters.
        num_parameters: more than the layers have are ballast, which travels and has gradients of zero.

    Attributes:
        start: of the last forward pass, by time.perf_counter(): after what a wrapper does before it.
    """

    NUM_PARAMETERS = 26_154

    def __init__(self, seed: int, num_parameters: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (SIZE // 8) ** 2, NUM_CLASSES))
        num_ballast = int(num_parameters) - self.NUM_PARAMETERS
        self.start = 0.0
        self.ballast = nn.Parameter(torch.zeros(num_ballast)) if num_ballast > 0 else None

    def forward(self, x: Tensor) -> Tensor:
        """Images, float32 (N, 3, SIZE, SIZE) -> float32 (N, NUM_CLASSES)."""
        self.start = time.perf_counter()
        logits: Tensor = self.layers(x)
        return logits if self.ballast is None else logits + 0.0 * self.ballast.sum()


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


def train(training: Training, place: Place) -> dict[str, Any]:
    """Train as this rank; collective.

    A model is evaluated as it stands after the step: where an average comes at the end of a step, right after it; in
    our wrappers, which average at the beginning of the next, one local step later; with what was in flight applied in
    ours, as evaluation mode does, and not in those of others.

    Returns:
        Of this rank, a list each: num_steps (its own, when it evaluated), num_correct and num_tested (of its share of
        the test images, by its own model), and mean_loss and mean_seconds (of its steps since the last evaluation).
    """
    method = CLUSTER_METHODS[training.method]
    folder = Path(training.images)
    batches = SplitImages(folder, "train").batches(
        place.rank, place.world_size, size=training.batch_size, seed=training.seed
    )
    test = SplitImages(folder, "test")
    own_test = np.arange(place.rank, len(test), place.world_size)
    place.join()
    network = SmallNetwork(training.seed, training.num_parameters)
    contender = method.make(network, place)
    curve: dict[str, list[float]] = {
        name: [] for name in ("num_steps", "num_correct", "num_tested", "mean_loss", "mean_seconds")
    }
    losses: list[float] = []
    seconds: list[float] = []

    def loss(model: nn.Module) -> Tensor:
        images, labels = next(batches)
        value = F.cross_entropy(model(images), labels)
        losses.append(value.item())
        factor = training.delays.factor(place.rank, num_own_steps, num_hosts=place.world_size)
        time.sleep(max(network.start + factor * training.compute_seconds - time.perf_counter(), 0.0))
        return value

    num_own_steps, due = 0, training.evaluate_every
    while (progress := contender.progress(num_own_steps)) < training.num_steps:
        contender.set_learning_rate(training.learning_rate * (1 - progress / training.num_steps))
        start = time.perf_counter()
        contender.step(loss)
        seconds.append(time.perf_counter() - start)
        num_own_steps += 1
        if contender.progress(num_own_steps) >= due:
            curve["num_steps"].append(num_own_steps)
            curve["num_correct"].append(_num_correct(contender.model, test, own_test))
            curve["num_tested"].append(len(own_test))
            for name, values in (("mean_loss", losses), ("mean_seconds", seconds)):
                curve[name].append(sum(values) / len(values))
                values.clear()
            due += training.evaluate_every
    place.leave(contender.close)
    return curve


def _num_correct(model: nn.Module, images: SplitImages, indices: np.ndarray) -> int:
    model.eval()
    num_correct = 0
    with torch.no_grad():
        for chosen in np.array_split(indices, max(1, len(indices) // 250)):
            x, labels = images.batch(chosen)
            num_correct += int((model(x).argmax(dim=1) == labels).sum())
    model.train()
    return num_correct

"""One training: a method, a number of workers, how uneven their data are, a learning rate, a seed."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cluster.workload.image_task import NUM_CLASSES, SIZE, SplitImages
from benchmarks.uneven.images import UnevenBatches, accuracy_percent
from benchmarks.uneven.methods import METHODS
from benchmarks.uneven.replicas import Replicas, StackedGossip

WARM_UP = 0.025
DECAYS = (0.5, 0.75)
"""Shares of the steps: the learning rate rises from zero, and is divided by ten twice, as in RelaySum's experiments."""


def small_network(seed: int) -> nn.Sequential:
    """Three convolutions with stride 2 and a linear layer, 26,154 parameters, drawn from `seed`; no normalisation."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (SIZE // 8) ** 2, NUM_CLASSES))


@dataclass(frozen=True)
class UnevenTrial:
    """What is trained.

    Attributes:
        method: a key of METHODS.
        workers: how many.
        alpha: see `UnevenBatches`.
        momentum: of SGD; 0: none.
        learning_rate: of SGD, at its highest.
        steps: of every worker.
        batch_size: of every worker.
        seed: of the first parameters, shards and batches.
    """

    method: str
    workers: int
    alpha: float
    momentum: float
    learning_rate: float
    steps: int
    batch_size: int
    seed: int

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        warm = min(1.0, (step + 1) / max(1.0, WARM_UP * self.steps))
        return self.learning_rate * warm * 0.1 ** sum(step >= share * self.steps for share in DECAYS)

    def run(self, folder: Path) -> dict[str, Any]:
        """Train; accuracy_percent of the averaged model, None where it diverged, and what it took.

        Args:
            folder: of decoded images.
        """
        start = time.process_time()
        replicas = Replicas(small_network(self.seed), self.workers)
        if not self._train(replicas, SplitImages(folder, "train")):
            seconds = round(time.process_time() - start, 1)
            return {"accuracy_percent": None, "consensus_distance": None, "cpu_seconds": seconds}
        mean = replicas.x.data.mean(0, keepdim=True)

        def logits(images: Tensor) -> Tensor:
            return replicas.logits(mean, images[None])[0]

        return {
            "accuracy_percent": round(accuracy_percent(logits, SplitImages(folder, "test")), 2),
            "consensus_distance": round(replicas.consensus_distance(), 4),
            "cpu_seconds": round(time.process_time() - start, 1),
        }

    def _train(self, replicas: Replicas, images: SplitImages) -> bool:
        """Take all steps; whether the loss stayed finite."""
        optimizer = torch.optim.SGD([replicas.x], lr=self.learning_rate, momentum=self.momentum)
        arguments = METHODS[self.method].arguments
        gossip = StackedGossip(arguments(self.workers), replicas.x, optimizer) if arguments else None
        batches = UnevenBatches(images, self.workers, alpha=self.alpha, batch_size=self.batch_size, seed=self.seed)
        for step, (inputs, labels) in zip(range(self.steps), batches):
            optimizer.param_groups[0]["lr"] = self.rate(step)
            if not math.isfinite(training_step(replicas, optimizer, gossip, inputs, labels)):
                return False
        return True


def training_step(
    replicas: Replicas, optimizer: torch.optim.SGD, gossip: StackedGossip | None, inputs: Tensor, labels: Tensor
) -> float:
    """What a rank does with `wrapper(inputs)`, backward and optimizer.step(), on all at once; the mean loss.

    Args:
        replicas, optimizer: the models.
        gossip: of the method; None: gradients are averaged instead.
        inputs, labels: a batch of each worker.
    """
    if gossip is not None:
        gossip.round()
    loss = replicas.backward(inputs, labels)
    if gossip is None and replicas.x.grad is not None:
        replicas.x.grad.copy_(replicas.x.grad.mean(0).expand_as(replicas.x))
    optimizer.step()
    return loss

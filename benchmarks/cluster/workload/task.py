"""What ranks learn, as `Training` needs it: a network, batches, a loss, and a score of what was learnt."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.cluster.network.place import momentum_sgd


@dataclass(frozen=True)
class Score:
    """What says how good a model is.

    Args:
        name: of the score.
        unit: of its values.
        is_lower_better: which way is better.
        scale: the score is this times what `LearningTask.evaluate` gives, by the number of items.
        of_a_guess: its value before the first step, for curves.
        of_perfection: the best value there is.
    """

    name: str
    unit: str
    is_lower_better: bool
    scale: float
    of_a_guess: float
    of_perfection: float

    def goodness(self, value: float) -> float:
        """The value with the sign with which higher is better."""
        return -value if self.is_lower_better else value

    def check_target(self, target: float) -> None:
        """Make sure that training can reach it.

        Raises:
            ValueError: it cannot, or need not even begin.
        """
        if not self.goodness(self.of_a_guess) < self.goodness(target) <= self.goodness(self.of_perfection):
            raise ValueError(
                f"got target={target:g}, expected {self.name} between {self.of_a_guess:.4g} and "
                f"{self.of_perfection:g} {self.unit}; see --help"
            )


class LearningTask(ABC):
    """A network, the batches of each rank, and a score.

    Args:
        folder: of its arrays.
    """

    score: ClassVar[Score]
    items: ClassVar[str]
    """What a batch has so many of."""
    num_parameters: ClassVar[int]
    """Of the network."""
    warm_up_share: ClassVar[float] = 0.0
    """The share of the steps in which the learning rate rises from zero."""

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """How many items there are to train with, and to evaluate on."""

    @abstractmethod
    def network(self, seed: int) -> nn.Module:
        """A new network, the same on all ranks; no global generator is changed."""

    def optimizer(self, parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        """The optimizer of all methods: SGD with momentum, unless the task needs another."""
        return momentum_sgd(parameters, learning_rate)

    @abstractmethod
    def batches(self, rank: int, world_size: int, *, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of a rank, for ever: every epoch it gets another share, no item is two ranks'.

        Raises:
            ValueError: a rank's share is less than a batch.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of the network's outputs, a scalar to descend."""

    @abstractmethod
    def evaluate(self, model: nn.Module, rank: int, world_size: int) -> tuple[float, int]:
        """The model, in eval mode, on the rank's share of what is evaluated on: a sum, and over how many items."""

    def check_sizes(self, world_size: int, batch_size: int) -> None:
        """Make sure that every rank has a batch and something to evaluate on.

        Raises:
            ValueError: there is too little data.
        """
        num_train, num_test = self.sizes
        if num_train < world_size * batch_size or num_test < world_size:
            raise ValueError(
                f"got {num_train} training and {num_test} test {self.items}, expected at least "
                f"{world_size * batch_size} and {world_size}, for {world_size} hosts; lower --batch-size, or see --data"
            )


class PacedNetwork(nn.Module):
    """A network that says when its last forward pass began, with ballast that travels and has gradients of zero.

    Args:
        network: what learns.
        num_parameters: of all at least; more than the network has are ballast.

    Attributes:
        start: of the last forward pass, by time.perf_counter(): after what a wrapper does before it.
    """

    def __init__(self, network: nn.Module, num_parameters: float = 0.0) -> None:
        super().__init__()
        self.network = network
        num_ballast = int(num_parameters) - sum(p.numel() for p in network.parameters())
        self.start = 0.0
        self.ballast = nn.Parameter(torch.zeros(num_ballast)) if num_ballast > 0 else None

    def forward(self, x: Tensor) -> Tensor:
        """What the network computes."""
        self.start = time.perf_counter()
        outputs: Tensor = self.network(x)
        return outputs if self.ballast is None else outputs + 0.0 * self.ballast.sum()

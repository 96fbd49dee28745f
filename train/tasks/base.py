"""Task: what a run learns. A model, its data, a loss and a score; how it is trained, and by whom, it does not know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from train.job.world import World
from train.tasks.precision import Precision


class MicroBatch(NamedTuple):
    """What one forward and backward reads."""

    inputs: tuple[Tensor, ...]
    """Of the model, called as model(*inputs); on the CPU."""
    targets: Tensor
    """Of the loss; on the CPU."""
    num_items: int
    """What the loss is a mean over: images, or target tokens."""


class Task(ABC):
    """What a run learns.

    Args:
        world: the world of the run.
        amp: dtype of autocast, see `Precision`.
        is_channels_last: memory format of images and kernels.
    """

    description: str
    """As the first line of a run says it, e.g. "cnn on digits"."""
    score: str
    """The metric of the averaged model that tells good from bad: higher is better, unless `selection` differs."""
    steps_per_epoch: int
    """Optimizer steps per rank, the same on every rank."""
    metadata: Mapping[str, str]
    """What the exported model says of itself."""
    identity: Mapping[str, Any]
    """What a run shares with every checkpoint it can go on from, besides the configuration; plain JSON values."""

    def __init__(self, world: World, *, amp: str = "none", is_channels_last: bool = False) -> None:
        self.world = world
        self.precision = Precision(world.device, amp, is_channels_last)
        self.metadata, self.identity = {}, {}

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The model on the CPU, initialised from torch's global generator."""

    @abstractmethod
    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of what `make_model` has made; its learning rate is set before every step."""

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """Of the optimizer step `step`, counted from 0; a pure function."""

    @abstractmethod
    def train_stream(self, first_step: int) -> Iterator[Sequence[MicroBatch]]:
        """Without end, from this rank's step `first_step` on, what each optimizer step reads: a pure function of it."""

    def dealt_stream(self, first: int, stride: int) -> Iterator[Sequence[MicroBatch]]:
        """Every `stride`-th entry of `train_stream` from `first` on: workers that deal out one stream among themselves.

        This reads the entries between as well; override it where they need not be read.
        """
        return islice(self.train_stream(first), 0, None, stride)

    def on_device(self, part: MicroBatch) -> tuple[tuple[Tensor, ...], Tensor]:
        """The inputs of the model and the targets of the loss, on the device."""
        inputs = tuple(self.precision.prepare(x) for x in part.inputs)
        return self.prepare(inputs), self.precision.prepare(part.targets)

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Inputs of the model, on the device, such as it may see in training."""
        return self.on_device(next(self.train_stream(0))[0])[0]

    def prepare(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the model takes, from inputs that are on the device already."""
        return inputs

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over the items of a micro-batch, a scalar."""

    @abstractmethod
    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Items of a micro-batch that the model has right, int64 scalar on the device."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model of this rank on all of the test set.

        Args:
            model: bare, in eval mode; called under autocast, without gradients.
        """

    @abstractmethod
    def evaluate_averaged(self, model: nn.Module) -> dict[str, float]:
        """Collective: metrics of a model that is the same on every rank, of which each reads its share of the test set.

        Args:
            model: bare, in eval mode; called under autocast, without gradients.

        Returns:
            The same on every rank; `score` is among them.
        """

    def selection(self, averaged: Mapping[str, float]) -> float:
        """By which of what `evaluate_averaged` returns the best checkpoint is kept: higher is better."""
        return averaged[self.score]

    def finish(self, model: nn.Module) -> None:
        """Collective, at the end of a run: leave what this task has to show of the averaged model, besides metrics."""

    def close(self) -> None:
        """End loader processes; idempotent."""

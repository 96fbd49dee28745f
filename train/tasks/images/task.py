"""ImageTask: classify images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from train.job.world import World
from train.tasks.base import MicroBatch, Task
from train.tasks.images.config import Config
from train.tasks.images.data import Data, Source, load_data
from train.tasks.images.images import BatchKey
from train.tasks.images.models import MODELS
from train.tasks.images.optim import LearningRate
from train.tasks.momentum_sgd import sgd


class ImageTask(Task):
    """Classify the images of `config.dataset` with `config.model`.

    Args:
        config: the configuration of the run.
        world: the world of the run.

    Raises:
        ValueError: on some rank, which is named, the data are not there, or are others; or a shard is smaller than a
            batch.
    """

    score = "accuracy_percent"

    def __init__(self, config: Config, world: World) -> None:
        super().__init__(world, amp=config.amp, is_channels_last=config.channels_last)
        self.config = config
        if config.download:  # by one process per machine, whose files the others read
            world.on_every_rank(lambda: self._load() if world.local_rank == 0 else None)
        counts = world.on_every_rank(self._load)
        # Their epochs would differ in length, and some rank wait for a step that the others never take.
        for rank, (num_train, num_test) in enumerate(counts):
            if [num_train, num_test] != list(counts[0]):
                raise ValueError(
                    f"got {num_train} images for training and {num_test} for tests on rank {rank}, expected "
                    f"{counts[0][0]} and {counts[0][1]} as on rank 0; copy {config.data_dir} again"
                )
        self.description = f"{config.model} on {config.dataset}"
        self.metadata = {"model": config.model, "dataset": config.dataset}
        self.steps_per_epoch = self.data.steps_per_epoch
        self._learning_rate = LearningRate(
            config.lr,
            global_batch=config.batch_size * world.size * config.num_founders,
            steps_per_epoch=self.steps_per_epoch / config.num_founders,
            warmup_epochs=config.warmup_epochs,
            warmup_lr=config.warmup_lr,
            milestones=config.milestones,
            factor=config.milestone_factor,
        )

    def make_model(self) -> nn.Module:
        """See `Task`."""
        return MODELS[self.config.model](self.data.train.num_channels, self.data.train.num_classes)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """See `Task`."""
        config = self.config
        return sgd(
            module,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            decay_all=config.decay_all,
        )

    def learning_rate(self, step: int) -> float:
        """See `Task`."""
        return self._learning_rate(step)

    def train_stream(self, first_step: int) -> Iterator[Sequence[MicroBatch]]:
        """See `Task`."""
        return self.dealt_stream(first_step, 1)

    def dealt_stream(self, first: int, stride: int) -> Iterator[Sequence[MicroBatch]]:
        """See `Task`."""
        num_parts = self.config.accumulation_steps
        for images, labels in self.data.train_stream(first, stride):
            parts = zip(images.chunk(num_parts), labels.chunk(num_parts), strict=True)
            yield [MicroBatch((x,), y, len(y)) for x, y in parts]

    def example_inputs(self) -> tuple[Tensor, ...]:
        """See `Task`; without a loader."""
        images, _ = self.data.train[BatchKey(self.data.shard[:2], seed=None)]
        return self.prepare((self.precision.prepare(images),))

    def prepare(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Images [B, C, H, W] as the model takes them."""
        (images,) = inputs
        return (self.data.train.prepare(images),)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Task`; logits [B, num_classes] and labels, int64 [B]."""
        return F.cross_entropy(outputs, targets, label_smoothing=self.config.label_smoothing)

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Task`; logits [B, num_classes] and labels, int64 [B]."""
        return (outputs.argmax(1) == targets).sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `Task`."""
        return self._accuracy(self.count_correct(model, self.data.test_batches(sharded=False)))

    def evaluate_averaged(self, model: nn.Module) -> dict[str, float]:
        """See `Task`; exact, as images are counted, not batches."""
        counts = self.count_correct(model, self.data.test_batches(sharded=True))
        dist.all_reduce(counts, group=self.world.control)
        return self._accuracy(counts)

    def count_correct(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """How many images `model` classifies right.

        Args:
            model: bare, in eval mode.
            batches: images [B, C, H, W] and labels [B] on the CPU.

        Returns:
            int64 [2] on the CPU: right answers, images.
        """
        counts = torch.zeros(2, dtype=torch.int64, device="cpu")
        for images, labels in batches:
            answers = model(*self.prepare((self.precision.prepare(images),))).argmax(1).cpu()
            counts += torch.tensor([int((answers == labels).sum()), len(labels)], device="cpu")
        return counts

    def close(self) -> None:
        """See `Task`."""
        self.data.close()

    def _load(self) -> tuple[int, int]:
        """Find the data of this rank; how many images there are for training and for tests."""
        self.data = data_of(self.config, rank=self.world.rank, world_size=self.world.size)
        return len(self.data.train), len(self.data.test)

    def _accuracy(self, counts: Tensor) -> dict[str, float]:
        return {self.score: float(100 * counts[0] / counts[1])}


def data_of(config: Config, *, rank: int, world_size: int) -> Data:
    """The data of a run as seen by `rank`; see `load_data`."""
    image_size = config.image_size or (224 if config.model == "resnet50" else 32)
    return load_data(
        Source(config.dataset, config.data_dir, config.download, image_size),
        rank=rank,
        world_size=world_size,
        batch_size=config.batch_size,
        seed=config.seed,
        dirichlet_alpha=config.dirichlet_alpha,
        num_workers=config.num_workers,
        timeout_seconds=config.timeout_seconds,
    )

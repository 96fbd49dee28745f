"""The study of images with ResNet-20 on CIFAR-10 at 32 pixels, as its paper has both (He et al. 2016).

The forward is in `torch.autocast` with bfloat16. On a CPU the fastest way is a loop over the workers, with images in
`torch.channels_last`. On one core with AVX-512 the forward and backward of eight workers with 16 images each take
0.34 s of CPU time, and 0.57 s in float32; `torch.compile` changes neither by a tenth. A processor without AVX-512 has
no fast bfloat16: a step takes 6.4 s there. The study prints this at its start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.record import short_hash
from benchmarks.studies.images import ARCHIVE
from benchmarks.studies.study import Study
from gossip_modules.lab import LabPlan
from train.tasks.images.cifar10 import NUM_CLASSES, SIDE, LabelledImages, read_cifar10
from train.tasks.images.data import CIFAR10_MEAN, CIFAR10_STD, torchvision_cifar10
from train.tasks.images.models import resnet20

NUM_VALIDATION = 5000
MAX_SHIFT = 4
"""The pixels by which a crop is moved, at most."""
NUM_SCORED = 500
"""The images of a forward that measures the averaged model."""
WORKERS, BATCH_SIZE, RATE = 8, 16, 0.1
"""The eight workers of a step together read 128 images, the batch of the paper, with its rate."""
STEPS_PER_EPOCH = (50_000 - NUM_VALIDATION) // (WORKERS * BATCH_SIZE)
SHORT, LONG = 10 * STEPS_PER_EPOCH, 30 * STEPS_PER_EPOCH
"""The steps of 10 epochs and of 30."""


class WholeImages:
    """CIFAR-10 at 32 pixels, cropped and mirrored at random, for ResNet-20 with batch normalisation.

    In each epoch all workers together read each image once, in an order that depends on the number of the epoch only.

    Args:
        num_workers: the number of workers.
        batch_size: the images of a worker in a step.
        device: the device of the models.
        dtype: of the products of the forward.

    Attributes:
        data: see `StudyTask`.
        images: the images that workers learn, with a margin of `MAX_SHIFT` pixels of the mean colour, uint8
            [N, 40, 40, 3]; on the CPU.
        labels: their labels, int64 [N].
        splits: the images, uint8 [N, 32, 32, 3], and labels of the validation split and of the test split.

    Raises:
        ValueError: GOSSIP_DATA names no folder with the archive.
    """

    def __init__(
        self, num_workers: int, batch_size: int, *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        path = Path(os.environ.get("GOSSIP_DATA", "")) / ARCHIVE
        if not path.is_file():
            raise ValueError(f"got no {path}, expected it; set GOSSIP_DATA to the folder that has {ARCHIVE}")
        self.data = short_hash(path.read_bytes())
        self.num_workers, self.batch_size, self.device = num_workers, batch_size, torch.device(device)
        self._dtype = dtype
        capability = torch.backends.cpu.get_cpu_capability()
        if self.device.type == "cpu" and dtype == torch.bfloat16 and capability in ("DEFAULT", "AVX2"):
            print(
                f"resnet: got a processor without AVX-512 ({capability}), expected one with it: steps in bfloat16 take "
                "about 15 times as long, and a short training 6 hours of a core; train on another machine, or pass "
                "--device cuda",
                flush=True,
            )
        (images, labels), test = (_of(split) for split in read_cifar10(path, read_python=torchvision_cifar10))
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
        held, learned = order.split([NUM_VALIDATION, len(order) - NUM_VALIDATION])
        self.splits = [(images[held], labels[held]), test]
        mean = 255 * torch.tensor(CIFAR10_MEAN)
        padded = mean.round().byte().repeat(len(learned), SIDE + 2 * MAX_SHIFT, SIDE + 2 * MAX_SHIFT, 1)
        padded[:, MAX_SHIFT:-MAX_SHIFT, MAX_SHIFT:-MAX_SHIFT] = images[learned]
        self.images, self.labels = padded, labels[learned]
        self._mean, self._std = (
            (255 * torch.tensor(values))[:, None, None].to(self.device) for values in (CIFAR10_MEAN, CIFAR10_STD)
        )
        self._epoch, self._order = -1, order

    def model(self) -> nn.Module:
        """See `StudyTask`."""
        return resnet20(3, NUM_CLASSES).to(self.device)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """See `StudyTask`."""
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            return F.cross_entropy(model(self._normalised(batch[0])), batch[1])

    def batch(self, worker: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `StudyTask`; images are uint8 [N, 3, 32, 32], in `torch.channels_last`."""
        chosen = self._chosen(worker, step)
        top, left = torch.randint(2 * MAX_SHIFT + 1, (2, len(chosen), 1), generator=generator)
        is_mirrored = torch.rand(len(chosen), 1, generator=generator) < 0.5
        pixels = torch.arange(SIDE)
        rows, columns = top + pixels, left + torch.where(is_mirrored, pixels.flip(0), pixels)
        images = self.images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        return images.permute(0, 3, 1, 2), self.labels[chosen]

    def _chosen(self, worker: int, step: int) -> Tensor:
        """Return the numbers of the images of a worker in a step, int64 [batch_size]."""
        size = self.num_workers * self.batch_size
        epoch, step = divmod(step, len(self.labels) // size)
        if epoch != self._epoch:
            order = np.random.default_rng((1, epoch)).permutation(len(self.labels))
            self._epoch, self._order = epoch, torch.from_numpy(order)
        first = step * size + worker * self.batch_size
        return self._order[first : first + self.batch_size]

    def optimizer(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """See `StudyTask`."""
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-4)

    def score(self, model: nn.Module) -> tuple[float, float]:
        """See `StudyTask`: the errors in percent."""
        errors = []
        for images, labels in self.splits:
            found = [
                model(self._normalised(part.permute(0, 3, 1, 2).to(self.device))).argmax(-1).cpu()
                for part in images.split(NUM_SCORED)
            ]
            errors.append(100 * float((torch.cat(found) != labels).float().mean()))
        return errors[0], errors[1]

    def _normalised(self, images: Tensor) -> Tensor:
        return (images - self._mean) / self._std


def _of(split: LabelledImages) -> tuple[Tensor, Tensor]:
    """Return images, uint8 [N, 32, 32, 3], and labels."""
    images, labels = map(torch.from_numpy, split)
    return images.permute(0, 2, 3, 1).contiguous(), labels


METHODS: Mapping[str, Any] = {
    "all-reduce": "ar",
    "SGP": "sgp",
    "SGP, 2 peers": LabPlan.of("sgp", peers_per_itr=2),
    "Overlap SGP": "osgp",
    "MATCHA, budget 0.5": "MATCHA(budget=0.5):ring",
    "PowerGossip, rank 1": "PowerGossip(rank=1):ring",
    "AD-PSGD": "adpsgd",
}
"""The methods by name; MATCHA and PowerGossip have a ring, the others their own graphs."""

RESNET: Mapping[str, Study] = {
    "resnet": Study(
        partial(WholeImages, WORKERS, BATCH_SIZE),
        lambda workers: METHODS,
        cells=((WORKERS, SHORT, 1), (WORKERS, LONG, 1), (WORKERS, LONG, 2)),
        rates=(RATE,),
        points=2,
        by="loop",
        has_device=True,
    ),
}
"""The study by its name. The short trainings come first; on one core each takes half an hour, a long one 90 minutes."""

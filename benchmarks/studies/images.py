"""Studies with CIFAR-10 at 16 pixels and drawn digits: bytes, numbers of workers, stragglers, and MATCHA."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.record import short_hash
from benchmarks.studies.study import Study
from gossip_modules.graph_manager import NetworkXGraph
from gossip_modules.lab import Compute, Digits, LabPlan, Network
from gossip_modules.matcha import select_graph
from train.tasks.images.data import DATASETS, Source

ARCHIVE = "cifar10-jpeg.tar.gz"
SIDE, NUM_CLASSES = 16, 10
NUM_VALIDATION, NUM_DRAWN = 5000, 1024
"""The number of images in the validation split of CIFAR-10, and in each of the two splits of drawn digits."""
LAYERS = ((4, 64), (2, 64))
"""The kernel, which is the stride too, and the channels of each convolution."""


class Patches(nn.Module):
    """A convolution whose stride is its kernel, an offset or batch normalisation, and a ReLU.

    Args:
        inputs, outputs: the numbers of channels.
        kernel: the side of a patch.
        normalizes: whether there is batch normalisation.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, *, normalizes: bool) -> None:
        super().__init__()
        self.kernel = kernel
        self.linear = nn.Linear(kernel**2 * inputs, outputs, bias=not normalizes)
        self.norm = nn.BatchNorm1d(outputs) if normalizes else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Return images [N, H / kernel, W / kernel, outputs] of images [N, H, W, inputs]."""
        num, side, _, channels = images.shape
        rows = side // self.kernel
        patches = images.view(num, rows, self.kernel, rows, self.kernel, channels).transpose(2, 3)
        found = self.norm(self.linear(patches.reshape(num * rows**2, -1))).relu()
        return found.view(num, rows, rows, -1)


class Labelled:
    """Labelled images, from which workers draw their batches.

    Attributes:
        data: see `StudyTask`.
        batch_size: the images of a worker in a step.
        images, labels: the images that workers learn.
        splits: the images and labels of the validation split and of the test split.
    """

    data: str
    batch_size: int
    images: Tensor
    labels: Tensor
    splits: list[tuple[Tensor, Tensor]]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """See `StudyTask`."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def batch(self, worker: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `StudyTask`."""
        chosen = torch.randint(len(self.labels), (self.batch_size,), generator=generator)
        return self.images[chosen], self.labels[chosen]

    def optimizer(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """See `StudyTask`."""
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True, weight_decay=1e-4)

    def score(self, model: nn.Module) -> tuple[float, float]:
        """See `StudyTask`: the errors in percent."""
        errors = [100 * float((model(x).argmax(-1) != y).float().mean()) for x, y in self.splits]
        return errors[0], errors[1]


class SmallImages(Labelled):
    """CIFAR-10 at 16 pixels, mirrored half of the time, for two convolutions and a linear layer of 22,000 parameters.

    Args:
        batch_size: the images of a worker in a step.
        normalizes: whether the model has batch normalisation.

    Raises:
        ValueError: GOSSIP_DATA names no folder with the archive.
    """

    def __init__(self, batch_size: int, *, normalizes: bool) -> None:
        path = Path(os.environ.get("GOSSIP_DATA", "")) / ARCHIVE
        if not path.is_file():
            raise ValueError(f"got no {path}, expected it; set GOSSIP_DATA to the folder that has {ARCHIVE}")
        self.data = short_hash(path.read_bytes())
        self.batch_size, self.normalizes = batch_size, normalizes
        train, test = (self._small(split) for split in DATASETS["cifar10"](Source("cifar10", str(path))))
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(train[0])))
        held, learned = order.split([NUM_VALIDATION, len(order) - NUM_VALIDATION])
        self.splits = [(train[0][held], train[1][held]), test]
        images, labels = (part[learned] for part in train)
        self.images, self.labels = torch.cat([images, images.flip(2)]), labels.repeat(2)

    @staticmethod
    def _small(split: Any) -> tuple[Tensor, Tensor]:
        images = F.avg_pool2d(split.images, split.images.shape[2] // SIDE).permute(0, 2, 3, 1).contiguous()
        return images, torch.from_numpy(split.labels)

    def model(self) -> nn.Module:
        """See `StudyTask`."""
        parts, channels, side = list[nn.Module](), 3, SIDE
        for kernel, outputs in LAYERS:
            parts.append(Patches(channels, outputs, kernel, normalizes=self.normalizes))
            channels, side = outputs, side // kernel
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(channels * side**2, NUM_CLASSES))


class DrawnDigits(Labelled):
    """The drawn digits of `gossip_modules.lab.Digits`, for two linear layers of 2,410 parameters.

    Args:
        batch_size: the images of a worker in a step.
    """

    def __init__(self, batch_size: int) -> None:
        problem, self.batch_size = Digits(), batch_size
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(problem.labels)))
        *held, learned = order.split([NUM_DRAWN, NUM_DRAWN, len(order) - 2 * NUM_DRAWN])
        self.splits = [(problem.images[part], problem.labels[part]) for part in held]
        self.images, self.labels = problem.images[learned], problem.labels[learned]
        self.data = short_hash(problem.labels.numpy().tobytes())

    def model(self) -> nn.Module:
        """See `StudyTask`."""
        return nn.Sequential(nn.Linear(self.images.shape[1], 50), nn.ReLU(), nn.Linear(50, NUM_CLASSES))


@dataclass(frozen=True)
class TwoLate(Compute):
    """Two workers, drawn anew for each step, take 320 ms longer, as in the experiments of the WAGMA paper."""

    def compute_seconds(self, step: int, workers: np.ndarray) -> np.ndarray:
        """See `Compute`."""
        late = np.random.default_rng((self.seed, step)).choice(int(workers.max()) + 1, 2, replace=False)
        return super().compute_seconds(step, workers) + 0.32 * np.isin(workers, late)


RING: Mapping[str, Any] = {
    "all-reduce": "ar",
    "D-PSGD": "dpsgd:ring",
    "PowerGossip, rank 1": "PowerGossip(rank=1):ring",
    "MATCHA, budget 0.5": "MATCHA(budget=0.5):ring",
    "SGP": "sgp",
    "CHOCO, signs": "Choco(SignNorm(), step_size=0.45):ring",
    "MATCHA, budget 0.1": "MATCHA(budget=0.1):ring",
    "CHOCO, top 1 %": "Choco(TopK(0.01), step_size=0.0375):ring",
    "DeepSqueeze, signs": "DeepSqueeze(SignNorm(), step_size=0.01):ring",
    "Moniqua, 8 bits": "Moniqua(theta=1.0):ring",
    "PowerGossip, rank 2": "PowerGossip(rank=2):ring",
}
"""Methods on a ring of 8, with the published step sizes; SGP has its own graph."""
NUMBERS: Mapping[str, Any] = {
    "all-reduce": "ar",
    "SGP": "sgp",
    "SGP, 2 peers": LabPlan.of("sgp", peers_per_itr=2),
    "Overlap SGP": "osgp",
    "D-PSGD": "dpsgd",
    "AD-PSGD": "adpsgd",
    "WAGMA-SGD": "wagma",
    "local SGD, 8": "LocalSGD(sync_every=8)",
    "SlowMo, 8": "SlowMo(sync_every=8)",
    "D2": "D2()",
    "QG-DSGDm": "QGDSGDm()",
    "SGP, momentum mixed too": "sgp",
    "SGP, 2 peers, momentum mixed too": LabPlan.of("sgp", peers_per_itr=2),
}
LATE: Mapping[str, Any] = {
    "all-reduce": "ar",
    "WAGMA-SGD": "wagma",
    "SGP, 2 peers": LabPlan.of("sgp", peers_per_itr=2),
    "AD-PSGD": "adpsgd",
    "D-PSGD": "dpsgd:ring",
    "dpwa": "dpwa",
}
GRAPHS = {8: (0, 5), 16: (1, 2, 3, 4)}
"""The published graphs of MATCHA by the number of workers."""
BUDGETS = (0.1, 0.25, 0.5, 0.75, 1.0)


def on_graphs(workers: int) -> Mapping[str, Any]:
    """Return MATCHA with each budget on each published graph of so many workers."""
    graphs = {index: NetworkXGraph(select_graph(index)) for index in GRAPHS[workers]}
    return {
        f"graph {index}, budget {budget:g}": LabPlan.of(f"MATCHA(budget={budget})", graph=graph)
        for index, graph in graphs.items()
        for budget in BUDGETS
    }


IMAGES: Mapping[str, Study] = {
    "accuracy_bytes": Study(
        partial(SmallImages, 8, normalizes=False),
        lambda workers: RING,
        cells=tuple((8, 14_000, seed) for seed in (1, 2, 3)),
        rates=(0.025, 0.05, 0.1),
    ),
    "worker_numbers": Study(
        partial(SmallImages, 8, normalizes=True),
        lambda workers: NUMBERS,
        cells=tuple((n, 16_000 // n, seed) for seed in (1, 2, 3) for n in (16, 8, 32, 4)),
        rates=(0.05, 0.1, 0.2),
        mixes_momentum={name for name in NUMBERS if name.endswith(", momentum mixed too")},
    ),
    "straggler_accuracy": Study(
        partial(DrawnDigits, 2),
        lambda workers: LATE,
        cells=tuple((64, 240, seed) for seed in (1, 2, 3)),
        rates=(0.025, 0.05, 0.1),
        tuning=0.25,
        compute=TwoLate(0.6),
        network=Network("80 Gbit/s, 0.01 ms", memory_byte_s=500e9),
        num_parameters=25_600_000,
    ),
    "matcha_time": Study(
        partial(DrawnDigits, 2),
        on_graphs,
        cells=tuple((n, 240, seed) for seed in (1, 2, 3) for n in GRAPHS),
        rates=(0.1,),
        points=40,
        compute=Compute(0.1),
        network=Network("5 Gbit/s"),
        num_parameters=14_700_000,
    ),
}
"""The studies by name."""

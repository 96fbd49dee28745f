"""Tasks of the Lab: a model of your own, or one of two small problems, a mean and small digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from ..rounds.rows import Indices
from .clock import check, check_share

MOMENTUM = 0.9
"""The momentum of SGD for algorithms that need some, with a learning rate that is smaller by one minus this."""
_SIDE, _NUM_CLASSES, _NUM_FEATURES = 6, 10, 37  # pixels and a constant
_NUM_IMAGES, _NUM_TESTS = 8192, 256
_MAX_TESTED = 32  # workers whose own models are tested, evenly spaced
_NUM_STROKES = 5  # of a digit


@dataclass(eq=False)
class LabTask:
    """A model, its loss, data and optimizer.

    Args:
        model: makes the model. It is called once, and all workers start with its values. Training runs on its device.
        loss: loss(model, batch), a scalar.
        data: data(worker, step, generator) makes the batch of a worker in a step: a tensor, or a tuple or a dict of
            tensors. The generator, of the CPU, has a seed of its own for each worker and step.
        optimizer: makes a torch optimizer from a list of parameters; None: there is nothing to learn. The attribute
            `model` of the list is the model of the worker, for optimizers such as `MuonAdamW`. One optimizer
            steps all workers at once if it is an elementwise optimizer of torch, or has a true attribute
            `is_elementwise`; otherwise each worker has an optimizer of its own.
        scheduler: makes a learning rate scheduler from the optimizer; both step together.
        evaluate: evaluate(model) measures the averaged model.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    data: Callable[[int, int, torch.Generator], Any]
    optimizer: Callable[[Any], Optimizer] | None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    evaluate: Callable[[nn.Module], float] | None = None

    def start(self, x: Tensor) -> Tensor:
        """Write the models that training begins with into x [n, d], if they differ; returns x."""
        return x

    def batch(self, worker: int, step: int, seed: int) -> Any:
        """Return the batch of a worker in a step.

        Args:
            worker: the number of the worker.
            step: the number of the step.
            seed: the seed of the run; each worker and step has random numbers of its own.
        """
        return self.data(worker, step, torch.Generator().manual_seed(seed_of(seed, worker, step)))

    def batches(self, num_workers: int, step: int, seed: int) -> Any:
        """Return the batches of workers 0 to `num_workers` - 1, stacked; see `batch` for `step` and `seed`."""
        return default_collate([self.batch(worker, step, seed) for worker in range(num_workers)])


class Problem(LabTask):
    """A task small enough for thousands of workers at once.

    Attributes:
        target: the `error` to reach, unless the user gives another one.
        max_disagreement: up to there workers count as agreeing.
        check_every: steps from one look at the error to the next.
        error_name: the meaning of the error, in words.
        is_solved_by_rounds: whether rounds alone solve it, so that the last step, a round without compute, counts.
    """

    target: float
    max_disagreement: float
    check_every: int
    error_name: str
    is_solved_by_rounds: bool = False

    def error(self, z: Tensor) -> float:
        """Return the distance of models z [n, d] of the workers from a solution: 0 is solved."""
        raise NotImplementedError

    def disagreement(self, z: Tensor) -> float:
        """Return the distance of the models z [n, d] from their mean, root mean square over workers, in a unit."""
        raise NotImplementedError

    def with_momentum(self) -> Problem:
        """Return the same problem for algorithms that work on the momentum of SGD."""
        return self


class _Matrix(nn.Module):
    """A matrix of parameters, zero at first; its forward multiplies by it."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=dtype, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Consensus(Problem):
    """Random vectors, one for each worker; gossip alone brings them to their mean.

    The error is the distance of all from the mean at the start, relative to the start; so is the disagreement, from
    the mean of now.

    Args:
        seed: the seed of the vectors, standard normal, float64.

    >>> problem = Consensus()
    >>> x = problem.start(torch.zeros(4, 64, dtype=torch.float64))
    >>> problem.error(x), problem.error(x.mean(0).expand(4, -1)) < 1e-15
    (1.0, True)
    """

    target = 1e-3
    max_disagreement = math.inf  # an error that small is agreement
    check_every = 1
    error_name = "distance from the mean"
    is_solved_by_rounds = True

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(lambda: _Matrix(8, 8, torch.float64), lambda model, batch: batch, lambda *_: None, None)
        self.seed, self._distance = seed, 0.0
        self._mean = torch.zeros((), device="cpu")

    def start(self, x: Tensor) -> Tensor:
        """See `LabTask`."""
        x.copy_(torch.from_numpy(np.random.default_rng(self.seed).standard_normal(x.shape)))
        self._mean = x.mean(0)
        self._distance = float((x - self._mean).norm())
        return x

    def error(self, z: Tensor) -> float:
        """See `Problem`."""
        return float((z - self._mean).norm()) / self._distance if self._distance else 0.0

    def disagreement(self, z: Tensor) -> float:
        """See `Problem`."""
        return float((z - z.mean(0)).norm()) / self._distance if self._distance else 0.0


class Quadratics(Problem):
    """A quadratic loss for each worker, (x - b_i) A_i (x - b_i) / 2, with exact gradients; their best x is known.

    The b_i are standard normal, and the A_i are rotations of equal eigenvalues, from 1 / condition to 1. All is
    float64. Workers start at zero and take steps of plain SGD. The error is the distance of the models from the x with
    the smallest mean loss, the mean over all workers, relative to the distance at the start; so is the disagreement.

    Args:
        dim: the number of parameters.
        condition: the largest curvature over the smallest, of each loss.
        learning_rate: the rate of SGD, above 0; the largest curvature is 1.
        momentum: the momentum of SGD; the learning rate is then smaller by one minus this.
        seed: the seed of the losses.

    Raises:
        ValueError: a number is out of range.

    >>> problem = Quadratics()
    >>> round(problem.error(torch.zeros(4, 8)), 12), problem.error(problem.optimum(4).expand(4, -1))
    (1.0, 0.0)
    """

    target = 1e-6
    max_disagreement = math.inf  # an error that small is agreement
    check_every = 1
    error_name = "distance from the optimum"

    def __init__(
        self,
        *,
        dim: int = 8,
        condition: float = 4.0,
        learning_rate: float = 0.1,
        momentum: float = 0.0,
        seed: int = 0,
    ) -> None:
        check("dim", dim, dim >= 1, "at least 1")
        check("condition", condition, 1 <= condition < math.inf, "at least 1, the largest curvature over the smallest")
        check("learning_rate", learning_rate, 0 < learning_rate < math.inf, "a positive number; 0.1 is the default")
        super().__init__(
            lambda: _Matrix(dim, 1, torch.float64),
            lambda model, batch: (model(batch[0]) - batch[1]).square().sum() / 2,
            lambda worker, *_: tuple(x[worker] for x in self.batches(worker + 1, 0, 0)),
            lambda parameters: SGD(parameters, lr=learning_rate * (1 - momentum), momentum=momentum),
        )
        self.dim, self.condition, self.learning_rate, self.seed = dim, condition, learning_rate, seed
        self._losses: list[tuple[Tensor, Tensor]] = []  # F_i and F_i b_i of the first workers

    def with_momentum(self) -> Quadratics:
        """See `Problem`."""
        return Quadratics(
            dim=self.dim,
            condition=self.condition,
            learning_rate=self.learning_rate,
            momentum=MOMENTUM,
            seed=self.seed,
        )

    def batches(self, num_workers: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
        """See `LabTask`; equal in all steps. The loss of worker i is |F_i x - F_i b_i|^2 / 2, with F_i' F_i = A_i.

        Returns:
            F float64 [num_workers, dim, dim], and F b float64 [num_workers, dim, 1].
        """
        while len(self._losses) < num_workers:
            draw = np.random.default_rng((self.seed, len(self._losses)))
            rotation, _ = np.linalg.qr(draw.standard_normal((self.dim, self.dim)))
            factor = np.sqrt(np.linspace(1 / self.condition, 1.0, self.dim))[:, None] * rotation
            target = factor @ draw.standard_normal((self.dim, 1))
            self._losses.append((torch.from_numpy(factor), torch.from_numpy(target)))
        factors, targets = zip(*self._losses[:num_workers], strict=True)
        return torch.stack(factors), torch.stack(targets)

    def optimum(self, num_workers: int) -> Tensor:
        """Return the x with the smallest mean loss of workers 0 to `num_workers` - 1, float64 [dim]."""
        factors, targets = self.batches(num_workers, 0, 0)
        across = factors.mT
        return torch.linalg.solve((across @ factors).mean(0), (across @ targets).mean(0))[:, 0]

    def error(self, z: Tensor) -> float:
        """See `Problem`."""
        optimum = self.optimum(len(z))
        return float((z - optimum).norm() / optimum.expand_as(z).norm())

    def disagreement(self, z: Tensor) -> float:
        """See `Problem`."""
        return float((z - z.mean(0)).norm() / self.optimum(len(z)).expand_as(z).norm())


class Digits(Problem):
    """Softmax regression on images of 6 x 6 pixels that are drawn like digits: ten shapes of strokes, moved and noisy.

    Workers start equal and take steps of plain SGD on batches of their own. The error is the cross-entropy of a
    worker's own model on test images, in nats, mean over at most 32 workers; the disagreement is relative to the norm
    of the mean model.

    Args:
        label_skew: the share of its own digit, worker modulo 10, in a worker's images; the other images, all by
            default, are of any digit.
        learning_rate: the rate of SGD, above 0.
        batch_size: images of a worker in a step.
        momentum: the momentum of SGD; the learning rate is then smaller by one minus this.
        seed: the seed of images and batches.

    Attributes:
        images: float32 [images, 37], pixels and a constant; sorted by digit.
        labels: int64 [images].

    Raises:
        ValueError: a number is out of range.
    """

    target = 0.4
    max_disagreement = 0.2
    check_every = 4
    error_name = "test loss"

    def __init__(
        self,
        *,
        label_skew: float = 0.0,
        learning_rate: float = 0.5,
        batch_size: int = 2,
        momentum: float = 0.0,
        seed: int = 0,
    ) -> None:
        check_share("label_skew", label_skew)
        is_rate = 0 < learning_rate < math.inf
        check("learning_rate", learning_rate, is_rate, "a positive number; 0.5 is the default")
        check("batch_size", batch_size, batch_size >= 1, "at least 1; a worker needs images to learn from")
        super().__init__(
            lambda: _Matrix(_NUM_FEATURES, _NUM_CLASSES, torch.float32),
            lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
            lambda *_: None,
            lambda parameters: SGD(parameters, lr=learning_rate * (1 - momentum), momentum=momentum),
        )
        self.label_skew, self.learning_rate, self.batch_size, self.seed = label_skew, learning_rate, batch_size, seed
        generator = np.random.default_rng(seed)
        strokes = _draw_strokes(generator)
        self.images, self.labels = _draw_images(strokes, _NUM_IMAGES, generator)
        self._tests, self._test_labels = _draw_images(strokes, _NUM_TESTS, generator)
        # Images by digit, and where each digit's begin: its own images are a range.
        order = self.labels.argsort(stable=True)
        self.images, self.labels = self.images[order], self.labels[order]
        self._bounds = np.searchsorted(self.labels.numpy(), np.arange(_NUM_CLASSES + 1))

    def with_momentum(self) -> Digits:
        """See `Problem`."""
        skew, rate, size = self.label_skew, self.learning_rate, self.batch_size
        return Digits(label_skew=skew, learning_rate=rate, batch_size=size, momentum=MOMENTUM, seed=self.seed)

    def batches(self, num_workers: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
        """See `LabTask`; a pure function of the seed of the problem and the step."""
        indices = torch.from_numpy(self.indices(num_workers, step))
        return self.images[indices], self.labels[indices]

    def indices(self, num_workers: int, step: int) -> Indices:
        """Return the images of workers 0 to `num_workers` - 1 in a step: int64 [num_workers, batch_size]."""
        draw = np.random.default_rng((self.seed, step))
        shape = (num_workers, self.batch_size)
        batch = draw.integers(_NUM_IMAGES, size=shape)
        if self.label_skew:
            digit = np.arange(num_workers)[:, None] % _NUM_CLASSES
            own = draw.integers(self._bounds[digit], self._bounds[digit + 1], size=shape)
            batch = np.where(draw.random(shape) < self.label_skew, own, batch)
        return batch

    def error(self, z: Tensor) -> float:
        """See `Problem`."""
        tested = z[:: -(-len(z) // _MAX_TESTED)].view(-1, _NUM_FEATURES, _NUM_CLASSES)
        scores = (self._tests @ tested).flatten(0, 1)
        return float(cross_entropy(scores, self._test_labels.repeat(len(tested))))

    def disagreement(self, z: Tensor) -> float:
        """See `Problem`."""
        mean = z.mean(0)
        size = float(mean.norm())
        return float((z - mean).square().sum(1).mean().sqrt()) / size if size else 0.0


def seed_of(seed: int, worker: int, step: int) -> int:
    """Return the seed of a worker's random numbers in a step."""
    return int(np.random.SeedSequence((seed, worker, step)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _draw_strokes(generator: np.random.Generator) -> np.ndarray:
    """Draw ten shapes: points (row, column) along a bent line, each with its width, float64 [10, strokes, 3]."""
    places = generator.uniform(0.5, _SIDE - 1.5, (_NUM_CLASSES, _NUM_STROKES, 2))
    widths = generator.uniform(0.5, 1.0, (_NUM_CLASSES, _NUM_STROKES, 1))
    return np.concatenate([places, widths], axis=2)


def _draw_images(strokes: np.ndarray, count: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw images float32 [count, features], the last feature 1, and labels int64 [count]."""
    labels = generator.integers(_NUM_CLASSES, size=count)
    shift = generator.normal(0.0, 0.35, (count, 1, 2))
    points = strokes[labels]
    places = points[..., :2] + shift + generator.normal(0.0, 0.2, (count, _NUM_STROKES, 2))
    pixels = np.stack(np.meshgrid(np.arange(_SIDE), np.arange(_SIDE), indexing="ij"), axis=-1).reshape(-1, 2)
    squares = ((places[:, :, None] - pixels) ** 2).sum(-1)  # [count, strokes, pixels]
    ink = np.exp(-squares / (2 * points[..., 2:] ** 2)).max(axis=1)
    ink += generator.normal(0.0, 0.2, ink.shape)
    images = np.concatenate([2 * (ink - 0.4), np.ones((count, 1))], axis=1)
    return torch.from_numpy(images).float(), torch.from_numpy(labels)


PROBLEMS: dict[str, type[Problem]] = {"Consensus": Consensus, "Digits": Digits, "Quadratics": Quadratics}
"""The problems by class."""

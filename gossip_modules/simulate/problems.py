"""What n simulated workers work on: agreeing on a mean, and learning to read small digits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .delays import check, check_share

_SIDE, _NUM_CLASSES, _NUM_FEATURES = 6, 10, 37  # pixels and a constant
_NUM_IMAGES, _NUM_TESTS = 8192, 256
_MAX_TESTED = 32  # workers whose own models are tested, evenly spaced
_NUM_STROKES = 5  # of a digit


class Problem(ABC):
    """A problem of d parameters for each worker, small enough to be solved by thousands at once.

    Attributes:
        shape: (rows, columns) of the matrix that the parameters are; d is their product.
        target: what `error` is to fall to, unless the user says otherwise.
        max_disagreement: up to there workers count as agreeing.
        check_every: steps from one look at the error to the next.
        error_name: what the error is, in words.
        is_solved_by_rounds: whether rounds alone solve it, so that the last step, a round without compute, counts.
    """

    shape: tuple[int, int]
    target: float
    max_disagreement: float
    check_every: int
    error_name: str
    is_solved_by_rounds: bool = False

    @abstractmethod
    def start(self, num_ranks: int) -> Tensor:
        """The models that training begins with: [n, d]."""

    @abstractmethod
    def update(self, z: Tensor, step: int) -> Tensor | None:
        """What the optimizer adds to each model after its step: [n, d]; None where there is nothing to learn.

        Args:
            z: the models that gradients are taken at, [n, d]; not changed.
            step: chooses the batches.
        """

    @abstractmethod
    def error(self, z: Tensor) -> float:
        """How far the workers with models z [n, d] are from having solved it: 0 is solved."""

    @abstractmethod
    def disagreement(self, z: Tensor) -> float:
        """The distance of the models z [n, d] from their mean, root mean square over workers, in units of its own."""


class Consensus(Problem):
    """Random vectors, one per worker, that gossip alone brings to their mean.

    The error is the distance of all from the mean at the start, relative to the start; so is the disagreement, from
    the mean of now.

    Args:
        seed: of the vectors, standard normal, float64.

    >>> problem = Consensus()
    >>> x = problem.start(4)
    >>> problem.error(x), problem.error(x.mean(0).expand(4, -1)) < 1e-15
    (1.0, True)
    """

    shape = (8, 8)
    target = 1e-3
    max_disagreement = math.inf  # an error that small is agreement
    check_every = 1
    error_name = "distance from the mean"
    is_solved_by_rounds = True

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed
        self._mean = torch.zeros((), device="cpu")
        self._distance = 0.0

    def start(self, num_ranks: int) -> Tensor:
        """See `Problem`."""
        x = torch.from_numpy(np.random.default_rng(self.seed).standard_normal((num_ranks, math.prod(self.shape))))
        self._mean = x.mean(0)
        self._distance = float((x - self._mean).norm())
        return x

    def update(self, z: Tensor, step: int) -> Tensor | None:
        """See `Problem`: nothing."""
        return None

    def error(self, z: Tensor) -> float:
        """See `Problem`."""
        return float((z - self._mean).norm()) / self._distance if self._distance else 0.0

    def disagreement(self, z: Tensor) -> float:
        """See `Problem`."""
        return float((z - z.mean(0)).norm()) / self._distance if self._distance else 0.0


class Digits(Problem):
    """Softmax regression on images of 6 x 6 pixels that are drawn like digits: ten shapes of strokes, moved and noisy.

    Workers start equal and take steps of plain SGD on batches of their own. The error is the cross-entropy of a
    worker's own model on test images, in nats, mean over at most 32 workers; the disagreement is relative to the norm
    of the mean model.

    Args:
        label_skew: share of a worker's images that are of its own digit, rank modulo 10; the others, all by default,
            are of any.
        learning_rate: of SGD, above 0.
        batch_size: images per worker and step.
        seed: of images and batches.

    Attributes:
        images: float32 [images, 37], pixels and a constant; sorted by digit.
        labels: int64 [images].

    Raises:
        ValueError: a number out of range.
    """

    shape = (_NUM_FEATURES, _NUM_CLASSES)
    target = 0.4
    max_disagreement = 0.2
    check_every = 4
    error_name = "test loss"

    def __init__(
        self, *, label_skew: float = 0.0, learning_rate: float = 0.5, batch_size: int = 2, seed: int = 0
    ) -> None:
        check_share("label_skew", label_skew)
        is_rate = 0 < learning_rate < math.inf
        check("learning_rate", learning_rate, is_rate, "a positive number; 0.5 is the default")
        check("batch_size", batch_size, batch_size >= 1, "at least 1; a worker needs images to learn from")
        self.label_skew, self.learning_rate, self.batch_size, self.seed = label_skew, learning_rate, batch_size, seed
        generator = np.random.default_rng(seed)
        strokes = _draw_strokes(generator)
        self.images, self.labels = _draw_images(strokes, _NUM_IMAGES, generator)
        self._tests, self._test_labels = _draw_images(strokes, _NUM_TESTS, generator)
        # Images by digit, and where each digit's begin: its own images are a range.
        order = self.labels.argsort(stable=True)
        self.images, self.labels = self.images[order], self.labels[order]
        self._bounds = np.searchsorted(self.labels.numpy(), np.arange(_NUM_CLASSES + 1))

    def start(self, num_ranks: int) -> Tensor:
        """See `Problem`."""
        return torch.zeros(num_ranks, math.prod(self.shape), device="cpu")

    def update(self, z: Tensor, step: int) -> Tensor | None:
        """See `Problem`: - learning_rate * gradient of the cross-entropy on each worker's batch."""
        batch = torch.from_numpy(self.batches(len(z), step))
        images = self.images.index_select(0, batch.flatten()).view(*batch.shape, _NUM_FEATURES)
        labels = self.labels[batch]
        probabilities = torch.bmm(images, z.view(-1, *self.shape)).softmax(dim=2)
        probabilities.scatter_add_(2, labels[..., None], probabilities.new_full((*labels.shape, 1), -1.0))
        gradients = torch.bmm(images.transpose(1, 2), probabilities)
        return gradients.flatten(1).mul_(-self.learning_rate / self.batch_size)

    def batches(self, num_ranks: int, step: int) -> np.ndarray:
        """Indices of images, int64 [n, batch_size]; a pure function of (seed, step)."""
        draw = np.random.default_rng((self.seed, step))
        shape = (num_ranks, self.batch_size)
        batch = draw.integers(_NUM_IMAGES, size=shape)
        if self.label_skew:
            digit = np.arange(num_ranks)[:, None] % _NUM_CLASSES
            own = draw.integers(self._bounds[digit], self._bounds[digit + 1], size=shape)
            batch = np.where(draw.random(shape) < self.label_skew, own, batch)
        return batch

    def error(self, z: Tensor) -> float:
        """See `Problem`."""
        tested = z[:: -(-len(z) // _MAX_TESTED)].view(-1, *self.shape)
        scores = (self._tests @ tested).flatten(0, 1)
        return float(cross_entropy(scores, self._test_labels.repeat(len(tested))))

    def disagreement(self, z: Tensor) -> float:
        """See `Problem`."""
        mean = z.mean(0)
        size = float(mean.norm())
        return float((z - mean).square().sum(1).mean().sqrt()) / size if size else 0.0


def _draw_strokes(generator: np.random.Generator) -> np.ndarray:
    """Ten shapes: points (row, column) along a bent line, each with its width, float64 [10, strokes, 3]."""
    places = generator.uniform(0.5, _SIDE - 1.5, (_NUM_CLASSES, _NUM_STROKES, 2))
    widths = generator.uniform(0.5, 1.0, (_NUM_CLASSES, _NUM_STROKES, 1))
    return np.concatenate([places, widths], axis=2)


def _draw_images(strokes: np.ndarray, count: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Images float32 [count, features], the last feature 1, and labels int64 [count]."""
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


PROBLEMS: dict[str, type[Problem]] = {"consensus": Consensus, "digits": Digits}
"""By the names of the command line."""

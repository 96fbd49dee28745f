"""Partitions of a data set: which items belong to which worker, even or uneven, with right or wrong labels.

All functions are pure functions of their arguments and the seed, so each rank computes the parts of all ranks without
communication. Parts are disjoint and of equal length, so that all workers have equally many batches in an epoch.

>>> import numpy as np
>>> labels = np.repeat([0, 1, 2, 3], 25)
>>> shards(labels, 4, seed=1, shards_per_worker=1).shape
(4, 25)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .checks import checked_integer, checked_seed

Indices: TypeAlias = NDArray[np.int64]

_EVEN_STREAM = 1
"""The first word of the seed of `even` and `dirichlet`; the training scripts draw from other streams of a seed."""
_LABEL_STREAM = 6
"""The first word of the seed of `noisy_labels`."""


def even(num_items: int, num_workers: int, *, seed: int) -> Indices:
    """Deal items to workers at random.

    Args:
        num_items: the number of items, N.
        num_workers: n.
        seed: an integer of at least 0, equal on all ranks.

    Returns:
        The items of each worker, int64 [n, N // n]. The last N % n items of the random order belong to no worker.

    Raises:
        ValueError: there are fewer items than workers, or a number is out of range.

    >>> even(9, 3, seed=0).shape
    (3, 3)
    """
    n = _checked_workers(num_workers, num_items)
    order = np.random.default_rng([_EVEN_STREAM, checked_seed(seed)]).permutation(num_items)
    length = num_items // n
    return order[: length * n].reshape(n, length)


def dirichlet(labels: ArrayLike, num_workers: int, *, alpha: float, seed: int) -> Indices:
    """Deal items to workers whose class mixes are drawn from Dirichlet(alpha * class frequencies).

    When a class has run out, its share of the mix goes to the classes that are left in proportion to their shares,
    which is again a draw from the Dirichlet distribution over these classes. So each item is used once.

    Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
    2019, arXiv 1909.06335, section 3.

    Args:
        labels: the class of each item, integers [N]: a list, an array or a tensor.
        num_workers: n.
        alpha: the concentration, above 0. With 0.1 a worker has one or two large classes of ten, with 1 its classes
            differ by factors, with 100 parts are nearly alike.
        seed: an integer of at least 0, equal on all ranks.

    Returns:
        The items of each worker, int64 [n, N // n].

    Raises:
        ValueError: alpha is not positive and finite, labels are not integers [N], there are fewer items than workers,
            or a number is out of range.

    >>> dirichlet([0, 0, 0, 1, 1, 1], 2, alpha=0.1, seed=0).shape
    (2, 3)
    """
    if not 0 < alpha < math.inf:
        raise ValueError(f"got alpha={alpha}, expected a positive number; even() makes parts that are alike")
    classes = _checked_labels(labels)
    n = _checked_workers(num_workers, len(classes))
    generator = np.random.default_rng([_EVEN_STREAM, checked_seed(seed)])
    pools = [generator.permutation(np.flatnonzero(classes == label)) for label in np.unique(classes)]
    length = len(classes) // n
    concentration = alpha * len(pools) * np.array([len(pool) for pool in pools]) / len(classes)
    parts = np.empty((n, length), dtype=np.int64)
    for part in parts:
        log_mix = _log_dirichlet(concentration, generator)
        position = 0
        while position < length:
            left = np.array([len(pool) for pool in pools])
            log_open = np.where(left > 0, log_mix, -math.inf)
            mix = np.exp(log_open - log_open.max())
            counts = np.minimum(generator.multinomial(length - position, mix / mix.sum()), left)
            for label in np.flatnonzero(counts):
                part[position : position + counts[label]] = pools[label][: counts[label]]
                pools[label] = pools[label][counts[label] :]
                position += counts[label]
    return parts


def shards(labels: ArrayLike, num_workers: int, *, seed: int, shards_per_worker: int = 2) -> Indices:
    """Sort items by class, cut them into equal shards, and deal k shards to each worker at random.

    With classes of equal size, and at least as many shards as classes, a shard has one class or two. So a worker has
    about k classes.

    McMahan, Moore, Ramage, Hampson, Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    AISTATS 2017, arXiv 1602.05629, section 3, where k is 2.

    Args:
        labels: the class of each item, integers [N]: a list, an array or a tensor.
        num_workers: n.
        seed: an integer of at least 0, equal on all ranks.
        shards_per_worker: k.

    Returns:
        The items of each worker, shard after shard, int64 [n, k (N // nk)].

    Raises:
        ValueError: labels are not integers [N], there are fewer items than shards, or a number is out of range.

    >>> sorted(shards([0, 0, 1, 1], 2, seed=0, shards_per_worker=1).tolist())
    [[0, 1], [2, 3]]
    """
    classes = _checked_labels(labels)
    per_worker = checked_integer("shards_per_worker", shards_per_worker, 1, "2 is usual")
    n = _checked_workers(num_workers, len(classes) // per_worker, what=f"{per_worker} shards of items for each worker")
    generator = np.random.default_rng(checked_seed(seed))
    order = generator.permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    length = len(classes) // (n * per_worker)
    pieces = generator.permutation(order[: length * n * per_worker].reshape(n * per_worker, length))
    return pieces.reshape(n, per_worker * length)


def noisy_labels(labels: ArrayLike, parts: ArrayLike, *, rates: float | Sequence[float], seed: int) -> Indices:
    """Replace a share of each worker's labels by other classes, drawn uniformly (symmetric label noise).

    The noise of a worker depends on the seed and the worker only, so other rates of other workers do not change it.

    Args:
        labels: the class of each item, integers [N]: a list, an array or a tensor.
        parts: the items of each worker, integers [n, length], from another function of this module.
        rates: the probability that a label is replaced, 0 to 1: a number, or one for each worker.
        seed: an integer of at least 0, equal on all ranks.

    Returns:
        The label of each item of `parts`, int64 [n, length].

    Raises:
        ValueError: a rate is out of range, there are not as many rates as workers, labels are of one class, or parts
            are not indices of labels.

    >>> noisy_labels([0, 0, 1, 1], [[0, 1], [2, 3]], rates=[0.0, 1.0], seed=0).tolist()
    [[0, 0], [0, 0]]
    """
    classes = _checked_labels(labels)
    items = np.asarray(parts)
    is_whole = items.ndim == 2 and np.issubdtype(items.dtype, np.integer)
    if not is_whole or (items.size and not 0 <= items.min() <= items.max() < len(classes)):
        raise ValueError(
            f"got parts of shape {items.shape} and dtype {items.dtype}, expected indices of the {len(classes)} labels, "
            "a row for each worker; pass the result of dirichlet(), shards() or even()"
        )
    shares = np.full(len(items), rates) if np.ndim(rates) == 0 else np.asarray(rates, dtype=np.float64)
    if shares.shape != (len(items),) or not ((shares >= 0) & (shares <= 1)).all():
        raise ValueError(
            f"got rates={rates!r} for {len(items)} workers, expected a probability, or one for each worker; pass e.g. "
            "rates=0.2"
        )
    names = np.unique(classes)
    if len(names) < 2:
        raise ValueError("got labels of one class, expected at least two: a wrong label is one of another class")
    noisy = np.array(classes[items])
    for worker, (row, share) in enumerate(zip(noisy, shares, strict=True)):
        generator = np.random.default_rng([_LABEL_STREAM, checked_seed(seed), worker])
        is_wrong = generator.random(len(row)) < share
        moved = np.searchsorted(names, row) + generator.integers(1, len(names), len(row))
        row[is_wrong] = names[moved % len(names)][is_wrong]
    return noisy


def _log_dirichlet(concentration: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the logarithm of a draw from Dirichlet(concentration), up to a constant: float64, as long as the argument.

    A Gamma(a) variable is a Gamma(a + 1) one times U^(1/a), U uniform (Marsaglia and Tsang, "A Simple Method for
    Generating Gamma Variables", 2000, section 6). In logarithms a small `a` keeps the order of the shares; as numbers
    all of them would be zero.
    """
    # Below 1e-300 the quotient overflows, and the mix has long been a single class.
    a = np.maximum(concentration, 1e-300)
    return np.log(generator.standard_gamma(a + 1)) + np.log(1 - generator.random(len(a))) / a


def _checked_labels(labels: ArrayLike) -> Indices:
    """Return the labels as int64 [N]; raises ValueError if they are not."""
    found = np.asarray(labels)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(
            f"got labels of shape {found.shape} and dtype {found.dtype}, expected the class of each item, integers "
            "[N]; pass e.g. dataset.targets, or number the classes by np.unique(names, return_inverse=True)[1]"
        )
    return found.astype(np.int64)


def _checked_workers(num_workers: int, most: int, *, what: str = "an item for each worker") -> int:
    """Return the number of workers; raises ValueError if it is not 1 to `most`."""
    n = checked_integer("num_workers", num_workers, 1, "give the number of ranks")
    if n > most:
        raise ValueError(f"got num_workers={n}, expected at most {most}: {what}; add data, or take fewer workers")
    return n

"""Shards: which items of a training set belong to which rank, even or uneven in their classes."""

from __future__ import annotations

import math

import numpy as np

SHARD_STREAM = 1
"""First word of the seed; the tasks draw from other streams of the same seed."""


def iid_shards(num_items: int, world_size: int, *, seed: int) -> np.ndarray:
    """A random partition into shards of equal length: int64 [world_size, num_items // world_size]."""
    order = np.random.default_rng([SHARD_STREAM, seed]).permutation(num_items)
    length = num_items // world_size
    return order[: length * world_size].reshape(world_size, length)


def dirichlet_shards(labels: np.ndarray, world_size: int, *, alpha: float, seed: int) -> np.ndarray:
    """Shards of equal length whose class mixes are drawn from Dirichlet(alpha * class frequencies).

    Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
    2019, arXiv 1909.06335, section 3. When a class has run out, its share of the mix goes to the classes that are left
    in proportion to theirs, which is again a draw from the Dirichlet distribution over those: every item is used once.

    Args:
        labels: class of every item, an image or a block of text, int64 [N].
        world_size: number of shards.
        alpha: concentration, > 0; the smaller, the fewer classes a rank sees.
        seed: the same on every rank.

    Returns:
        Indices, int64 [world_size, N // world_size].

    Raises:
        ValueError: alpha is not positive and finite.
    """
    if not 0 < alpha < math.inf:
        raise ValueError(f"got alpha={alpha}, expected a positive number; iid_shards makes even shards")
    generator = np.random.default_rng([SHARD_STREAM, seed])
    pools = [generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    length = len(labels) // world_size
    concentration = alpha * len(pools) * np.array([len(pool) for pool in pools]) / len(labels)
    shards = np.empty((world_size, length), dtype=np.int64)
    for shard in shards:
        log_mix = log_dirichlet(concentration, generator)
        position = 0
        while position < length:
            left = np.array([len(pool) for pool in pools])
            log_open = np.where(left > 0, log_mix, -math.inf)
            mix = np.exp(log_open - log_open.max())
            counts = np.minimum(generator.multinomial(length - position, mix / mix.sum()), left)
            for label in np.flatnonzero(counts):
                shard[position : position + counts[label]] = pools[label][: counts[label]]
                pools[label] = pools[label][counts[label] :]
                position += counts[label]
    return shards


def log_dirichlet(concentration: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The logarithm of a draw from Dirichlet(concentration), up to a constant: float64, as long as `concentration`.

    A Gamma(a) variable is a Gamma(a + 1) one times U^(1/a), U uniform (Marsaglia and Tsang, "A Simple Method for
    Generating Gamma Variables", 2000, section 6). In logarithms a small `a` keeps the order of the shares; as numbers
    all of them would be zero.
    """
    # Below 1e-300 the quotient overflows, and the mix has long been a single class.
    a = np.maximum(concentration, 1e-300)
    return np.log(generator.standard_gamma(a + 1)) + np.log(1 - generator.random(len(a))) / a

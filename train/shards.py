"""Shards: which training images belong to which rank, even or uneven in their classes."""

from __future__ import annotations

import numpy as np

SHARD_STREAM = 1
"""First word of the seed; train/data.py draws from other streams of the same seed."""


def iid_shards(num_images: int, world_size: int, *, seed: int) -> np.ndarray:
    """A random partition into shards of equal length: int64 [world_size, num_images // world_size]."""
    order = np.random.default_rng([SHARD_STREAM, seed]).permutation(num_images)
    length = num_images // world_size
    return order[: length * world_size].reshape(world_size, length)


def dirichlet_shards(labels: np.ndarray, world_size: int, *, alpha: float, seed: int) -> np.ndarray:
    """Shards of equal length whose class mixes are drawn from Dirichlet(alpha * class frequencies).

    Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
    2019, arXiv 1909.06335, section 3. A class that has run out is left out of the mixes that follow, so that every
    image is used once.

    Args:
        labels: class of every image, int64 [N].
        world_size: number of shards.
        alpha: concentration, > 0; the smaller, the fewer classes a rank sees.
        seed: the same on every rank.

    Returns:
        Indices, int64 [world_size, N // world_size].
    """
    generator = np.random.default_rng([SHARD_STREAM, seed])
    pools = [generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    length = len(labels) // world_size
    concentration = alpha * len(pools) * np.array([len(pool) for pool in pools]) / len(labels)
    shards = np.empty((world_size, length), dtype=np.int64)
    for shard in shards:
        mix = generator.dirichlet(concentration)
        position = 0
        while position < length:
            left = np.array([len(pool) for pool in pools])
            # The tiny floor keeps the mix a distribution when all classes that it names have run out.
            open_mix = (left > 0) * (mix + 1e-12)
            counts = np.minimum(generator.multinomial(length - position, open_mix / open_mix.sum()), left)
            for label in np.flatnonzero(counts):
                shard[position : position + counts[label]] = pools[label][: counts[label]]
                pools[label] = pools[label][counts[label] :]
                position += counts[label]
    return shards

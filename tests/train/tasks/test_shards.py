"""Shards: disjoint, of equal length, and as uneven in their classes as the concentration says."""

from __future__ import annotations

import numpy as np
import pytest

from train.tasks.shards import dirichlet_shards, iid_shards, log_dirichlet

LABELS = np.repeat(np.arange(5), 40)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_shards_are_disjoint_and_of_equal_length(world_size: int) -> None:
    for shards in (iid_shards(200, world_size, seed=1), dirichlet_shards(LABELS, world_size, alpha=0.1, seed=1)):
        assert shards.shape == (world_size, 200 // world_size)
        assert len(np.unique(shards)) == shards.size


def test_dirichlet_alpha_sets_how_uneven_the_classes_are() -> None:
    def largest_share(alpha: float) -> float:
        shards = dirichlet_shards(LABELS, 4, alpha=alpha, seed=3)
        return float(np.mean([np.bincount(LABELS[shard], minlength=5).max() / len(shard) for shard in shards]))

    assert largest_share(0.05) > 0.6
    assert largest_share(1000.0) < 0.35  # 0.2 would be even
    assert np.array_equal(
        dirichlet_shards(LABELS, 4, alpha=0.1, seed=3), dirichlet_shards(LABELS, 4, alpha=0.1, seed=3)
    )


@pytest.mark.parametrize("alpha", [1e-320, 1e-100, 1e-4])
def test_dirichlet_of_tiny_alpha_gives_whole_classes(alpha: float) -> None:
    shards = dirichlet_shards(LABELS, 5, alpha=alpha, seed=3)
    assert len(np.unique(shards)) == 200
    # A shard is as long as a class: a class goes to one rank, or what is left of it to the next one that draws it.
    assert all(len(np.unique(LABELS[shard])) == 1 for shard in shards)


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    concentration = np.array([0.5, 1.0, 2.5])
    logs = np.array([log_dirichlet(concentration, np.random.default_rng([7, i])) for i in range(4000)])
    shares = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
    mean = concentration / 4
    variance = mean * (1 - mean) / 5
    assert np.allclose(shares.mean(axis=0), mean, atol=4 * np.sqrt(variance.max() / 4000))
    assert np.allclose(shares.var(axis=0), variance, rtol=0.15)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_dirichlet_refuses_alpha_that_is_not_positive(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"got alpha=.*, expected a positive number"):
        dirichlet_shards(LABELS, 4, alpha=alpha, seed=3)

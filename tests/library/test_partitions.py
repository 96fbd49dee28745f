"""Partitions: disjoint, of equal length, as uneven in their classes as asked for, and functions of the seed alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gossip_modules.partitions import Indices, _log_dirichlet, dirichlet, even, noisy_labels, shards

LABELS = np.repeat(np.arange(5), 40)
PARTITIONS: dict[str, Callable[[int, int], Indices]] = {
    "even": lambda n, seed: even(200, n, seed=seed),
    "dirichlet": lambda n, seed: dirichlet(LABELS, n, alpha=0.1, seed=seed),
    "one shard": lambda n, seed: shards(LABELS, n, seed=seed, shards_per_worker=1),
    "two shards": lambda n, seed: shards(LABELS, n, seed=seed),
}
EVERY = pytest.mark.parametrize("split", PARTITIONS.values(), ids=PARTITIONS)


@EVERY
@pytest.mark.parametrize("num_workers", [1, 3, 4])
def test_parts_are_disjoint_indices_of_equal_length(split: Callable[[int, int], Indices], num_workers: int) -> None:
    parts = split(num_workers, 1)
    assert parts.dtype == np.int64
    assert parts.shape == (num_workers, 200 // num_workers)
    assert len(np.unique(parts)) == parts.size
    assert 0 <= parts.min() <= parts.max() < 200


@EVERY
def test_parts_are_a_function_of_the_seed(split: Callable[[int, int], Indices]) -> None:
    assert np.array_equal(split(4, 3), split(4, 3))
    assert not np.array_equal(split(4, 3), split(4, 4))


@pytest.mark.parametrize(
    ("parts", "digest"),
    [
        (even(200, 4, seed=1), "96107ad6c3b8527a"),
        (dirichlet(LABELS, 4, alpha=0.1, seed=1), "22fdbab295c7cbd7"),
        (shards(LABELS, 4, seed=1), "fe60dcbdad4ee994"),
    ],
    ids=["even", "dirichlet", "shards"],
)
def test_draws_stay_as_they_are(parts: Indices, digest: str) -> None:
    """Rows of studies and checkpoints of runs depend on them; computed by the code that the studies ran with."""
    assert hashlib.sha256(parts.tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("labels", [LABELS.tolist(), LABELS.astype(np.uint8), torch.from_numpy(LABELS)])
def test_labels_are_any_integers(labels: Any) -> None:
    assert np.array_equal(dirichlet(labels, 4, alpha=0.1, seed=1), dirichlet(LABELS, 4, alpha=0.1, seed=1))
    assert np.array_equal(shards(labels, 4, seed=1), shards(LABELS, 4, seed=1))


def test_dirichlet_alpha_sets_how_uneven_the_classes_are() -> None:
    def largest_share(alpha: float) -> float:
        parts = dirichlet(LABELS, 4, alpha=alpha, seed=3)
        return float(np.mean([np.bincount(LABELS[part], minlength=5).max() / len(part) for part in parts]))

    assert largest_share(0.05) > 0.6
    assert largest_share(1000.0) < 0.35  # 0.2 would be even


@pytest.mark.parametrize("alpha", [1e-320, 1e-100, 1e-4])
def test_dirichlet_of_tiny_alpha_gives_whole_classes(alpha: float) -> None:
    parts = dirichlet(LABELS, 5, alpha=alpha, seed=3)
    assert len(np.unique(parts)) == 200
    # A part is as long as a class: a class goes to one rank, or the rest of it to the next one that draws it.
    assert all(len(np.unique(LABELS[part])) == 1 for part in parts)


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    concentration = np.array([0.5, 1.0, 2.5])
    logs = np.array([_log_dirichlet(concentration, np.random.default_rng([7, i])) for i in range(4000)])
    shares = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
    mean = concentration / 4
    variance = mean * (1 - mean) / 5
    assert np.allclose(shares.mean(axis=0), mean, atol=4 * np.sqrt(variance.max() / 4000))
    assert np.allclose(shares.var(axis=0), variance, rtol=0.15)


@pytest.mark.parametrize("per_worker", [1, 2, 4])
def test_a_worker_has_as_many_classes_as_shards(per_worker: int) -> None:
    """10 workers with k shards each: with 10 k shards of equal classes, each shard has one class."""
    parts = shards(np.repeat(np.arange(10), 40), 10, seed=2, shards_per_worker=per_worker)
    labels = np.repeat(np.arange(10), 40)[parts]
    pieces = labels.reshape(10, per_worker, -1)
    assert (pieces == pieces[:, :, :1]).all()
    assert max(len(np.unique(row)) for row in labels) <= per_worker


def test_label_noise_replaces_a_share_of_each_workers_labels_by_other_classes() -> None:
    labels = np.repeat([3, 5, 9], 2000)
    parts = even(6000, 3, seed=1)
    noisy = noisy_labels(labels, parts, rates=[0.0, 0.3, 1.0], seed=4)
    is_wrong = noisy != labels[parts]
    assert noisy.dtype == np.int64
    assert is_wrong[0].sum() == 0
    assert abs(is_wrong[1].mean() - 0.3) < 0.05  # five standard deviations
    assert is_wrong[2].all()
    assert set(np.unique(noisy)) == {3, 5, 9}
    of_fives = noisy[2][labels[parts[2]] == 5]
    assert abs((of_fives == 3).mean() - 0.5) < 0.1  # the other classes alike


def test_the_noise_of_a_worker_does_not_depend_on_other_rates() -> None:
    parts = even(200, 4, seed=1)
    alike, mixed = (noisy_labels(LABELS, parts, rates=rates, seed=1) for rates in (0.3, [0.0, 0.3, 0.9, 0.3]))
    assert np.array_equal(alike[[1, 3]], mixed[[1, 3]])
    assert not np.array_equal(alike, noisy_labels(LABELS, parts, rates=0.3, seed=2))


PARTS = even(200, 4, seed=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda a=a: dirichlet(LABELS, 4, alpha=a, seed=3), r"got alpha=.*, expected a positive number")
          for a in (0.0, -1.0, float("nan"), float("inf"))),
        (lambda: dirichlet([[0, 1]], 1, alpha=1, seed=0), r"labels of shape \(1, 2\) .*integers \[N\]; pass"),
        (lambda: shards(["cat", "dog"], 1, seed=0), r"dtype <U3, expected .* np\.unique"),
        (lambda: shards(LABELS, 3, seed=-1), r"got seed=-1, expected an integer of at least 0"),
        (lambda: shards(LABELS, 4, seed=0, shards_per_worker=0), r"got shards_per_worker=0, expected an integer of at"),
        (lambda: shards(LABELS, 4, seed=0, shards_per_worker=51), r"got num_workers=4, expected at most 3: 51 shards"),
        (lambda: even(3, 4, seed=0), r"got num_workers=4, expected at most 3: an item for each worker; add data"),
        (lambda: even(3, 0, seed=0), r"got num_workers=0, expected an integer of at least 1"),
        (lambda: noisy_labels(LABELS, [0, 1], rates=0.1, seed=0), r"got parts of shape \(2,\) .* a row for each"),
        (lambda: noisy_labels(LABELS, [[200]], rates=0.1, seed=0), r"got parts .* indices of the 200 labels"),
        (lambda: noisy_labels(LABELS, PARTS, rates=1.5, seed=0), r"got rates=1.5 for 4 workers, expected a prob"),
        (lambda: noisy_labels(LABELS, PARTS, rates=[0.1], seed=0), r"got rates=\[0.1\] for 4 workers"),
        (lambda: noisy_labels([1, 1], [[0, 1]], rates=0.1, seed=0), r"got labels of one class"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

"""Studies of CIFAR-10 at 16 pixels whose workers have different classes, or whose number is no power of two."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from benchmarks.studies.images import SmallImages
from benchmarks.studies.study import Study, StudyTask, by_compare
from gossip_modules import partitions
from gossip_modules.lab import LabPlan

SplitRule = Callable[[np.ndarray, int, int], np.ndarray]
"""Makes the shards, int64 [n, length], from the labels, the number of workers and the seed."""


SPLITS: Mapping[str, SplitRule] = {
    "alike": lambda labels, n, seed: partitions.even(len(labels), n, seed=seed),
    "alpha 1": lambda labels, n, seed: partitions.dirichlet(labels, n, alpha=1.0, seed=seed),
    "alpha 0.1": lambda labels, n, seed: partitions.dirichlet(labels, n, alpha=0.1, seed=seed),
    "1-2 classes": lambda labels, n, seed: partitions.shards(labels, n, seed=seed, shards_per_worker=1),
}
"""The ways to split the training images, by the name before the colon of a method."""
SKEWED = ("alpha 1", "alpha 0.1", "1-2 classes")


class UnevenImages(SmallImages):
    """`SmallImages` without normalisation, of which each worker has a shard.

    Args:
        batch_size: the images of a worker in a step.
    """

    shards: Tensor

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size, normalizes=False)

    def split(self, name: str, num_workers: int, seed: int) -> UnevenImages:
        """Return the task with the shards of a split; it shares the images.

        Args:
            name: of the split, in SPLITS.
            num_workers: the number of workers.
            seed: the seed of the shards.
        """
        task = copy.copy(self)
        task.shards = torch.from_numpy(SPLITS[name](self.labels.numpy(), num_workers, seed))
        return task

    def batch(self, worker: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `StudyTask`."""
        places = torch.randint(self.shards.shape[1], (self.batch_size,), generator=generator)
        chosen = self.shards[worker, places]
        return self.images[chosen], self.labels[chosen]


def on_split(study: Study, task: StudyTask, key: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """Train by `compare` on the split that the name of the method begins with; see `Study.train`."""
    assert isinstance(task, UnevenImages), "the shards are those of UnevenImages"
    name, _, _ = key["method"].partition(": ")
    return by_compare(study, task.split(name, key["workers"], seed), key, seed)


METHODS: Mapping[str, Any] = {
    "all-reduce": "ar",
    "SGP": "sgp",
    "RelaySGD": "RelaySGD()",
    "D-PSGD": "dpsgd:ring",
    "QG-DSGDm": "QGDSGDm():ring",
    "DecentLaM": "DecentLaM():ring",
    "D2": "D2():ring",
    "exact diffusion": "ExactDiffusion():ring",
    "gradient tracking": "GradientTracking():ring",
    "local SGD, 8": "LocalSGD(sync_every=8)",
}
"""SGP is on the exponential graph, RelaySGD on two binary trees, and the methods after it are on a ring."""
RING = "ring"
GRAPHS: Mapping[str, str] = {
    "all-reduce": "all workers",
    "SGP": "exponential",
    "RelaySGD": "two trees",
    "local SGD, 8": "all workers",
    **{name: RING for name, what in METHODS.items() if what.endswith(":ring")},
}
"""The graph of each method of METHODS in words."""
BATCH = 8
"""The images of a worker in a step."""
NUMBERS = (3, 5, 6, 7, 9, 12, 25)
"""The numbers of workers that are no power of two."""
PEERS = (1, 2, 4)
"""The peers of a worker in a round on `BaseGraph`."""


def on_base_graphs(workers: int) -> Mapping[str, Any]:
    """Return all-reduce, SGP on the exponential graph, and D-PSGD on `BaseGraph` with each possible number of peers."""
    base = {
        f"BaseGraph, {peers} {'peer' if peers == 1 else 'peers'}": LabPlan.of("dpsgd:base", peers_per_itr=peers)
        for peers in PEERS
        if peers < workers
    }
    return {"all-reduce": "ar", "SGP": "sgp", **base}


def most_workers(found: pd.DataFrame) -> int:
    """Return the largest number of workers with which all methods of `on_base_graphs` have ended.

    Args:
        found: of `split_ends`, with data alike.
    """
    ended = found.groupby("workers")["method"].agg(set)
    return max(workers for workers, names in ended.items() if {*on_base_graphs(workers)} <= names)


def named(methods: Mapping[str, Any], *splits: str) -> Mapping[str, Any]:
    """Return the methods on each split, by the names "split: method"."""
    return {f"{split}: {name}": what for split in splits for name, what in methods.items()}


def on_numbers(workers: int) -> Mapping[str, Any]:
    """Return the methods of `on_base_graphs` on data alike, and three on uneven data with the most workers."""
    methods = on_base_graphs(workers)
    one_peer = {name: methods[name] for name in ("all-reduce", "SGP", "BaseGraph, 1 peer")}
    return {**named(methods, "alike"), **(named(one_peer, "alpha 0.1") if workers == NUMBERS[-1] else {})}


UNEVEN: Mapping[str, Study] = {
    "uneven_data": Study(
        partial(UnevenImages, BATCH),
        lambda workers: named(METHODS, *SKEWED),
        cells=tuple((16, 800, seed) for seed in (1, 2, 3)),
        rates=(0.05, 0.1),
        tuning=0.25,
        points=2,
        train=on_split,
    ),
    "uneven_workers": Study(
        partial(UnevenImages, BATCH),
        on_numbers,
        cells=tuple((n, 400, seed) for seed in (1, 2, 3) for n in NUMBERS),
        rates=(0.05, 0.1),
        tuning=1.0,  # a quarter of so few steps does not choose the best rate of all of them
        points=2,
        train=on_split,
    ),
}
"""The studies by name."""

"""One run: a method on all ranks at once, as threads over real Gloo groups."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks.cluster.workload.image_task import SmallNetwork, SplitImages
from gossip_modules import ConsensusControl, GossipDataParallel, RingGraph, Schedule, SlowMo
from gossip_modules.testing import run_ranks

METHODS = (
    "allreduce",
    "exponential",
    "ring",
    "ring-control-4",
    "ring-control-8",
    "ring-every-4",
    "average-control-1",
    "average-within-1",
    "average-every-4",
    "slowmo-0.4",
)
TIMEOUT = timedelta(minutes=10)  # 16 ranks share a core with other work
SLOW_PERIOD = 4
"""Steps between the exact averages of SlowMo."""
KEY = ("data", "method", "seed", "ranks", "epochs", "lr", "momentum", "batch_size")
"""Columns that name a run."""


@dataclass(frozen=True)
class ControlTraining:
    """What all methods share.

    Args:
        images: folder of the arrays.
        data: their name.
        ranks: the number of ranks.
        epochs: passes over the training images.
        lr: the largest learning rate.
        momentum: of SGD.
        batch_size: images per rank and step.
    """

    images: Path
    data: str
    ranks: int
    epochs: int
    lr: float
    momentum: float
    batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of each rank."""
        return len(SplitImages(self.images, "train")) // self.ranks // self.batch_size

    def lr_at(self, step: int) -> float:
        """Warm-up over the first epoch, then a line to zero."""
        rise = (step + 1) / self.steps_per_epoch
        fall = (self.epochs * self.steps_per_epoch - step) / ((self.epochs - 1) * self.steps_per_epoch or 1)
        return self.lr * min(rise, fall, 1.0)


def arguments_of(method: str, ranks: int) -> dict[str, Any]:
    """Arguments of `GossipDataParallel`.

    Raises:
        ValueError: no method has this name.
    """
    name, _, number = method.rpartition("-")
    ring = {"graph": RingGraph(ranks, peers_per_itr=min(2, ranks - 1)), "push_sum": False}
    if method == "allreduce":
        return {"push_sum": False, "schedule": Schedule(average_every=1)}
    if method == "exponential":
        return {}
    if method == "ring":
        return ring
    if name == "ring-control":
        return {**ring, "schedule": ConsensusControl(float(number))}
    if name == "ring-every":
        return {**ring, "schedule": int(number)}
    if name == "average-control":
        return {**ring, "schedule": ConsensusControl(float(number), average_every=1)}
    if name == "average-within":
        return {**ring, "schedule": ConsensusControl(float(number), is_relative=False, average_every=1)}
    if name == "average-every":
        return {"push_sum": False, "schedule": Schedule(gossip_every=int(number), average_every=1)}
    if name == "slowmo":
        return {"algorithm": SlowMo(SLOW_PERIOD, momentum=float(number))}
    raise ValueError(f"got method {method!r}, expected one like {', '.join(METHODS)}")


def train_rank(group: dist.ProcessGroup, method: str, setting: ControlTraining, seed: int) -> dict[str, Any]:
    """Train as one rank; what it sent, and the accuracy of the averaged model on its share of the test images."""
    rank, ranks = group.rank(), group.size()
    batches = SplitImages(setting.images, "train").batches(rank, ranks, size=setting.batch_size, seed=seed)
    network = SmallNetwork(seed)
    model = GossipDataParallel(network, process_group=group, timeout=TIMEOUT, **arguments_of(method, ranks))
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr, momentum=setting.momentum, nesterov=True)
    num_steps = setting.epochs * setting.steps_per_epoch
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = setting.lr_at(step)
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    stats = model.comm_stats()
    distance = model.consensus_distance()
    test = SplitImages(setting.images, "test")
    with model.averaged(), torch.no_grad():
        shares = np.array_split(np.arange(rank, len(test), ranks), 4)
        pairs = [test.batch(share) for share in shares]
        num_correct = sum(int((model(x).argmax(dim=1) == labels).sum()) for x, labels in pairs)
    model.close()
    sent = stats["bytes_sent"] / (num_steps * 4 * SmallNetwork.NUM_PARAMETERS)
    return {"steps": num_steps, "correct": num_correct, "tested": len(test), "models": sent, **stats} | {
        "final_distance": distance
    }


def run(method: str, setting: ControlTraining, seed: int) -> dict[str, Any]:
    """Train by a method on all ranks; a row."""
    arguments_of(method, setting.ranks)  # before threads are started
    start = time.perf_counter()
    ranks = run_ranks(setting.ranks, lambda group: train_rank(group, method, setting, seed), timeout=TIMEOUT)
    first = ranks[0]
    return {
        **{name: getattr(setting, name) for name in KEY if name not in ("method", "seed")},
        "method": method,
        "steps": first["steps"],
        "accuracy": round(sum(each["correct"] for each in ranks) / first["tested"], 5),
        "models_per_step": round(sum(each["models"] for each in ranks) / len(ranks), 5),
        "rounds": first["num_rounds"],
        "averages": first.get("num_averages", ""),
        "final_distance": round(first["final_distance"], 5),
        "seconds": round(time.perf_counter() - start, 1),
    }

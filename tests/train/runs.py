"""Runs of the trainers as ranks of a process group, and their checkpoints, for several test files."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from train.job.preemption import StopRequest
from train.job.world import World
from train.run_config import RunConfig
from train.tasks.base import Task
from train.training.run import Run

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
MEASURED = {"/meters/train_seconds", "/meters/data_seconds"}
"""The leaves of a checkpoint that a process measures of itself."""

_run_numbers = itertools.count()


@contextmanager
def make_run(rank: int, world_size: int, config: RunConfig, make_task: Callable[[Any, World], Task]) -> Iterator[Run]:
    """A run of `config` as a rank of the default group; the n-th of each process shares the keys of its store.

    It draws no picture at its end, which takes a second.
    """
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    store = dist.PrefixStore(f"run_{next(_run_numbers)}", dist.distributed_c10d._get_default_store())
    world = World(rank, world_size, rank, torch.device("cpu"), "gloo", control, store)
    config, stop = config.resolved(world), StopRequest()
    run = Run(make_task(config, world), config, world, stop)
    try:
        with mock.patch("visualization.curves.draw_run"):
            yield run
    finally:
        run.close()
        stop.close()


def train_twice(
    rank: int, folder: str, world_size: int, config: RunConfig, make_task: Callable[[Any, World], Task]
) -> list[str]:
    """Train through, and again from a checkpoint in the middle of an epoch; return the leaves that differ then."""
    whole, resumed = Path(folder) / "whole", Path(folder) / "resumed"
    options: dict[str, Any] = {"epochs": 2, "keep_last": 99}
    options |= {"checkpoint_every": 2, "checkpoint_every_steps": 2, "validate_every": 2}
    for out_dir, resume in ((whole, ""), (resumed, "auto")):
        config = replace(config, out_dir=str(out_dir), resume=resume, **options)
        with make_run(rank, world_size, config, make_task) as run:
            assert run.task.steps_per_epoch > 2, "step 2 is in the middle of an epoch"
            assert run.position == (2 if resume else 0)
            assert run.train() == 0
            run.finish()
        if rank == 0 and not resume:
            middle = Path("checkpoints") / "step_00000002"
            shutil.copytree(whole / middle, resumed / middle)
        dist.barrier()
    ends = [sorted((out_dir / "checkpoints").iterdir())[-1] / f"rank_{rank:04d}.pt" for out_dir in (whole, resumed)]
    return differences(*ends)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and numbers in a checkpoint, by path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        yield name, value
    else:
        for key, item in items:
            yield from leaves(item, f"{name}/{key}")


def equal(x: Any, y: Any) -> bool:
    """Whether two leaves are the same, to the bit."""
    return torch.equal(x, y) if isinstance(x, Tensor) else bool(x == y)


def differences(one: Path, other: Path) -> list[str]:
    """The leaves that are not the same in two checkpoints, which must have the same leaves."""
    first, second = (dict(leaves(torch.load(path, weights_only=True))) for path in (one, other))
    assert first.keys() == second.keys()
    assert sum(isinstance(value, Tensor) for value in first.values()) > 20
    return [name for name, value in first.items() if not equal(value, second[name])]

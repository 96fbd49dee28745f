"""The main job as a rank of a group that is there already, without a launcher."""

from __future__ import annotations

import torch
import torch.distributed as dist

import gossip_modules as gm
from train.job.preemption import StopRequest
from train.job.world import World
from train.tasks.images.config import Config
from train.tasks.images.task import ImageTask
from train.training.run import Run


def gloo_world() -> World:
    """Collective: the default group, of Gloo, as a training run sees it."""
    control, store = dist.new_group(backend="gloo"), dist.PrefixStore("train", gm.job_store())
    assert isinstance(control, dist.ProcessGroup)
    rank = dist.get_rank()
    return World(rank, dist.get_world_size(), rank, torch.device("cpu"), "gloo", control, store)


def train(config: Config, world: World) -> None:
    """Collective: train to the end, and leave what a run leaves in its folder."""
    stop = StopRequest()
    run = Run(ImageTask(config, world), config.resolved(world), world, stop)
    try:
        assert run.train() == 0
        run.finish()
    finally:
        run.close()
        stop.close()

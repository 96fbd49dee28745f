"""One process of a run whose ranks start and end together: from its start to its exit code, or to its result."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossip_modules.transport.uncaught_errors import leave
from train.job.errors import usage_errors
from train.job.listener import NOBODY, RunListener
from train.job.preemption import StopRequest
from train.job.result import RunResult
from train.job.world import World, start_world
from train.run_config import RunConfig
from train.tasks.base import Task
from train.training.run import Run
from train.training.run_folder import require_own_folder


def run(config: RunConfig, make_task: Callable[[Any, World], Task]) -> int:
    """Run `config` in this process, one rank of a job or alone, and return its exit code.

    Args:
        config: the configuration of the run.
        make_task: makes what is learnt, given (config, world).

    Raises:
        UsageError: the run cannot be as `config` says, or all ranks agree that it must end.
    """
    # Never closed: the handlers are to outlive this function, see StopRequest.
    return run_to_result(config, make_task, make_stop=StopRequest).exit_code


def run_to_result(
    config: RunConfig,
    make_task: Callable[[Any, World], Task],
    *,
    make_stop: Callable[[], StopRequest],
    listener: RunListener = NOBODY,
) -> RunResult:
    """As `run`, and return what has come of it.

    Args:
        config, make_task: see `run`.
        make_stop: makes the request to stop early, when the data are there.
        listener: hears what is measured.
    """
    torch.set_num_threads(config.num_threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    with usage_errors():
        world = start_world(config.backend, timedelta(seconds=config.timeout_seconds))
    try:
        with usage_errors():
            # Before the data are read, which may take minutes.
            require_own_folder(config.run_dir, world, resume=config.resume, overwrite=config.overwrite)
            world.on_every_rank(lambda: config.resolved(world) and None)  # machines may differ
            config = config.resolved(world)
            task = make_task(config, world)
        try:
            with usage_errors():
                training = Run(task, config, world, make_stop(), listener=listener)
            try:
                training.train()
                training.finish()
                return training.result
            except (Exception, KeyboardInterrupt) as error:
                leave(error, threading.get_ident())  # so that the others know the reason before connections close
                raise
            finally:
                training.close()
        finally:
            task.close()
    finally:
        dist.destroy_process_group()

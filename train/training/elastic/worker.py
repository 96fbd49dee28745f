"""One process of an elastic run: from its start to its exit code."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from train.job.errors import usage_errors
from train.job.outputs import SUMMARY
from train.job.preemption import EXIT_CODE, StopRequest
from train.job.world import World, worker_world
from train.run_config import RunConfig
from train.tasks.base import Task
from train.training.elastic.run import ElasticRun


def run_elastic(config: RunConfig, make_task: Callable[[Any, World], Task]) -> int:
    """Run `config` in this process, one worker among others that come and go, and return its exit code.

    That is `EXIT_CODE` where it was told to stop, and where it cannot begin at present: the store does not answer, too
    few workers have come, or as many as the run takes. Then it may be started again later.

    Args:
        config: the configuration of the run.
        make_task: makes what is learnt, given (config, world).

    Raises:
        UsageError: the run cannot be as `config` says, or the job refuses this worker.
    """
    torch.set_num_threads(config.num_threads)
    if config.resume == "auto" and _has_ended(config):
        return 0
    with usage_errors():
        world = worker_world(timedelta(seconds=config.timeout_seconds))
    try:
        with usage_errors():
            config = config.resolved(world)
            task = make_task(config, world)
        try:
            with usage_errors():
                # Never closed: the handlers are to outlive this function, see StopRequest.
                training = ElasticRun(task, config, world, StopRequest())
        except (ConnectionError, TimeoutError) as error:  # no place, no store, too few others: not now
            print(f"this worker cannot begin: {error}", flush=True)
            return EXIT_CODE
        else:
            try:
                return training.train()
            except (ConnectionError, TimeoutError):
                if training.has_begun or not _has_ended(config):  # it may end while this worker waits to join
                    raise
                return 0
            finally:
                training.close()
        finally:
            task.close()
    finally:
        dist.destroy_process_group()


def _has_ended(config: RunConfig) -> bool:
    """Whether the run has left its results, which is said then."""
    has_ended = (config.run_dir / SUMMARY).exists()
    if has_ended:
        print(f"the run in {config.run_dir} has ended: nothing is left to do", flush=True)
    return has_ended

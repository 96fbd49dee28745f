"""Ranks as threads of one process, over real Gloo groups: experiments that need no torchrun."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT = timedelta(seconds=60)
CPU = torch.device("cpu")


def run_ranks(world_size: int, body: Callable[[dist.ProcessGroup], T], *, timeout: timedelta = TIMEOUT) -> list[T]:
    """`body(group)` in a thread per rank; the results in rank order.

    A group needs nothing of torch.distributed's global state, and lives until all ranks have ended. When a rank fails
    its connections close, so that those who wait for it end as well.

    Args:
        world_size: number of ranks.
        body: of this rank's group; torch's global random generator is shared by all ranks, so it draws from its own.
        timeout: of every wait.

    Raises:
        Exception: what the body of a rank raised first.
    """
    store = dist.HashStore()
    done = threading.Barrier(world_size)
    groups: list[dist.ProcessGroup | None] = [None] * world_size
    errors: list[Exception] = []
    results: dict[int, T] = {}

    def rank_body(rank: int) -> None:
        try:
            group = groups[rank] = _gloo_group(store, rank, world_size, timeout)
            results[rank] = body(group)
        except Exception as error:  # noqa: BLE001 - the first one is raised below, in the calling thread
            errors.append(error)
            done.abort()
            # The frames of the body hold the group, and only the end of the last reference closes its connections.
            traceback.clear_frames(error.__traceback__)
            groups[rank] = group = None
        with suppress(threading.BrokenBarrierError):  # another rank failed
            done.wait(2 * timeout.total_seconds())

    with ThreadPoolExecutor(world_size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(rank_body, rank) for rank in range(world_size)]
    for future in futures:
        future.result()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]


def _gloo_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, rank, world_size)
    backend = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group

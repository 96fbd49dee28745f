"""Ranks as threads of one process, over real Gloo groups: what most tests run on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT = timedelta(seconds=20)


def thread_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta = TIMEOUT) -> dist.ProcessGroup:
    """A Gloo group that needs nothing of torch.distributed's global state."""
    group = dist.ProcessGroup(store, rank, world_size)
    backend = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def run_ranks(world_size: int, body: Callable[[dist.ProcessGroup], T], *, timeout: timedelta = TIMEOUT) -> list[T]:
    """`body(group)` on every rank at once; the results in rank order. Raises the first rank's error.

    A rank's group lives until all ranks are done, as a process would: an early end is not a dead peer.
    """
    store = dist.HashStore()
    done = threading.Barrier(world_size)

    def rank_body(rank: int) -> T:
        torch.manual_seed(rank)
        group = thread_group(store, rank, world_size, timeout)
        try:
            return body(group)
        finally:
            done.wait(timeout.total_seconds() * 2)

    with ThreadPoolExecutor(world_size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(rank_body, rank) for rank in range(world_size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

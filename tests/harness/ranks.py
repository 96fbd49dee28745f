"""Ranks as threads of one process, over real Gloo groups: what most tests run on."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar
from weakref import WeakSet

import torch
import torch._dynamo  # now: the first training forward of a test would load it within that test's time
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT = timedelta(seconds=20)
CPU = torch.device("cpu")


def thread_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta = TIMEOUT) -> dist.ProcessGroup:
    """A Gloo group that needs nothing of torch.distributed's global state."""
    group = dist.ProcessGroup(store, rank, world_size)
    backend = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def solo_group() -> dist.ProcessGroup:
    """A world of one."""
    return thread_group(dist.HashStore(), 0, 1)


class HangUp(Exception):
    """Raised by a body: this rank's connections close, as at the end of its process, and no error is reported."""


def run_ranks(world_size: int, body: Callable[[dist.ProcessGroup], T], *, timeout: timedelta = TIMEOUT) -> list[T]:
    """`body(group)` on every rank at once; the results in rank order. Raises the error that came first.

    A rank's group lives until all threads have ended, as a process would: an early end is not a dead peer. An error
    is: its connections close, so that those who wait for it fail too. The random generators of torch are shared by
    all threads: draw from a generator of your own.
    """
    store = dist.HashStore()
    done = threading.Barrier(world_size)
    errors: list[Exception] = []
    results: dict[int, T] = {}
    groups: dict[int, dist.ProcessGroup] = {}
    # A group that goes keeps the GIL while it joins its threads, which may want it; a backend lets go of it.
    backends: dict[int, dist._Backend] = {}

    def rank_body(rank: int) -> None:
        try:
            groups[rank] = thread_group(store, rank, world_size, timeout)
            backends[rank] = groups[rank]._get_backend(CPU)
            results[rank] = body(groups[rank])
        except Exception as error:  # noqa: BLE001 (the first one is raised below, in the main thread)
            if not isinstance(error, HangUp):
                errors.append(error)  # before the others get errors for it
                done.abort()
            # The locals of the body hold the group, and only its end closes the connections.
            traceback.clear_frames(error.__traceback__)
            groups.pop(rank, None)
            gc.collect()
            backends.pop(rank, None)
        with contextlib.suppress(threading.BrokenBarrierError):  # another rank failed
            done.wait(timeout.total_seconds() * 2)

    with ThreadPoolExecutor(world_size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(rank_body, rank) for rank in range(world_size)]
    groups.clear()
    backends.clear()
    for future in futures:
        future.result()
    if errors:
        raise errors[0]
    return [results[rank] for rank in sorted(results)]


def assert_no_gossip_threads() -> None:
    """All of the library's threads end in time."""
    deadline = time.monotonic() + 1.5 * TIMEOUT.total_seconds()
    for thread in gossip_threads():
        thread.join(max(deadline - time.monotonic(), 0.0))
    assert gossip_threads() == []


_threads_of_others: WeakSet[threading.Thread] = WeakSet()


def forget_threads() -> None:
    """Leave those that are alive now out of `gossip_threads`: listeners whose peers never said goodbye stay behind."""
    _threads_of_others.update(threading.enumerate())


def gossip_threads() -> list[threading.Thread]:
    """The library's threads that are alive, of this test."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("gossip-") and thread not in _threads_of_others
    ]

"""Ranks as threads of one process, over real Gloo groups: for tests and experiments that need no launcher."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Generic, TypeVar

import torch.distributed as dist

from ..transport.gloo import CPU as CPU
from ..transport.gloo import gloo_group

T = TypeVar("T")
TIMEOUT = timedelta(seconds=20)


class HangUp(Exception):
    """Raised by a body: this rank's connections close, as at the end of its process, and no error is reported."""


def thread_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta = TIMEOUT) -> dist.ProcessGroup:
    """A Gloo group that needs nothing of torch.distributed's global state.

    Args:
        store: shared by the ranks of the group.
        rank: of the calling thread.
        world_size: the number of ranks.
        timeout: of every wait.
    """
    return gloo_group(store, rank, world_size, timeout)


def run_ranks(world_size: int, body: Callable[[dist.ProcessGroup], T], *, timeout: timedelta = TIMEOUT) -> list[T]:
    """`body(group)` on every rank at once, in a thread each; the results in rank order.

    A rank's group lives until all threads have ended, as a process would: an early end is not a dead peer. An error
    is: its connections close, so that those who wait for it fail too.

    Args:
        world_size: the number of ranks.
        body: of this rank's group. torch's global random generators are shared by all threads, so a body draws from a
            generator of its own.
        timeout: of every wait.

    Raises:
        Exception: what the body of a rank raised first.

    Example:
        >>> def body(group):
        ...     transport = ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT)
        ...     gossiper = PushPull()
        ...     gossiper.bind(MetropolisHastingsMixing(RingGraph(group.size())), transport)
        ...     return gossiper.average(torch.tensor([float(group.rank())]), num_rounds=20)
        >>> run_ranks(3, body)
    """
    return _Ranks(world_size, body, timeout).run()


class _Ranks(Generic[T]):
    """The threads of one call of `run_ranks`; each rank writes the entries of its own number only."""

    def __init__(self, world_size: int, body: Callable[[dist.ProcessGroup], T], timeout: timedelta) -> None:
        self.world_size, self.body, self.timeout = world_size, body, timeout
        self.store = dist.HashStore()
        self.done = threading.Barrier(world_size)
        self.errors: list[Exception] = []
        self.results: dict[int, T] = {}
        self.groups: dict[int, dist.ProcessGroup] = {}
        self.connected: set[int] = set()

    def run(self) -> list[T]:
        """See `run_ranks`."""
        with ThreadPoolExecutor(self.world_size, thread_name_prefix="rank") as pool:
            futures = [pool.submit(self._run_rank, rank) for rank in range(self.world_size)]
        self.groups.clear()
        for future in futures:
            future.result()
        if self.errors:
            raise self.errors[0]
        return [self.results[rank] for rank in sorted(self.results)]

    def _run_rank(self, rank: int) -> None:
        try:
            self.groups[rank] = thread_group(self.store, rank, self.world_size, self.timeout)
            self.connected.add(rank)
            self.results[rank] = self.body(self.groups[rank])
        except Exception as error:  # noqa: BLE001 - the first one is raised in `run`, in the calling thread
            if isinstance(error, HangUp):
                self._wait_until_all_connected()
            else:
                self.errors.append(error)  # before the others get errors for it
                self.done.abort()
            # The locals of the body hold the group, and only its end closes the connections.
            traceback.clear_frames(error.__traceback__)
            self.groups.pop(rank, None)
            gc.collect()
        with suppress(threading.BrokenBarrierError):  # another rank failed
            self.done.wait(self.timeout.total_seconds() * 2)

    def _wait_until_all_connected(self) -> None:
        """A rank that hangs up at once does so when nobody connects to it any more, which would fail."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while len(self.connected) < self.world_size and not self.done.broken and time.monotonic() < deadline:
            time.sleep(0.001)

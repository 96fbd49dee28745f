"""Ranks as threads of one process, over real Gloo groups: for tests and experiments without a launcher."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ..transport.gloo import CPU as CPU
from ..transport.gloo import gloo_group

T = TypeVar("T")
TIMEOUT = timedelta(seconds=20)


class HangUp(Exception):
    """Raised by a body: this rank's connections close, as at the end of its process, and no error is reported."""


def thread_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta = TIMEOUT,
    *,
    peers: Collection[int] | None = None,
) -> dist.ProcessGroup:
    """Return a Gloo group without torch.distributed's global state.

    Args:
        store: shared by the ranks of the group.
        rank: the rank of the calling thread.
        world_size: the number of ranks.
        timeout: the limit of every wait.
        peers: the ranks for messages, which saves descriptors; None: all ranks. Collectives need none of them.
    """
    return gloo_group(store, rank, world_size, timeout, peers=peers)


def run_ranks(
    world_size: int,
    body: Callable[[dist.ProcessGroup], T],
    *,
    timeout: timedelta = TIMEOUT,
    peers: Callable[[int], Collection[int] | None] = lambda rank: None,
) -> list[T]:
    """Run `body(group)` on every rank at once, in a thread each, and return the results in rank order.

    A rank's group lives until all threads have ended, as a process would: an early end is not a dead peer. After an
    error the connections of the rank close, so waiting ranks fail too.

    Args:
        world_size: the number of ranks.
        body: a function of this rank's group. torch's global random generators are shared by all threads, so a body
            draws from a generator of its own.
        timeout: the timeout of every wait.
        peers: gives the peers of a rank, see `thread_group`.

    Raises:
        Exception: the first error of a body.

    Example:
        >>> def body(group):
        ...     transport = ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT)
        ...     mixer = PushPull()
        ...     mixer.bind(MetropolisHastingsMixing(RingGraph(group.size())), transport)
        ...     return mixer.average(torch.tensor([float(group.rank())]), num_rounds=20)
        >>> run_ranks(3, body)
    """
    store, connected, done = dist.HashStore(), threading.Barrier(world_size), threading.Barrier(world_size)
    errors: list[Exception] = []
    results: dict[int, T] = {}
    groups: dict[int, dist.ProcessGroup] = {}

    def run_rank(rank: int) -> None:
        try:
            groups[rank] = thread_group(store, rank, world_size, timeout, peers=peers(rank))
            connected.wait(timeout.total_seconds())  # a rank that hangs up before others have connected fails these
            results[rank] = body(groups[rank])
        except Exception as error:  # noqa: BLE001 - the first one is raised below, in the calling thread
            if not isinstance(error, HangUp):
                errors.append(error)  # before the others get errors for it
                connected.abort()
                done.abort()
            # The locals of the body hold the group, and only its end closes the connections.
            traceback.clear_frames(error.__traceback__)
            groups.pop(rank, None)
            gc.collect()
        with suppress(threading.BrokenBarrierError):  # another rank failed
            done.wait(timeout.total_seconds() * 2)

    with ThreadPoolExecutor(world_size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run_rank, rank) for rank in range(world_size)]
    groups.clear()
    for future in futures:
        future.result()
    if errors:
        raise errors[0]
    return [results[rank] for rank in sorted(results)]

"""Gloo backends and groups that need nothing of torch.distributed's global state."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .deadlines.endable_store import EndableStore
from .ports.gloo_ports import close_ports
from .threads import CallThread

CPU = torch.device("cpu")


def gloo_backend(store: dist.Store, rank: int, world_size: int, timeout: timedelta, *, host: str | None = None) -> Any:
    """A Gloo backend, which has the methods of a process group; returns when all its ranks are connected.

    From then on its ports accept no connection: see [Note: ports of Gloo].

    [Note: groups and the interpreter's lock] In torch 2.7 the destructor of a group holds the interpreter's lock while
    it joins the threads of its backend. They may need the lock, and then it hangs. The destructor of a backend releases
    the lock, so the backend lives until its group has gone.

    [Note: late connections] A constructor that gives up frees the ends of its connections, but not the devices, whose
    thread goes on accepting. A rank that connects afterwards is handed to the end that was freed, and the process dies
    by a segmentation fault (torch 2.14). The options own the devices, and the traceback of the error holds the options,
    for as long as somebody holds the error. So the devices go before the error is raised.

    Args:
        store: shared by the ranks, for their addresses.
        rank: of the caller.
        world_size: the number of ranks.
        timeout: of connecting, and of every wait that gives none.
        host: a name or address of this machine, at which the other ranks reach it; None: those of the
            environment variable GLOO_SOCKET_IFNAME, interfaces with commas between them, or what Gloo chooses.

    Raises:
        RuntimeError: a rank does not come in time.
    """
    if isinstance(store, EndableStore):
        store.num_ranks = world_size  # [Note: all addresses at once]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    new = dist.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if host is not None:
        options._devices = [new.create_device(hostname=host)]
    elif interfaces:  # which only the constructor without options reads itself
        options._devices = [new.create_device(interface=name) for name in interfaces]
    else:
        options._devices = [new.create_default_device()]
    try:
        backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    except RuntimeError:
        options._devices = []  # see [Note: late connections]
        raise
    close_ports(store, rank, len(options._devices))
    return backend


def gloo_group(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta, *, host: str | None = None
) -> dist.ProcessGroup:
    """A process group over `gloo_backend`, which its last reference releases.

    Its own store is the one below an `EndableStore`, which answers nobody when it is not referenced any more.
    """
    kept = store.store if isinstance(store, EndableStore) else store
    group = dist.ProcessGroup(kept, rank, world_size)
    holder = [gloo_backend(store, rank, world_size, timeout, host=host)]
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, holder[0])
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    weakref.finalize(group, holder.clear).atexit = False  # [Note: groups and the interpreter's lock]
    return group


def at_once(makes: Sequence[Callable[[], Any]], *, name: str) -> list[Any]:
    """The results of functions that are called at the same time, each in a thread of its own.

    The first error among them is raised. An error holds the frames that it came through: a list of errors in one of
    these would be a cycle, which keeps all groups that were made, with their threads and descriptors, until the next
    garbage collection.

    Args:
        makes: at least one.
        name: of the threads.
    """
    replies = [CallThread(f"{name}-{i}").call(make) for i, make in enumerate(makes)]
    answers = [reply.get() for reply in replies]
    error = next((error for _, error in answers if error is not None), None)
    if error is None:
        return [result for result, _ in answers]
    answers.clear()
    try:
        raise error
    finally:
        del error

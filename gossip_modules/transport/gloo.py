"""Gloo backends and groups that need nothing of torch.distributed's global state."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .deadlines.deadline import join_at_exit
from .deadlines.endable_store import EndableStore
from .ports.gloo_ports import close_ports

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
    """What each of these returns, called in a thread of its own; raises what the first of them has raised.

    An error holds the frames that it came through. A list of errors in one of them would be a cycle, and keep all
    groups that were made, with their threads and descriptors, until somebody collects garbage.

    Args:
        makes: at least one.
        name: of the threads.
    """
    results: list[Any] = [None] * len(makes)
    errors: dict[int, BaseException] = {}

    def run(i: int, make: Callable[[], Any]) -> None:
        try:
            results[i] = make()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors[i] = error

    for thread in [in_gloo(run, i, make, name=f"{name}-{i}") for i, make in enumerate(makes)]:
        thread.join()
    if not errors:
        return results
    error = errors[min(errors)]
    results.clear()
    errors.clear()
    try:
        raise error
    finally:
        del error


def in_gloo(body: Callable[..., None], *arguments: Any, name: str) -> threading.Thread:
    """Begin a thread that makes groups, and so may wait inside C++ code for ranks that do not come.

    It is a daemon, since nothing that it waits for is to keep a program from ending. At exit its wait for addresses is
    ended first: see `EndableStore` and [Note: threads at exit].
    """
    thread = threading.Thread(target=body, args=arguments, name=name, daemon=True)
    with _starting:
        _connecting.add(thread)
        thread.start()
    return thread


def wait_for_connecting() -> None:
    """At the exit of the interpreter, when the waits of stores were ended: see `in_gloo`."""
    with _starting:
        threads = list(_connecting)
    join_at_exit(threads)


_connecting: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_starting = threading.Lock()  # no thread is in `_connecting` that has not started

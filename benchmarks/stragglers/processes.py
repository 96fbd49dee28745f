"""Ranks as real processes of this machine: started, watched, killed, and what they hand back."""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.stragglers.methods import RankContext
from gossip_modules import Progress

HOST = "127.0.0.1"
PRELOAD = (
    *("torch", "torch.distributed", "torch.nn.parallel", "gossip_modules"),
    *("sklearn.datasets", "pandas", "matplotlib.figure", "tyro"),
)
"""What the server that processes are forks of has imported, so that a start does not take seconds of both cores."""


class Processes:
    """Processes that each call `body(*args)`, and a folder for what they return.

    Args:
        folder: for results, by the name of the process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))
        self._running: dict[str, ForkServerProcess] = {}

    def start(self, name: str, body: Callable[..., Any], *args: Any) -> None:
        """Start a process; `body` is a function of a module and returns plain values and tensors."""
        process = self._context.Process(target=_main, args=(self._path(name), body, args), name=name, daemon=True)
        process.start()
        self._running[name] = process

    def kill(self, name: str) -> None:
        """End a process as a power cut would: SIGKILL, no clean-up."""
        process = self._running.pop(name)
        process.kill()
        process.join()

    def join(self, timeout: float) -> dict[str, Any]:
        """Wait until all that run have ended; their results by name.

        Raises:
            RuntimeError: one ended without a result, or not within `timeout` seconds; all others are killed.
        """
        deadline = time.monotonic() + timeout
        names = list(self._running)
        try:
            while self._running:
                sentinels = {process.sentinel: name for name, process in self._running.items()}
                ended = wait(list(sentinels), max(deadline - time.monotonic(), 0))
                if not ended:
                    raise RuntimeError(f"got {', '.join(self._running)} still running after {timeout:.0f} s")
                for sentinel in ended:
                    assert isinstance(sentinel, int)
                    name = sentinels[sentinel]
                    process = self._running.pop(name)
                    process.join()
                    if process.exitcode != 0:
                        raise RuntimeError(f"got exit code {process.exitcode} of {name}, expected 0; see its error")
        finally:
            for name in list(self._running):
                self.kill(name)
        return {name: torch.load(self._path(name), weights_only=True) for name in names}

    def _path(self, name: str) -> str:
        return str(self.folder / f"{name}.pt")


def _main(path: str, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.save(body(*args), path)


def free_addresses(num_addresses: int) -> tuple[str, ...]:
    """Addresses "tcp://host:port" of this machine where nobody listens at the moment."""
    sockets = [socket.socket() for _ in range(num_addresses)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return tuple(f"tcp://{HOST}:{each.getsockname()[1]}" for each in sockets)
    finally:
        for each in sockets:
            each.close()


def run_group(num_ranks: int, body: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
    """`body(place, *args)` on `num_ranks` processes with torch.distributed initialised; the results in rank order.

    The store is a server in this process, which does not train.

    Raises:
        RuntimeError: a rank failed, or did not end within `timeout` seconds.
    """
    addresses = free_addresses(num_ranks)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        for rank in range(num_ranks):
            processes.start(f"rank {rank}", _member, rank, num_ranks, store.port, addresses, body, args)
        results = processes.join(timeout)
    return [results[f"rank {rank}"] for rank in range(num_ranks)]


def _member(
    rank: int, num_ranks: int, port: int, addresses: tuple[str, ...], body: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    store = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    result = body(RankContext(rank, group, Progress(store), addresses), *args)
    group.barrier().wait()  # nobody's connections close while others still use them
    dist.destroy_process_group()
    return result

"""ProcessBackend: each worker is a process and gets real signals."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from ..membership.serve import shorten_lookups
from .backend import Backend, Body, Worker, asker, send, serve_again

_START_SECONDS = 60.0  # of a process
_END_SECONDS = 30.0  # of a process that has closed its pipe, or was killed
_PR_SET_PDEATHSIG = 1
# The imports of every worker; torch loads torch._dynamo in the first step of an optimizer.
_PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "gossip_modules", "gossip_modules.testing")


@dataclass(frozen=True)
class Host:
    """The machine of a process: here, the one that has started it; picklable, as processes get it.

    Args:
        address: at which others reach it.
    """

    address: str = "127.0.0.1"

    def enter(self, pipe: Connection) -> None:
        """Called by the process, before anything else, with its pipe to `ProcessBackend._admit`."""


class ProcessBackend(Backend):
    """See `Backend`. Processes are forks of one that has imported torch, so that they begin in milliseconds."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED, getattr(body, "__module__", "")])
        self._processes: dict[int, ForkServerProcess] = {}
        self._server: ForkServerProcess | None = None
        self._port = 0
        self.start_store()

    def _launch(self, rank: int, steps: list[int], mine: Connection, other: Connection) -> None:
        arguments = (self.body, rank, self.store, steps)
        self._processes[rank] = self._start_process(f"chaos-{rank}", _work, arguments, self._host(rank), mine, other)

    def _start_process(
        self,
        name: str,
        run: Callable[..., None],
        arguments: Sequence[Any],
        host: Host,
        mine: Connection,
        other: Connection,
    ) -> ForkServerProcess:
        process = self._context.Process(target=run, args=(*arguments, host, other), name=name, daemon=True)
        process.start()
        other.close()
        self._admit(host, mine)
        return process

    def _ended(self, rank: int) -> None:
        process = self._processes[rank]
        process.join(_END_SECONDS)
        if rank in self.killed or rank in self.errors:
            return
        if rank not in self.results:
            why = "without a result, expected one"
        elif process.exitcode != 0:
            why = "after its result, expected 0"
        else:
            return
        self.errors[rank] = RuntimeError(f"worker {rank}: got exit code {process.exitcode} {why}")

    def kill(self, rank: int) -> None:
        """See `Backend`."""
        self.killed.add(rank)
        self._signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """See `Backend`."""
        self._signal(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """See `Backend`."""
        self._signal(rank, signal.SIGCONT)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].pid
        if rank in self.running and pid is not None:  # the id is still its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_store(self) -> None:
        """See `Backend`."""
        if self._server is not None:
            self._server.kill()
            self._server.join(_END_SECONDS)
            self._server = None

    def start_store(self) -> None:
        """See `Backend`."""
        if self._server is not None:
            return
        host = self._host(None)
        mine, other = self._context.Pipe()
        with mine:
            self._server = self._start_process("chaos-store", _serve, (self._port,), host, mine, other)
            self._port = int(receive(mine)["port"])
        self.store = f"{host.address}:{self._port}"

    def close(self) -> None:
        """See `Backend`."""
        for rank in list(self.running):
            self.kill(rank)
            self._processes[rank].join(_END_SECONDS)
            self._pipes.pop(rank).close()
            self.running.discard(rank)
        self.kill_store()

    def _host(self, rank: int | None) -> Host:
        """The host of the process of a worker; None: of the store."""
        return Host()

    def _admit(self, host: Host, pipe: Connection) -> None:
        """Called when a process has been started: answers its `Host.enter`."""


def receive(pipe: Connection) -> dict[str, Any]:
    """The first message of a new process.

    Raises:
        TimeoutError: it sends nothing.
    """
    if not pipe.poll(_START_SECONDS):
        raise TimeoutError(f"got no answer of a process in {_START_SECONDS:g} s, expected it to start")
    return dict(json.loads(pipe.recv_bytes()))


def _begin(host: Host, pipe: Connection) -> None:
    """Linux: this process is killed with the server of forks, which ends with the process that has started it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    shorten_lookups()
    host.enter(pipe)


def _serve(port: int, host: Host, pipe: Connection) -> None:
    """The process of the store."""
    _begin(host, pipe)
    store = serve_again(port, host.address)
    send(pipe, port=store.port)
    threading.Event().wait()


def _work(body: Body, rank: int, store: str, steps: Sequence[int], host: Host, pipe: Connection) -> None:
    """The process of a worker."""
    _begin(host, pipe)
    worker = Worker(rank, store, steps, asker(pipe))
    try:
        send(pipe, result=body(worker))
    except Exception:  # noqa: BLE001 - raised by `Chaos.run`, in the process that has started this one
        send(pipe, error=traceback.format_exc())
        raise SystemExit(1) from None
    finally:
        if worker.joined is not None:  # such a process calls no `atexit` functions
            worker.joined.release()

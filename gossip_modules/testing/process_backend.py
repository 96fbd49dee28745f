"""ProcessBackend: each worker a process, which gets real signals."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from ..membership.membership import Membership
from ..membership.serve import serve, shorten_lookups
from .backend import Backend, Body
from .worker import Worker, break_off

_START_SECONDS = 60.0  # of a process
_END_SECONDS = 30.0  # of a process that has closed its connection, or was killed
_PR_SET_PDEATHSIG = 1
# What every worker needs; torch loads torch._dynamo in the first step of an optimizer.
_PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "gossip_modules", "gossip_modules.testing")


@dataclass(frozen=True)
class Host:
    """Where a process runs: here, on the machine that has started it; picklable, as processes get it.

    Args:
        address: at which others reach it.
    """

    address: str = "127.0.0.1"

    def enter(self, connection: Connection) -> None:
        """Called by the process, before anything else, with its connection to `ProcessBackend._admit`."""


class ProcessBackend(Backend):
    """See `Backend`. Processes are forks of one that has imported torch, so that they begin in milliseconds."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED, getattr(body, "__module__", "")])
        self._processes: dict[int, ForkServerProcess] = {}
        self._connections: dict[int, Connection] = {}
        self._killed: set[int] = set()
        self._server: ForkServerProcess | None = None
        self._port = 0
        self.start_store()

    def start(self, rank: int, steps: Sequence[int]) -> None:
        """See `Backend`."""
        host = self._host(rank)
        mine, other = self._context.Pipe()
        process = self._context.Process(
            target=_work,
            args=(self.body, rank, host, self.store, list(steps), other),
            name=f"chaos-{rank}",
            daemon=True,
        )
        process.start()
        other.close()
        self._admit(host, mine)
        self._processes[rank], self._connections[rank] = process, mine
        self.running.add(rank)

    def pid(self, rank: int) -> int:
        """Of the process of a worker."""
        pid = self._processes[rank].pid
        assert pid is not None, "it was started"
        return pid

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        """See `Backend`."""
        ranks = {self._connections[rank]: rank for rank in self.running}
        asking = []
        for connection in wait(list(ranks), max(seconds, 0.0)):
            assert isinstance(connection, Connection)
            rank = ranks[connection]
            try:
                message = json.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                self._ended(rank)
                continue
            if "step" in message:
                asking.append((rank, int(message["step"])))
            elif "error" in message:
                self.errors[rank] = RuntimeError(f"worker {rank} failed:\n{message['error']}")
            else:
                self.results[rank] = message["result"]
        return asking

    def _ended(self, rank: int) -> None:
        process = self._processes[rank]
        process.join(_END_SECONDS)
        self._connections.pop(rank).close()
        self.running.discard(rank)
        if rank not in self._killed and rank not in self.results:
            self.errors.setdefault(
                rank, RuntimeError(f"worker {rank}: got exit code {process.exitcode} without a result, expected one")
            )
        elif rank not in self._killed and process.exitcode != 0:
            self.errors[rank] = RuntimeError(
                f"worker {rank}: got exit code {process.exitcode} after its result, expected 0"
            )

    def go_on(self, rank: int) -> None:
        """See `Backend`."""
        with contextlib.suppress(KeyError, ConnectionError):  # it has just been killed
            self._connections[rank].send_bytes(b"{}")

    def kill(self, rank: int) -> None:
        """See `Backend`."""
        self._killed.add(rank)
        self._signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """See `Backend`."""
        self._signal(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """See `Backend`."""
        self._signal(rank, signal.SIGCONT)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        if rank in self.running:  # whose id is its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(rank), number)

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
        self._server = self._context.Process(
            target=_serve, args=(host, self._port, other), name="chaos-store", daemon=True
        )
        self._server.start()
        other.close()
        with mine:
            self._admit(host, mine)
            self._port = int(receive(mine)["port"])
        self.store = f"{host.address}:{self._port}"

    def close(self) -> None:
        """See `Backend`."""
        for rank in list(self.running):
            self.kill(rank)
            self._processes[rank].join(_END_SECONDS)
            self._connections.pop(rank).close()
            self.running.discard(rank)
        self.kill_store()

    def _host(self, rank: int | None) -> Host:
        """Of the process of a worker; None: of the store."""
        return Host()

    def _admit(self, host: Host, connection: Connection) -> None:
        """Called when a process has been started, with its connection: what its `Host.enter` waits for or sends."""


def say(connection: Connection, **message: Any) -> None:
    """Send values by name, as JSON."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """What a process that has just been started says.

    Raises:
        TimeoutError: it says nothing.
    """
    if not connection.poll(_START_SECONDS):
        raise TimeoutError(f"got no answer of a process in {_START_SECONDS:g} s, expected it to start")
    return dict(json.loads(connection.recv_bytes()))


def _end_with_parent() -> None:
    """Linux: this process is killed with the server of forks, which ends with the process that has started it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(host: Host, port: int, connection: Connection) -> None:
    """The process of the store."""
    _end_with_parent()
    shorten_lookups()
    host.enter(connection)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            store = serve(port, host=host.address)
            break
        except RuntimeError:  # the port of the one before is not free yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    say(connection, port=store.port)
    threading.Event().wait()


def _work(body: Body, rank: int, host: Host, store: str, steps: Sequence[int], connection: Connection) -> None:
    """The process of a worker."""
    _end_with_parent()
    shorten_lookups()
    host.enter(connection)

    def at_event(membership: Membership, step: int) -> None:
        say(connection, step=step)
        connection.recv_bytes()

    worker = Worker(rank, store, steps, at_event)
    try:
        say(connection, result=body(worker))
    except Exception:  # noqa: BLE001 - raised by `Chaos.run`, in the process that has started this one
        say(connection, error=traceback.format_exc())
        raise SystemExit(1) from None
    finally:
        if worker.joined is not None:  # such a process calls no `atexit` functions
            break_off(worker.joined)

"""Backend: where the workers of `Chaos` run, and how faults come to them; here as threads of this process."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import torch.distributed as dist

from ..membership.membership import Membership
from ..membership.serve import serve
from ..membership.view import Change

Body: TypeAlias = "Callable[[Worker], Any]"
_END_SECONDS = 10.0  # of a thread whose connections were closed
_BIND_SECONDS = 60.0  # in which the port of a store that has ended is free again


class Worker:
    """A worker of `Chaos`, as its training loop sees it.

    Args:
        rank: its number, in the order of their start.
        store: "host:port" of the job's store.
        steps: with events for it, or for no worker in particular.
        at_event: called with the step when training comes to one of these, or is past it.
    """

    def __init__(self, rank: int, store: str, steps: Sequence[int], at_event: Callable[[int], None]) -> None:
        self.rank, self.store = rank, store
        self._steps = sorted(steps, reverse=True)
        self._at_event = at_event
        self.joined: Membership | None = None

    def membership(self, **options: Any) -> Membership:
        """Return the membership for training; the events act on it.

        Args:
            options: of `Membership`, but for its store: `min_workers` at least.

        Raises:
            RuntimeError: the worker has one already.
        """
        if self.joined is not None:
            raise RuntimeError(
                f"got a second membership() of worker {self.rank}, expected one; give one to the wrapper"
            )
        self.joined = _ChaosMembership(self.store, at_step=self._at_step, **options)
        return self.joined

    def _at_step(self, step: int) -> None:
        is_due = bool(self._steps) and self._steps[-1] <= step
        while self._steps and self._steps[-1] <= step:
            self._steps.pop()
        if is_due:
            self._at_event(step)


class _ChaosMembership(Membership):
    """A membership that reports the begin of each training step."""

    def __init__(self, store: str, *, at_step: Callable[[int], None], **options: Any) -> None:
        super().__init__(store, **options)
        self._begins = at_step

    def at_step(self) -> Change | None:
        """See `Membership`."""
        change = super().at_step()
        if self.job.participant is not None:
            self._begins(self.job.participant.step)
        return change


class Backend(ABC):
    """Starts workers and a store, and carries out the faults of `Chaos`.

    At a step with events a worker asks, over a pipe, and waits until `go_on`. So events happen at exactly their step.
    The end of the pipe is the end of the worker.

    Args:
        body: the function of each worker.

    Attributes:
        results: by rank, the results of the bodies of ended workers.
        errors: by rank, the errors of failed workers; killed workers are in neither.
        running: ranks of the running workers.
        killed: ranks of the killed workers.
        store: "host:port" of the store.
        has_network: whether workers are hosts of their own, with delayed and lost packets and partitions.
    """

    has_network = False

    def __init__(self, body: Body) -> None:
        self.body = body
        self.results: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.running: set[int] = set()
        self.killed: set[int] = set()
        self.store = ""
        self._pipes: dict[int, Connection] = {}

    def start(self, rank: int, steps: Sequence[int]) -> None:
        """Start a worker; it asks at these steps."""
        self._pipes[rank], other = Pipe()
        self._launch(rank, list(steps), self._pipes[rank], other)
        self.running.add(rank)

    @abstractmethod
    def _launch(self, rank: int, steps: list[int], mine: Connection, other: Connection) -> None:
        """Run a worker with the other end of its pipe."""

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        """Wait until a worker asks or ends; return the asking ranks, each with its step."""
        ranks = {self._pipes[rank]: rank for rank in self.running}
        asking = []
        for pipe in wait(list(ranks), max(seconds, 0.0)):
            assert isinstance(pipe, Connection)
            rank = ranks[pipe]
            try:
                message = json.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                self._pipes.pop(rank).close()
                self.running.discard(rank)
                self._ended(rank)
                continue
            if "step" in message:
                asking.append((rank, int(message["step"])))
            elif "error" in message:
                self.errors[rank] = RuntimeError(f"worker {rank} failed:\n{message['error']}")
            else:
                self.results[rank] = message["result"]
        return asking

    @abstractmethod
    def _ended(self, rank: int) -> None:
        """A worker has closed its pipe: complete `results` and `errors`."""

    def go_on(self, rank: int) -> None:
        """Answer an asking worker."""
        with contextlib.suppress(KeyError, ConnectionError):  # it has just been killed
            send(self._pipes[rank])

    @abstractmethod
    def kill(self, rank: int) -> None:
        """End a worker."""

    @abstractmethod
    def stop(self, rank: int) -> None:
        """Have a worker stand still."""

    @abstractmethod
    def resume(self, rank: int) -> None:
        """Let a stopped worker go on."""

    @abstractmethod
    def kill_store(self) -> None:
        """End the store."""

    @abstractmethod
    def start_store(self) -> None:
        """Start the store again, empty, at its address."""

    @abstractmethod
    def close(self) -> None:
        """End everything. Idempotent."""


def send(pipe: Connection, **message: Any) -> None:
    """Send values by name, as JSON."""
    pipe.send_bytes(json.dumps(message).encode())


def asker(pipe: Connection) -> Callable[[int], None]:
    """How a worker asks at a step, and waits for the answer."""

    def ask(step: int) -> None:
        send(pipe, step=step)
        pipe.recv_bytes()

    return ask


def serve_again(port: int, host: str = "127.0.0.1") -> dist.TCPStore:
    """A store at a port that another store may have left just now; 0: any port."""
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            return serve(port, host=host)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Killed(BaseException):
    """Ends the loop of a thread's worker, as SIGKILL ends a process; no `except Exception` catches it."""


class ThreadBackend(Backend):
    """See `Backend`. A killed worker leaves its loop by an exception, after its connections were closed."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._server: dist.TCPStore | None = None
        self._port = 0
        self._threads: dict[int, _WorkerThread] = {}
        self.start_store()

    def _launch(self, rank: int, steps: list[int], mine: Connection, other: Connection) -> None:
        self._threads[rank] = _WorkerThread(self.body, rank, self.store, steps, other)
        self._threads[rank].start()

    def _ended(self, rank: int) -> None:
        thread = self._threads[rank]
        if thread.error is not None:
            self.errors[rank] = thread.error
        elif not thread.is_killed:
            self.results[rank] = thread.result

    def kill(self, rank: int) -> None:
        """See `Backend`; while the worker asks."""
        self.killed.add(rank)
        self._threads[rank].is_killed = True

    def stop(self, rank: int) -> None:
        """See `Backend`; while the worker asks."""
        self._threads[rank].may_run.clear()

    def resume(self, rank: int) -> None:
        """See `Backend`."""
        self._threads[rank].may_run.set()

    def kill_store(self) -> None:
        """See `Backend`."""
        self._server = None

    def start_store(self) -> None:
        """See `Backend`."""
        if self._server is None:
            self._server = serve_again(self._port)
            self._port = self._server.port
            self.store = f"127.0.0.1:{self._port}"

    def close(self) -> None:
        """See `Backend`. Running workers are killed at their next event, or left to their own timeouts."""
        for rank, thread in self._threads.items():
            is_stuck = rank in self.running and thread.may_run.is_set()
            if thread.is_alive():
                thread.is_killed = True
                if is_stuck and thread.worker.joined is not None:
                    thread.worker.joined.release()
                thread.may_run.set()
                self.go_on(rank)
            if not is_stuck:
                thread.join(_END_SECONDS)
        self._server = None


class _WorkerThread(threading.Thread):
    """The thread of one worker; the backend sets `may_run` and `is_killed`."""

    def __init__(self, body: Body, rank: int, store: str, steps: list[int], pipe: Connection) -> None:
        super().__init__(name=f"chaos-{rank}", daemon=True)
        self._ask = asker(pipe)
        self.worker = Worker(rank, store, steps, self._at_event)
        self.may_run = threading.Event()
        self.may_run.set()
        self.is_killed = False
        self.result: object = None
        self.error: BaseException | None = None
        self._body, self._pipe = body, pipe

    def _at_event(self, step: int) -> None:
        self._ask(step)
        membership = self.worker.joined
        assert membership is not None
        if not self.may_run.is_set():
            # As in a process that is stopped, no thread of the membership does anything: all need one of these locks.
            liveness = membership.worker.liveness
            with membership.worker.lock, contextlib.nullcontext() if liveness is None else liveness.lock:
                self.may_run.wait()
        if self.is_killed:
            membership.release()
            raise Killed

    def run(self) -> None:
        """Run the body."""
        try:
            self.result = self._body(self.worker)
        except BaseException as error:  # noqa: BLE001 - raised by `Chaos.run`, in the calling thread
            if not (isinstance(error, Killed) or self.is_killed):
                self.error = error
            if self.worker.joined is not None:
                self.worker.joined.release()
            # The locals of the body hold the wrapper, and with its end its threads end.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None if self.is_killed else error.__traceback__
            gc.collect()
        self._pipe.close()

"""ThreadBackend: workers as threads of this process; for the logic of a loop, in seconds."""

from __future__ import annotations

import gc
import queue
import threading
import time
import traceback
from collections.abc import Sequence

import torch.distributed as dist

from ..membership.membership import Membership
from ..membership.serve import serve
from .backend import Backend, Body
from .worker import Killed, Worker, break_off, standing_still

_BIND_SECONDS = 10.0  # in which the port of a store that has ended is free again


class ThreadBackend(Backend):
    """See `Backend`. A worker that is killed leaves its loop by an exception, after its connections were closed."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._server: dist.TCPStore | None = serve(0)
        self._port = self._server.port
        self.store = f"127.0.0.1:{self._port}"
        self._asking: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._threads: dict[int, _WorkerThread] = {}

    def start(self, rank: int, steps: Sequence[int]) -> None:
        """See `Backend`."""
        self._threads[rank] = _WorkerThread(self.body, rank, self.store, steps, self._asking)
        self.running.add(rank)
        self._threads[rank].start()

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        """See `Backend`."""
        asking = []
        try:
            item = self._asking.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return []
        if item is not None:
            asking.append(item)
        for rank in [rank for rank in self.running if self._threads[rank].is_over]:
            worker = self._threads[rank]
            self.running.discard(rank)
            if worker.error is not None:
                self.errors[rank] = worker.error
            elif not worker.is_killed:
                self.results[rank] = worker.result
        return asking

    def go_on(self, rank: int) -> None:
        """See `Backend`."""
        self._threads[rank].answered.set()

    def kill(self, rank: int) -> None:
        """See `Backend`; while the worker asks."""
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
        deadline = time.monotonic() + _BIND_SECONDS
        while self._server is None:
            try:
                self._server = serve(self._port)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """See `Backend`. Workers that still run are killed at their next event, or left to their own timeouts."""
        for worker in self._threads.values():
            if worker.is_alive():
                worker.is_killed = True
                if worker.worker.joined is not None and worker.may_run.is_set():
                    break_off(worker.worker.joined)
                worker.may_run.set()
                worker.answered.set()
        for rank, worker in self._threads.items():
            if rank not in self.running or not worker.may_run.is_set():
                worker.join(_BIND_SECONDS)
        self._server = None


class _WorkerThread(threading.Thread):
    """The thread of one worker; `answered`, `may_run` and `is_killed` are what the backend tells it."""

    def __init__(
        self,
        body: Body,
        rank: int,
        store: str,
        steps: Sequence[int],
        asking: queue.SimpleQueue[tuple[int, int] | None],
    ) -> None:
        super().__init__(name=f"chaos-{rank}", daemon=True)
        self.worker = Worker(rank, store, steps, self._at_event)
        self.answered, self.may_run = threading.Event(), threading.Event()
        self.may_run.set()
        self.is_killed = self.is_over = False
        self.result: object = None
        self.error: BaseException | None = None
        self._body, self._asking = body, asking

    def _at_event(self, membership: Membership, step: int) -> None:
        self._asking.put((self.worker.rank, step))
        self.answered.wait()
        self.answered.clear()
        if not self.may_run.is_set():
            with standing_still(membership):
                self.may_run.wait()
        if self.is_killed:
            break_off(membership)
            raise Killed

    def run(self) -> None:
        """The life of the worker."""
        try:
            self.result = self._body(self.worker)
        except BaseException as error:  # noqa: BLE001 - raised by `Chaos.run`, in the calling thread
            if not (isinstance(error, Killed) or self.is_killed):
                self.error = error
            if self.worker.joined is not None:
                break_off(self.worker.joined)
            # The locals of the body hold the wrapper, and with its end its threads end.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None if self.is_killed else error.__traceback__
            gc.collect()
        self.is_over = True
        self._asking.put(None)

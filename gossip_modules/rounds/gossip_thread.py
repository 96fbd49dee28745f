"""The thread that rounds run on while training computes."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeAlias

_Jobs: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], float], Future[float]] | None]"
_NUM_WAITS = 10  # of a round, at most; each of them is bounded by the timeout of the transport, and names its peer
_LOOK_SECONDS = 1.0


class GossipThread:
    """One daemon thread that runs jobs in order; a future carries the result or the exception.

    Not a ThreadPoolExecutor, whose thread keeps a failed program from ending until the last wait times out. An idle
    thread is joined on close and at interpreter exit, where a thread inside C++ code would abort the process.
    """

    def __init__(self, name: str) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        thread.start()
        self._thread = thread
        self._end = weakref.finalize(self, _end, self._jobs, thread)

    def submit(self, job: Callable[[], float], future: Future[float] | None = None) -> Future[float]:
        """Run `job` after those submitted before it.

        Args:
            job: runs once, however often it is submitted with the same future.
            future: of its result; None: a new one.

        Raises:
            RuntimeError: after `close()`, as nothing would run the job.
        """
        if not self._end.alive:
            raise RuntimeError(f"got a job for the thread {self._thread.name} after its close(), expected none")
        future = Future() if future is None else future
        self._jobs.put((job, future))
        return future

    def result(self, future: Future[float], *, what: Callable[[], str], timeout: timedelta) -> float:
        """Wait for a job that was submitted; its result, or the exception that it raised.

        Args:
            future: of `submit`.
            what: says what the job does, and the ranks that it waits for; called for the error.
            timeout: of one wait of the job.

        Raises:
            TimeoutError: the thread has ended without the job, or runs it for longer than its waits may take.
        """
        limit = _NUM_WAITS * timeout.total_seconds()
        start = time.monotonic()
        while not future.done():
            with contextlib.suppress(futures.TimeoutError):
                future.exception(_LOOK_SECONDS)
            seconds = time.monotonic() - start
            if not future.done() and (seconds > limit or not self._thread.is_alive()):
                state = "still runs it" if self._thread.is_alive() else "has ended without it"
                raise TimeoutError(
                    f"{what()} has not ended after {seconds:.1f} s: the thread {self._thread.name} {state}"
                )
        return future.result()

    def close(self) -> None:
        """No more jobs. Waits for the thread for a second at most: a job may be waiting for a peer. Idempotent."""
        self._end()


def _work(jobs: _Jobs) -> None:
    while (item := jobs.get()) is not None:
        job, future = item
        if not future.done():
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 (the future raises it in the training thread)
                future.set_exception(error)
        del item, job, future  # nothing of a finished job may stay alive until the next


def _end(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)

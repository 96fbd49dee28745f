"""GossipThread: the thread on which rounds run while training computes."""

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
_NUM_WAITS = 10  # a round has at most so many waits; each ends at the timeout of the transport and names its peer
_LOOK_SECONDS = 1.0


class GossipThread:
    """One daemon thread that runs jobs in order. A future carries the result or the exception of each job.

    This is not a ThreadPoolExecutor, whose thread keeps a failed program from ending until the last wait times out.
    `close` and the exit of the interpreter join an idle thread, because a thread that runs C++ code at exit would abort
    the process.
    """

    def __init__(self, name: str) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        thread.start()
        self._thread = thread
        self._end = weakref.finalize(self, _end, self._jobs, thread)

    def submit(self, job: Callable[[], float], future: Future[float] | None = None) -> Future[float]:
        """Run `job` after all jobs that were submitted before it.

        Args:
            job: the function to run; it runs once, even if you submit it several times with the same future.
            future: the future of the result; None: a new one.

        Raises:
            RuntimeError: the thread is closed, so nothing would run the job.
        """
        if not self._end.alive:
            raise RuntimeError(f"got a job for the thread {self._thread.name} after its close(), expected none")
        future = Future() if future is None else future
        self._jobs.put((job, future))
        return future

    def result(self, future: Future[float], *, what: Callable[[], str], timeout: timedelta) -> float:
        """Wait for a submitted job. Returns its result, or raises its exception.

        Args:
            future: the future that `submit` returned.
            what: returns a description of the job and of the ranks that it waits for; called for the error.
            timeout: the timeout of one wait of the job.

        Raises:
            TimeoutError: the thread ended without the job, or the job runs longer than its waits may take together.
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
        """End the thread after the jobs submitted so far. Waits at most a second, as a job may wait for a peer.

        Idempotent.
        """
        self._end()


def _work(jobs: _Jobs) -> None:
    while (item := jobs.get()) is not None:
        job, future = item
        if not future.done():
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 (the future raises it in the training thread)
                future.set_exception(error)
        del item, job, future  # the objects of a finished job must not stay alive until the next job


def _end(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)

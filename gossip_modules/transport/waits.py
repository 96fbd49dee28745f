"""Waits: in threads that can be left behind, since Gloo does not end every wait when a connection closes."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from .deadlines.deadline import Deadline, seconds_at_exit

_AT_ONCE = timedelta(milliseconds=1)
_TEARDOWN_SECONDS, _POLL_SECONDS = 0.5, 0.005


def as_timeout(timeout: timedelta | float, *, name: str = "timeout") -> timedelta:
    """The timeout; a number means seconds."""
    if isinstance(timeout, timedelta) and timeout > timedelta(0):
        return timeout
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (is_number and 0 < timeout < math.inf):  # type: ignore[operator]
        raise ValueError(
            f"got {name}={timeout!r}, expected more than zero seconds: a number like 30, or a timedelta; for a wait "
            "without limit give a large one, timedelta(days=1)"
        )
    return timedelta(seconds=timeout)  # type: ignore[arg-type]


def wait_for(work: dist.Work, timeout: timedelta, *, backend: str) -> None:
    """Return when the work is done, or on NCCL when the current stream is ordered after it."""
    if backend == "nccl":
        work.wait()  # the group's watchdog has the timeout
    else:
        work.wait(timeout)


class Waits:
    """Waits that another thread can end.

    [Note: waits that do not end] When a connection closes, Gloo ends the waits for messages of which nothing has moved
    yet. One that is half sent or half received is on none of the lists that it goes through, nor is one that was handed
    over while the connection was closing. Such a wait lasts for its whole timeout, whatever becomes of the connection,
    and cannot be taken back. So each wait is made by a thread of its own, which is left in it where it is given up;
    nothing comes into its buffer any more, as the connection is closed. Threads that come back wait for the next
    message. Handing a wait over takes some 20 us.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Thread] = []
        self._under_way: set[_Wait] = set()
        self._given_up: set[int | None] = set()
        self._is_closed = False
        weakref.finalize(self, _end, self._idle).atexit = False

    def wait(self, work: dist.Work, timeout: timedelta, *, of: int | None = None) -> None:
        """Return when `work` is done.

        Args:
            work: a message, or a collective, of Gloo.
            timeout: of the wait.
            of: the peer; None: a collective.

        Raises:
            RuntimeError: it has failed, was late or was given up.
        """
        with self._lock:
            is_over = self._is_closed or of in self._given_up
            if not is_over:
                thread = self._idle.pop() if self._idle else _Thread()
                wait = _Wait(self, thread, work, timeout, of)
                self._under_way.add(wait)
        if is_over:  # the connection is closed: it is done already, or never will be
            work.wait(_AT_ONCE)
            return
        thread.inbox.put(wait)
        wait.ended.acquire()
        error, wait.error = wait.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame, and whoever waits: nothing of them is to stay behind

    def give_up(self, *of: int) -> None:
        """End the waits for these peers, and those that come, with an error; from any thread.

        Their connections are closed before, so that nothing comes afterwards.
        """
        with self._lock:
            self._given_up.update(of)
            self._end({wait for wait in self._under_way if wait.of in of})

    def under_way(self) -> set[int]:
        """The peers that are waited for now."""
        with self._lock:
            return {wait.of for wait in self._under_way if wait.of is not None}

    @property
    def is_waiting(self) -> bool:
        """Whether anything is waited for now."""
        with self._lock:
            return bool(self._under_way)

    def close(self) -> None:
        """End all waits, and the threads. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._end(self._under_way)
            _end(self._idle)

    def _end(self, waits: set[_Wait]) -> None:
        """Under the lock."""
        self._under_way = self._under_way - waits
        for wait in waits:
            wait.error = RuntimeError("the wait was given up, since its connection was closed by this process")
            wait.ended.release()
            wait.thread.inbox.put(None)

    def _settle(self, wait: _Wait, error: Exception | None) -> None:
        """It has ended by itself."""
        with self._lock:
            if wait in self._under_way:
                self._under_way.remove(wait)
                self._idle.append(wait.thread)
                wait.error = error
                wait.ended.release()


class _Wait:
    """One that is under way; `ended` is released when it is not."""

    def __init__(self, waits: Waits, thread: _Thread, work: dist.Work, timeout: timedelta, of: int | None) -> None:
        self.waits, self.thread, self.work, self.timeout, self.of = waits, thread, work, timeout, of
        self.until = time.monotonic() + timeout.total_seconds()
        self.error: Exception | None = None
        self.ended = threading.Lock()
        self.ended.acquire()


class _Thread(threading.Thread):
    """Makes one wait after the other, until it is told to end."""

    def __init__(self) -> None:
        super().__init__(name="gossip-wait", daemon=True)
        self.inbox: SimpleQueue[_Wait | None] = SimpleQueue()
        self.until = 0.0  # the latest end of the wait that it is in
        _threads.add(self)
        self.start()

    def run(self) -> None:
        while (wait := self.inbox.get()) is not None:
            self.until, error = wait.until, None
            try:
                wait.work.wait(wait.timeout)
            except Exception as caught:  # noqa: BLE001 (it is for who waits)
                error = caught
            self.until = 0.0
            wait.waits._settle(wait, error)
            del wait, error


_threads: weakref.WeakSet[_Thread] = weakref.WeakSet()


def _end(idle: list[Any]) -> None:
    for thread in idle:
        thread.inbox.put(None)
    idle.clear()


@atexit.register
def _await_the_last() -> None:
    """See [Note: threads at exit]. A wait whose limit ends while the interpreter does is waited for too."""
    deadline = Deadline(seconds_at_exit())
    last = time.monotonic() + deadline.left + _TEARDOWN_SECONDS
    while any(thread.until and (thread.until < last or not deadline.is_over) for thread in list(_threads)):
        if time.monotonic() > last:
            break
        time.sleep(_POLL_SECONDS)

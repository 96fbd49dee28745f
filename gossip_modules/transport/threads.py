"""Daemon threads for waits inside C++ code; the exit of the interpreter waits for them, a second in all."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from .deadline import Deadline

T = TypeVar("T")
_EXIT_SECONDS = 1.0
_NUM_WAITS = 10  # a round has at most so many waits; each ends at the timeout of the transport and names its peer
_LOOK_SECONDS = 1.0
_Calls: TypeAlias = "SimpleQueue[tuple[Callable[[], Any], Future[Any] | None] | None]"


def start(body: Callable[..., object], *arguments: Any, name: str) -> threading.Thread:
    """Start a daemon thread for waits inside C++ code.

    [Note: threads at exit] If a thread returns from C++ code after the end of the interpreter, it aborts the process.
    So the interpreter waits for such threads, a second in all. Most of them end at once, since their connections were
    closed before. The others stay, so that the program ends.
    """
    thread = threading.Thread(target=body, args=arguments, name=name, daemon=True)
    thread.start()
    join_at_exit(thread)
    return thread


def join_at_exit(thread: threading.Thread) -> None:
    """Wait for a thread at the exit of the interpreter: see [Note: threads at exit]."""
    with _lock:
        _joined.add(thread)


class CallThread:
    """A daemon thread for calls in order. A future carries the result or the exception of each call.

    The thread of a ThreadPoolExecutor would keep a failed program from ending until the last wait times out. The thread
    ends when it is closed, when the object is collected, or at exit.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self.thread = start(_make_calls, self._calls, name=name)
        self._end = weakref.finalize(self, self._calls.put, None)
        self._end.atexit = False
        with _lock:
            _callers.add(self)

    def submit(self, call: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """Make a call after all earlier calls.

        Args:
            call: the function; it is called once, even if you submit it several times with the same future.
            future: the future of the result; None: a new one.

        Raises:
            RuntimeError: the thread is closed, so nothing would make the call.
        """
        future = Future() if future is None else future
        self._put(call, future)
        return future

    def post(self, call: Callable[[], object]) -> None:
        """As `submit`, for a call without errors that reports its end itself; a future takes longer to make."""
        self._put(call, None)

    def _put(self, call: Callable[[], object], future: Future[Any] | None) -> None:
        if not self._end.alive:
            raise RuntimeError(f"got a job for the thread {self.thread.name} after its close(), expected none")
        self._calls.put((call, future))

    def result(self, future: Future[T], *, what: Callable[[], str], timeout: timedelta) -> T:
        """Wait for a submitted call, itself in wait for peers. Returns its result, or raises its exception.

        Args:
            future: the result of `submit`.
            what: returns a description of the call and of its peers; called for the error.
            timeout: the timeout of one wait of the call.

        Raises:
            TimeoutError: the thread ended without the call, or the call runs longer than its waits may take together.
        """
        limit = _NUM_WAITS * timeout.total_seconds()
        start = time.monotonic()
        while not future.done():
            with suppress(futures.TimeoutError):
                future.exception(_LOOK_SECONDS)
            seconds = time.monotonic() - start
            if not future.done() and (seconds > limit or not self.thread.is_alive()):
                state = "still runs it" if self.thread.is_alive() else "has ended without it"
                raise TimeoutError(
                    f"{what()} has not ended after {seconds:.1f} s: the thread {self.thread.name} {state}"
                )
        return future.result()

    def end(self) -> None:
        """Let the thread end after the calls so far. Idempotent."""
        self._end()

    def close(self) -> None:
        """End the thread after the calls so far. Waits at most a second, as a call may wait for a peer. Idempotent."""
        self._end()
        if self.thread is not threading.current_thread():
            self.thread.join(_EXIT_SECONDS)


def _make_calls(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        call, future = item
        with suppress(InvalidStateError):  # nobody waits for the call any more
            try:
                if future is None:
                    call()
                elif not future.done():
                    future.set_result(call())
            except BaseException as error:  # noqa: BLE001 (the future raises it)
                if future is not None:
                    future.set_exception(error)
        del item, call, future  # the objects of a call that is over must not live until the next one


@atexit.register
def _join_all() -> None:
    with _lock:
        threads, callers = list(_joined), list(_callers)
    for caller in callers:
        caller.end()
    deadline = Deadline(_EXIT_SECONDS)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(deadline.left)


_lock = threading.Lock()
_joined: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_callers: weakref.WeakSet[CallThread] = weakref.WeakSet()

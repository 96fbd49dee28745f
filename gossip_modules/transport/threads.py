"""Daemon threads that may wait inside C++ code; the exit of the interpreter waits for them, a second in all."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

from .deadline import Deadline

_EXIT_SECONDS = 1.0

Reply: TypeAlias = "SimpleQueue[tuple[Any, BaseException | None]]"
"""Gets the result of one call, or its error."""


def start(body: Callable[..., object], *arguments: Any, name: str) -> threading.Thread:
    """Start a daemon thread that may wait inside C++ code.

    [Note: threads at exit] A thread that returns from C++ code when the interpreter has ended aborts the process. So
    the interpreter waits for such threads, a second in all. Most of them end at once, since their connections were
    closed before. The others stay, so that a program that is over ends.
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
    """A thread that makes calls one after the other. It ends when the object is collected, or at exit."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Reply] | None] = SimpleQueue()
        self.thread = start(_make_calls, self._calls, name=name)
        weakref.finalize(self, self._calls.put, None).atexit = False
        with _lock:
            _callers.add(self)

    def call(self, function: Callable[[], Any]) -> Reply:
        """Make the call after all earlier ones. `result_of` waits for the result."""
        reply: Reply = SimpleQueue()
        self._calls.put((function, reply))
        return reply

    def end(self) -> None:
        """End after the calls so far."""
        self._calls.put(None)


def result_of(reply: Reply, *, timeout: float | None = None) -> Any:
    """The result of a call; raises its error.

    Raises:
        queue.Empty: the call has not ended after `timeout` seconds.
    """
    result, error = reply.get(timeout=timeout)
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback holds this frame, and so the objects of the caller
    return result


def _make_calls(calls: SimpleQueue[tuple[Callable[[], Any], Reply] | None]) -> None:
    while (item := calls.get()) is not None:
        function, reply = item
        try:
            reply.put((function(), None))
        except BaseException as error:  # noqa: BLE001 (`result_of` raises it)
            reply.put((None, error))
        del item, function, reply  # which hold the store, or the tensors, of a call that is over


@atexit.register
def _join_all() -> None:
    with _lock:
        threads, callers = list(_joined), list(_callers)
    for caller in callers:
        caller.end()
    deadline = Deadline(_EXIT_SECONDS)
    for thread in threads:
        thread.join(deadline.left)


_lock = threading.Lock()
_joined: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_callers: weakref.WeakSet[CallThread] = weakref.WeakSet()

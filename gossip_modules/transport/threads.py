"""Daemon threads that may wait inside C++ code; the exit of the interpreter waits for them, a second in all."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch.distributed as dist

from .deadline import Deadline

_EXIT_SECONDS = 1.0
_AT_ONCE = timedelta(milliseconds=1)

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


class Waits:
    """Waits that another thread can end.

    [Note: waits that do not end] When a connection closes, Gloo ends the waits for messages that have not begun to
    move. A message that is half sent or half received is in none of the lists that it goes through, nor is a message
    that was posted while the connection was closing. A wait for such a message lasts for its whole timeout, whatever
    becomes of the connection, and cannot be interrupted. So a thread of its own makes each wait, and stays in it when
    the wait is given up; no byte is written to its buffer any more, as the connection is closed. A thread whose wait
    has ended makes the next one. Handing a wait over takes some 20 us.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[CallThread] = []
        self._under_way: dict[Reply, int | None] = {}  # and the peer
        self._given_up: set[int | None] = set()
        self._is_closed = False

    def wait(self, work: dist.Work, timeout: timedelta, *, of: int | None = None) -> None:
        """Return when `work` is done.

        Args:
            work: a message, or a collective, of Gloo.
            timeout: of the wait.
            of: the peer; None: a collective.

        Raises:
            RuntimeError: the operation has failed, was late or was given up.
        """
        with self._lock:
            is_over = self._is_closed or of in self._given_up
            if not is_over:
                thread = self._idle.pop() if self._idle else CallThread("gossip-wait")
                reply = thread.call(partial(work.wait, timeout))
                self._under_way[reply] = of
        if is_over:  # the connection is closed: the operation is done already, or never will be
            work.wait(_AT_ONCE)
            return
        _, error = reply.get()  # an interrupt leaves the wait under way
        with self._lock:
            if reply in self._under_way:
                del self._under_way[reply]
                self._idle.append(thread)
            else:  # it was given up
                thread.end()
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame, and so the caller's objects

    def give_up(self, *of: int) -> None:
        """End the waits for these peers, present and future, with an error; from any thread.

        Close their connections before, so that no byte is written to a buffer afterwards.
        """
        with self._lock:
            self._given_up.update(of)
            self._end([reply for reply, peer in self._under_way.items() if peer in of])

    def under_way(self) -> set[int]:
        """The peers that are waited for now."""
        with self._lock:
            return {peer for peer in self._under_way.values() if peer is not None}

    @property
    def is_waiting(self) -> bool:
        """Whether anything is waited for now."""
        return bool(self._under_way)

    def close(self) -> None:
        """End all waits, and the threads. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._end(list(self._under_way))
            for thread in self._idle:
                thread.end()
            self._idle.clear()

    def _end(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            del self._under_way[reply]
            reply.put((None, RuntimeError("the wait was given up, since its connection was closed by this process")))


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
        if thread is not threading.current_thread():
            thread.join(deadline.left)


_lock = threading.Lock()
_joined: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_callers: weakref.WeakSet[CallThread] = weakref.WeakSet()

"""Threads of asynchronous engines: training raises their first error, and the end of the program closes them."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from ..transport.forks import forget_in_children

_END_SECONDS = 3.0  # the time at the end of a program to close all engines


class Background:
    """Daemon threads that serve peers while training computes.

    They are daemons because a thread that waits for a message inside C++ cannot be stopped, and must not keep the
    program alive.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # around the start of a thread
        self._error: BaseException | None = None
        self._is_seen = self._is_forgotten = False
        self.on_error: weakref.WeakMethod[Callable[[BaseException], None]] | None = None  # takes the error of a thread

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Run `body` in a new daemon thread with this name. Any thread may call this method."""

        def run() -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001 (raised in the training thread)
                on_error = None if self.on_error is None else self.on_error()
                (on_error or self.fail)(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            thread.start()

    def fail(self, error: BaseException) -> None:
        """Keep `error` for the training thread, unless there is an earlier error or `forget` was called."""
        if self._error is None and not self._is_forgotten:
            self._error = error

    def raise_if_failed(self) -> None:
        """Raise the first error of a thread, if there is one, at every call."""
        if self._error is not None:
            self._is_seen = self._is_seen or threading.current_thread() not in self._threads
            raise self._error

    def raise_if_unseen(self) -> None:
        """Raise the first error of a thread if it has not been raised yet; called on close."""
        if not self._is_seen:
            self.raise_if_failed()

    def forget(self) -> None:
        """Drop the error and its traceback, and ignore later errors.

        The frames of a traceback may refer to the error itself. Such a cycle would keep their objects, such as
        connections, until the next garbage collection.
        """
        self._is_forgotten = True
        error, self._error = self._error, None
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__

    def close(self, timeout: float = 2.0) -> bool:
        """Wait at most `timeout` seconds for all threads to end; returns whether they have.

        The caller must have told the threads to end.
        """
        deadline = time.monotonic() + timeout
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in others)


class ClosableEngine(Protocol):
    """The part of an engine that this file uses."""

    @property
    def is_closed(self) -> bool: ...

    def close(self) -> None: ...


_makers: weakref.WeakKeyDictionary[ClosableEngine, tuple[threading.Thread, float]] = weakref.WeakKeyDictionary()
_closing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
for objects in (_makers, _closing):
    forget_in_children(objects)


def close_at_program_end(engine: ClosableEngine, *, seconds: float = _END_SECONDS) -> None:
    """Close the engine at the end of the program, if it is still open.

    [Note: programs that end] If a connection closes without a shutdown message, the peer assumes that the rank has
    died, and fails. So a program that ends without `close()` also sends the shutdown message. It takes a few seconds at
    most, before Python's `atexit` functions end the threads of the engine. A program that ends by an exception sends
    nothing, since its rank has failed. An engine whose thread goes on training after the main thread has ended sends
    nothing either.

    Args:
        engine: the engine to close.
        seconds: the most seconds that closing may take.
    """
    _makers[engine] = threading.current_thread(), seconds


def close_in_thread(engine: ClosableEngine) -> None:
    """Close the engine in a new thread. The end of the program waits a few seconds at most for this thread."""

    def close() -> None:
        with contextlib.suppress(Exception):  # errors of peers: no caller is left to receive them
            engine.close()

    thread = threading.Thread(target=close, name="gossip-closing", daemon=True)
    _closing.add(thread)
    thread.start()


def _close_all() -> None:
    limit = _END_SECONDS
    if getattr(sys, "last_value", None) is None:
        for engine, (maker, seconds) in tuple(_makers.items()):
            if not engine.is_closed and (maker is threading.main_thread() or not maker.is_alive()):
                close_in_thread(engine)  # all at once: a peer that does not answer keeps each of them for two seconds
                limit = max(limit, seconds)
    deadline = time.monotonic() + limit
    for thread in tuple(_closing):
        thread.join(max(deadline - time.monotonic(), 0.0))


threading._register_atexit(_close_all)  # type: ignore[attr-defined]

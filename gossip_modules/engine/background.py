"""Threads of an asynchronous engine: their first error is raised in training, and the end of a program closes them."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

_END_SECONDS = 3.0  # of a program, for all engines together


class Background:
    """Daemon threads that serve peers while training computes.

    Daemons, because a thread that waits for a message inside C++ cannot be told to end; their objects must not keep
    a program alive.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # around the start of a thread
        self._error: BaseException | None = None
        self._has_failed = threading.Event()
        self._is_seen = self._is_forgotten = False

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Run `body` in a daemon thread of that name; from any thread."""

        def run() -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001 (raised in the training thread)
                self.fail(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            thread.start()

    def fail(self, error: BaseException) -> None:
        """Keep `error` for the training thread, unless there is an earlier one, or it is not asked for any more."""
        if self._error is None and not self._is_forgotten:
            self._error = error
        self._has_failed.set()

    def wait_for_error(self, seconds: float) -> bool:
        """Wait for so long at most until a thread has failed; returns whether one has."""
        return self._has_failed.wait(seconds)

    def raise_if_failed(self) -> None:
        """Raise the error that ended a thread, if any did; from then on at every call."""
        if self._error is not None:
            self._is_seen = self._is_seen or threading.current_thread() not in self._threads
            raise self._error

    def raise_if_unseen(self) -> None:
        """Raise the error that ended a thread if it has not been raised yet: the last chance, on close."""
        if not self._is_seen:
            self.raise_if_failed()

    def forget(self) -> None:
        """Drop the error, which is not asked for any more, and the frames in which it was raised; keep no later one.

        An error whose frames hold it is in a circle: all that these frames hold, connections among it, would stay until
        garbage is collected.
        """
        self._is_forgotten = True
        error, self._error = self._error, None
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__

    def close(self, timeout: float = 2.0) -> bool:
        """Wait `timeout` seconds at most for all threads to end; returns whether they have. They must know by now."""
        deadline = time.monotonic() + timeout
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in others)


class ClosableEngine(Protocol):
    """The part of an engine that is used here."""

    @property
    def is_closed(self) -> bool: ...

    def close(self) -> None: ...


_makers: weakref.WeakKeyDictionary[ClosableEngine, tuple[threading.Thread, float]] = weakref.WeakKeyDictionary()
_closing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def close_at_program_end(engine: ClosableEngine, *, seconds: float = _END_SECONDS) -> None:
    """At the end of the program the engine closes, unless it is closed by then; it may take so many seconds.

    [Note: programs that end] A peer takes a connection that closes without a shutdown message for the death of a rank,
    and fails. So a program that ends without `close()` sends that message too, for a few seconds at most, before
    Python's `atexit` functions end the threads of the engine. A program that an exception ends sends nothing, since its
    rank has failed; nor does an engine whose thread goes on training when the main thread has ended.
    """
    _makers[engine] = threading.current_thread(), seconds


def close_in_thread(engine: ClosableEngine) -> None:
    """Close the engine in a thread of its own, for which the end of the program waits for a few seconds at most."""

    def close() -> None:
        with contextlib.suppress(Exception):  # of peers: no thread is left to tell
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

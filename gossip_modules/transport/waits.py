"""Waits for messages of Gloo that another thread can end, since a closed connection does not end all of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from .threads import CallThread, Reply

_AT_ONCE = timedelta(milliseconds=1)


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


class Waits:
    """Waits that another thread can end.

    [Note: waits that do not end] When a connection closes, Gloo ends the waits for messages of which no byte has moved
    yet. A message that is half sent or half received is in none of the lists that it goes through, nor is a message
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

"""Lifelines: connections that carry nothing, and close when the process at their other end does."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

GREETING = struct.Struct("!8sQ")  # the job, and whose listener it is
_FAREWELL = b"."
Address = tuple[str, int]


@dataclass
class _Line:
    """A connection to one worker."""

    socket: socket.socket | None  # None: there is none, or no more
    heard: bytes = b""
    closed_at: float | None = None  # without a farewell


class Lifelines:
    """A connection to the listener of each watched worker, which tells at once that its process has ended.

    [Note: forked children] The connections of Gloo are inherited by processes that are forked, such as the workers of a
    DataLoader, and stay open until the last of these has ended. Lifelines are closed in the child, so that they close
    with the parent.

    Who leaves in order says so first, and is not reported. Not thread-safe: all but `open_listener` is for the thread
    of the heartbeats.

    Args:
        selector: of that thread; the data of a key is a function of its socket.
        listener: see `open_listener`.
        greeting: that this worker's listener sends to who connects.
        job: the first eight bytes of all greetings.
        grace: seconds from the end of a connection to the report: the last message of who has ended may be on its way.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        *,
        greeting: bytes,
        job: bytes,
        grace: float,
    ) -> None:
        self._selector, self._listener = selector, listener
        self._greeting, self._job, self._grace = greeting, job, grace
        self._accepted: set[socket.socket] = set()
        self._lines: dict[int, _Line] = {}
        self.has_met = False  # whether any line was ever open
        selector.register(listener, selectors.EVENT_READ, self._accept)
        _all.add(self)

    def watch(self, peers: Mapping[int, Address]) -> None:
        """Keep lines to these workers, by worker, with the addresses of their listeners, and to no others."""
        for worker in self._lines.keys() - peers.keys():
            self._drop(self._lines.pop(worker))
        for worker in peers.keys() - self._lines.keys():
            line = self._lines[worker] = _Line(connect(peers[worker]))
            if line.socket is not None:
                self._selector.register(line.socket, selectors.EVENT_READ, self._reader(worker))

    def ended(self) -> list[int]:
        """The workers whose processes have ended; each once."""
        until = time.monotonic() - self._grace
        ended = [worker for worker, line in self._lines.items() if (line.closed_at or until + 1.0) <= until]
        for worker in ended:
            self._lines[worker].closed_at = None
        return ended

    def close(self, *, with_farewell: bool) -> None:
        """Close all; `with_farewell`: nobody is to report it."""
        for other in self._accepted:
            if with_farewell:
                with contextlib.suppress(OSError):
                    other.send(_FAREWELL)
        self.watch({})
        for held in (self._listener, *self._accepted):
            held.close()
        self._accepted = set()

    def close_in_child(self) -> None:
        """Close this process's copies; see [Note: forked children]."""
        lines = [line.socket for line in self._lines.values() if line.socket is not None]
        for held in (self._listener, *self._accepted, *lines):
            with contextlib.suppress(OSError):
                held.close()

    def _reader(self, worker: int) -> Callable[[socket.socket], None]:
        return lambda _: self._read(worker)

    def _read(self, worker: int) -> None:
        line = self._lines.get(worker)
        if line is None or line.socket is None:
            return
        try:
            data = line.socket.recv(64)
        except BlockingIOError:
            return
        except OSError:  # refused, or reset
            data = b""
        line.heard += data
        expected = GREETING.pack(self._job, worker)
        if not data and line.heard == expected:
            line.closed_at = time.monotonic()
        self.has_met = self.has_met or line.heard.startswith(expected)
        if not data or not line.heard.startswith(expected[: len(line.heard)]):
            self._drop(line)

    def _accept(self, _: socket.socket) -> None:
        with contextlib.suppress(OSError):
            other, _address = self._listener.accept()
            other.setblocking(False)
            self._accepted.add(other)
            self._selector.register(other, selectors.EVENT_READ, self._forget)
            other.send(self._greeting)

    def _forget(self, other: socket.socket) -> None:
        """Who has connected says nothing: it has gone, or is a stranger."""
        self._accepted.discard(other)
        self._selector.unregister(other)
        other.close()

    def _drop(self, line: _Line) -> None:
        if line.socket is not None:
            self._selector.unregister(line.socket)
            line.socket.close()
            line.socket = None


def open_listener() -> tuple[socket.socket, socket.socket]:
    """A socket for datagrams and one that listens, on the same port of all interfaces.

    Raises:
        OSError: there is no such port.
    """
    while True:
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(("", 0))
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind(datagrams.getsockname())
        except OSError:  # another process listens there
            datagrams.close()
            listener.close()
            continue
        listener.listen(128)
        listener.setblocking(False)
        datagrams.setblocking(False)
        return datagrams, listener


def connect(address: Address) -> socket.socket | None:
    """A connection that is on its way; None: there is no way to that address."""
    line = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    line.setblocking(False)
    try:
        line.connect(address)
    except BlockingIOError:
        pass
    except OSError:
        line.close()
        return None
    return line


_all: weakref.WeakSet[Lifelines] = weakref.WeakSet()


def _close_in_child() -> None:
    for lifelines in list(_all):
        lifelines.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)

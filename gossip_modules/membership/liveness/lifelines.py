"""Lifelines: connections that carry nothing, and close when the process at their other end does."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...transport.bounded_listener import BACKLOG, HANDSHAKE_SECONDS, MIN_CONNECTIONS, BoundedListener
from .contact import PACKET, Address, Contact, Packet, is_packet

_WELCOME, _FAREWELL = b"+", b"."


@dataclass
class _Line:
    """A connection to one worker."""

    contact: Contact
    socket: socket.socket | None  # None: there is none, or no more
    was_greeted: bool = False  # by this worker, on this connection or the one before
    heard: bytes = b""
    is_broken_off: bool = False  # after the greeting, before the welcome: another connection is made
    closed_at: float | None = None  # without a farewell


@dataclass(eq=False)
class _InboundLine:
    """A connection to the listener of this worker; see `Connection` of `BoundedListener`."""

    socket: socket.socket
    host: str
    since: float
    heard: bytes = b""
    has_asked: bool = False


class Lifelines:
    """A connection to the listener of each watched worker, which tells at once that its process has ended.

    [Note: forked children] The connections of Gloo are inherited by processes that are forked, such as the workers of a
    DataLoader, and stay open until the last of these has ended. Lifelines are closed in the child, so that they close
    with the parent.

    [Note: strangers at a listener] A listener greets each connection. A worker of the job answers with a packet that
    strangers cannot make, and is welcomed: this connection is kept. All others are bounded in number, by
    `BoundedListener`, and in time: they are closed after HANDSHAKE_SECONDS. A connection that is closed between
    greeting and welcome may have been closed for another one, so it does not say that a process has ended; the watcher
    connects again, and if the machine refuses that, the process has.

    A worker that leaves in order says so first, and is not reported. Not thread-safe: all but `open_listener` is for
    the thread of the heartbeats.

    Args:
        selector: of that thread; the data of a key is a function of its socket.
        listener: see `open_listener`.
        contact: of this worker.
        job: see `digest`.
        grace: seconds from the end of a connection to the report: the last message of a worker that has ended may be on
            its way.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        *,
        contact: Contact,
        job: bytes,
        grace: float,
    ) -> None:
        self._selector, self._job, self._grace = selector, job, grace
        self._greeting, self._expected = (contact.packet(kind, job) for kind in (Packet.GREETING, Packet.WATCH))
        self._strangers: set[_InboundLine] = set()  # not welcomed yet
        self._watchers: set[_InboundLine] = set()
        self._lines: dict[int, _Line] = {}
        self.has_met = False  # whether any worker has ever greeted this one
        self._listener: BoundedListener[_InboundLine] = BoundedListener(
            listener,
            selector,
            data=lambda _: self._listener.accept(),
            connections=self._strangers,
            max_connections=lambda: MIN_CONNECTIONS,
            admit=self._greet,
            close=self._hang_up,
        )
        _all.add(self)

    def watch(self, peers: Mapping[int, Contact]) -> None:
        """Keep lines to these workers, by worker, and to no others."""
        for worker in self._lines.keys() - peers.keys():
            self._drop(self._lines.pop(worker))
        for worker, contact in peers.items():
            before = self._lines.get(worker)
            if before is None or before.is_broken_off:
                with contextlib.suppress(OSError):  # no descriptor is left: the next call tries again
                    line = _Line(contact, connect(contact.address), was_greeted=before is not None)
                    self._lines[worker] = line
                    if line.socket is not None:
                        self._selector.register(line.socket, selectors.EVENT_READ, self._reader(worker))

    def ended(self) -> list[int]:
        """The workers whose processes have ended; each once."""
        until = time.monotonic() - self._grace
        ended = [worker for worker, line in self._lines.items() if (line.closed_at or until + 1.0) <= until]
        for worker in ended:
            self._lines[worker].closed_at = None
        return ended

    def close_expired(self) -> None:
        """Close the connections of strangers whose time is over."""
        if self._listener.is_due():
            until = time.monotonic() - HANDSHAKE_SECONDS
            for caller in [caller for caller in self._strangers if caller.since <= until]:
                self._hang_up(caller)

    def close(self, *, with_farewell: bool) -> None:
        """Close all; `with_farewell`: nobody is to report it."""
        for caller in [*self._strangers, *self._watchers]:
            if with_farewell:
                with contextlib.suppress(OSError):
                    caller.socket.send(_FAREWELL)
            self._hang_up(caller)
        self.watch({})
        self._listener.socket.close()

    def close_in_child(self) -> None:
        """Close this process's copies; see [Note: forked children]."""
        lines = [line.socket for line in self._lines.values() if line.socket is not None]
        callers = [caller.socket for caller in (*self._strangers, *self._watchers)]
        for held in (self._listener.socket, *callers, *lines):
            with contextlib.suppress(OSError):
                held.close()

    # Connections to others.

    def _reader(self, worker: int) -> Callable[[socket.socket], None]:
        return lambda _: self._read(worker)

    def _read(self, worker: int) -> None:
        line = self._lines.get(worker)
        if line is None or line.socket is None:
            return None
        try:
            data = line.socket.recv(64)
        except BlockingIOError:
            return None
        except ConnectionRefusedError:
            line.closed_at = time.monotonic() if line.was_greeted else None
            return self._drop(line)
        except OSError:  # reset, or no route
            data = b""
        had_greeting, line.heard = len(line.heard) >= PACKET.size, line.heard + data
        is_greeting, rest = (
            is_packet(line.heard, line.contact.packet(Packet.GREETING, self._job)),
            line.heard[PACKET.size :],
        )
        if is_greeting and not had_greeting:
            self.has_met = line.was_greeted = True
            with contextlib.suppress(OSError):  # it has closed: that is read next
                line.socket.send(line.contact.packet(Packet.WATCH, self._job))
        if not data:
            line.is_broken_off = bool(is_greeting) and not rest
            line.closed_at = time.monotonic() if is_greeting and rest == _WELCOME else None
        if not data or is_greeting is False or rest not in (b"", _WELCOME):
            self._drop(line)
        return None

    def _drop(self, line: _Line) -> None:
        if line.socket is not None:
            self._selector.unregister(line.socket)
            line.socket.close()
            line.socket = None

    # Connections of others.

    def _greet(self, other: socket.socket, host: str) -> None:
        caller = _InboundLine(other, host, time.monotonic())
        self._strangers.add(caller)
        self._selector.register(other, selectors.EVENT_READ, lambda _: self._hear(caller))
        with contextlib.suppress(OSError):  # it has gone: that is read next
            other.send(self._greeting)

    def _hear(self, caller: _InboundLine) -> None:
        """A caller says that it is a worker of the job, and nothing after that; or it has gone."""
        if caller not in self._strangers:
            if caller in self._watchers:
                self._hang_up(caller)
            return
        try:
            data = caller.socket.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.heard += data
        is_watcher = is_packet(caller.heard, self._expected)
        if not data or is_watcher is False or len(caller.heard) > PACKET.size:
            self._hang_up(caller)
        elif is_watcher:
            self._strangers.discard(caller)
            self._watchers.add(caller)
            caller.has_asked = True
            with contextlib.suppress(OSError):  # it has gone: that is read next
                caller.socket.send(_WELCOME)

    def _hang_up(self, caller: _InboundLine) -> None:
        self._strangers.discard(caller)
        self._watchers.discard(caller)
        self._selector.unregister(caller.socket)
        caller.socket.close()


def open_listener(host: str) -> tuple[socket.socket, socket.socket]:
    """A socket for datagrams and one that listens, on the same port of an address of this machine.

    Raises:
        OSError: `host` is no address of this machine, or there is no such port.
    """
    while True:
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            datagrams.bind((host, 0))
            with contextlib.suppress(OSError):  # another process listens there
                listener.bind(datagrams.getsockname())
                listener.listen(BACKLOG)
                listener.setblocking(False)
                datagrams.setblocking(False)
                return datagrams, listener
        except OSError:
            datagrams.close()
            listener.close()
            raise
        datagrams.close()
        listener.close()


def connect(address: Address) -> socket.socket | None:
    """A connection that is on its way; None: there is no way to that address.

    Raises:
        OSError: this process has no descriptor left.
    """
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

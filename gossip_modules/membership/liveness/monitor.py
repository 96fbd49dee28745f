"""LivenessMonitor: connections with heartbeats. They show whether a process is stopped, cut off or has ended."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import socket
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import ParamSpec

from ...transport.bounded_listener import BACKLOG, HANDSHAKE_SECONDS, MIN_CONNECTIONS, BoundedListener
from ...transport.job_key import Handshake
from ..background_log import log
from .contact import SECRET_BYTES, Contact, Greeting, connect, digest, send

P = ParamSpec("P")
_BEAT, _LEAVING = b"+", b"."
_NUM_GAPS, _MIN_GAPS = 64, 8  # of one peer that are kept, and that a deadline needs
_GRACE = 2  # intervals from the end of a connection to the report: the worker's last message may be on its way
_LATE_SELF = 4  # intervals: a worker that was late itself does not judge others
_MEETING_SECONDS = 1.0
_MAX_BYTES = 4096  # that are read at once
_JUDGE_EVERY = 8  # own heartbeats from one computation of the deadlines to the next


@dataclass(eq=False)
class _Peer:
    """A watched worker, and the connection to its listener; only the thread of `LivenessMonitor` uses `socket`."""

    contact: Contact
    greeting: Greeting  # of the present connection
    last: float  # when it was heard
    deadline: float  # seconds of silence, as of the last beat
    was_heard: bool = False
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_GAPS))
    must_connect: bool = True
    socket: socket.socket | None = None
    was_greeted: bool = False  # on this connection or one before
    latest: bytes = b""  # the last byte after the greeting
    closed_at: float | None = None  # without notice

    @property
    def due(self) -> float:
        """When it has been silent for too long, if it sends nothing until then."""
        return self.last + self.deadline if self.was_heard else math.inf


@dataclass(eq=False)
class _Inbound:
    """A connection to the listener of this worker; see `Connection` of `BoundedListener`."""

    socket: socket.socket
    host: str
    since: float
    nonce: bytes
    received: bytes = b""
    has_asked: bool = False


class LivenessMonitor:
    """Reports a watched worker if it sends no heartbeat before its deadline, or if its process has ended.

    Each worker keeps a connection to the listener of each watched worker. Over it, the watched worker sends a heartbeat
    of one byte every `interval`. A slow worker, for example during a checkpoint or an evaluation, still sends
    heartbeats, from a thread of its own. A stopped or unreachable worker does not. The deadline of a worker is the
    median of the times between its heartbeats plus six times their median absolute deviation, and at least `floor`. The
    deadline starts with the first heartbeat: before it, only the timeout of the links applies.

    The connection closes when the process ends. A worker in an orderly close announces it there, and is not reported.

    [Note: quiet reading] A thread would take part of a core from training if it woke for each heartbeat of each peer.
    So the thread reads heartbeats when it sends its own, and the kernel wakes it only for many bytes or the end of a
    connection (SO_RCVLOWAT).

    [Note: forked children] Forked processes, such as the workers of a DataLoader, inherit the connections of Gloo, and
    keep them open until the last of them has ended. The connections of the monitor are closed in the child, so they
    close with the parent.

    [Note: strangers at a listener] A listener and the worker that connects show each other that they know the secret
    of the listener's worker: see `Handshake`. The listener begins. From then on it sends heartbeats, and the connection
    is kept. Strangers cannot answer. Connections without an answer are bounded in number, by `BoundedListener`, and in
    time, by HANDSHAKE_SECONDS. If a connection closes between the hello and the first heartbeat, the listener may have
    made room for another connection. So the watcher connects again. If the machine refuses the connection, the process
    has ended.

    Args:
        worker: the id of this worker.
        job: the name of the job; packets of others are dropped.
        host: the address of this worker; it listens at this address only.
        on_silent: called once by the thread, with a worker after its deadline, and the seconds. If it is a method, the
            thread ends with its object: a freed worker must not seem alive, even without `close`.
        on_ended: called once by the thread, with a worker after the end of its process.
        interval: seconds between two heartbeats.
        floor: the shortest deadline, in seconds.
        key: the key of the job; None: it has none.

    Attributes:
        contact: the contact of this worker.
        has_met: whether a worker has ever greeted this one.
        is_leaving: whether `close` announces an orderly close.
        lock: the thread does nothing while another one holds it.
    """

    def __init__(
        self,
        worker: int,
        *,
        job: str,
        host: str,
        on_silent: Callable[[int, float], None],
        on_ended: Callable[[int], None],
        interval: float = 0.05,
        floor: float = 0.2,
        key: bytes | None = None,
    ) -> None:
        listener = socket.create_server((host, 0), backlog=BACKLOG)
        listener.setblocking(False)
        self.contact = Contact(worker, (host, listener.getsockname()[1]), secrets.token_bytes(SECRET_BYTES))
        self._job, self._key, self._interval, self._floor = digest(job), key, interval, floor
        self._handshake = self.contact.handshake(self._job, key)
        self.lock = threading.Lock()  # of `_peers`
        self._peers: dict[int, _Peer] = {}
        self._connected: set[_Peer] = set()
        self._strangers: set[_Inbound] = set()  # not welcomed yet
        self._watchers: set[_Inbound] = set()
        self._on_silent, self._on_ended = _weak(on_silent), _weak(on_ended)
        self.has_met = self.is_leaving = False
        self._selector = selectors.DefaultSelector()
        self._listener: BoundedListener[_Inbound] = BoundedListener(
            listener,
            self._selector,
            data=lambda: self._listener.accept(),
            connections=self._strangers,
            max_connections=lambda: MIN_CONNECTIONS,
            admit=self._greet,
            close=self._disconnect,
        )
        self._last_beat, self._num_beats = time.monotonic(), 0
        self._is_closed = threading.Event()
        _all.add(self)
        self._thread = threading.Thread(target=self._run, name="gossip-liveness", daemon=True)
        self._thread.start()

    def watch(self, contacts: Mapping[int, Contact]) -> None:
        """Watch these workers, by id, and no others; keeps the state of workers under watch already."""
        with self.lock:
            self._peers = {worker: self._peers.get(worker) or self._peer(of) for worker, of in contacts.items()}

    def forget(self, worker: int) -> None:
        """Watch it no more."""
        with self.lock:
            self._peers.pop(worker, None)

    def deadline(self, worker: int) -> float:
        """The deadline in seconds."""
        peer = self._peers.get(worker)
        return self._floor if peer is None else peer.deadline

    def close(self, *, is_met: bool = False) -> None:
        """End the thread and close all connections; idempotent.

        Args:
            is_met: whether to wait before, for a second at most, until the watched workers watch this worker too.
                Without a heartbeat of this worker they do not notice the end of its connection.
        """
        limit = time.monotonic() + _MEETING_SECONDS
        while is_met and len(self._watchers) < len(self._peers) and time.monotonic() < limit:
            self._is_closed.wait(self._interval / 5)
        self._is_closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def close_in_child(self) -> None:
        """Close this process's copies of all sockets; see [Note: forked children]."""
        inbound = [caller.socket for caller in (*self._strangers, *self._watchers)]
        outbound = [peer.socket for peer in self._connected if peer.socket is not None]
        for held in (self._listener.socket, *inbound, *outbound):
            with contextlib.suppress(OSError):
                held.close()

    def _peer(self, contact: Contact) -> _Peer:
        return _Peer(contact, Greeting(contact, self._job, self._key), time.monotonic(), self._deadline(()))

    def _deadline(self, gaps: deque[float] | tuple[float, ...]) -> float:
        if len(gaps) < _MIN_GAPS:
            return max(self._floor, 10 * self._interval)
        median = statistics.median(gaps)
        return max(self._floor, median + 6 * statistics.median(abs(gap - median) for gap in gaps))

    def _run(self) -> None:
        with self._selector:
            while not self._is_closed.is_set() and self._on_silent() is not None:
                try:
                    self._turn()
                except Exception:  # noqa: BLE001 (without it, this worker would seem dead, and all others alive)
                    log.exception("the liveness of a worker goes on after an error")
                    self._is_closed.wait(self._interval)
            for caller in (*self._strangers, *self._watchers):
                if self.is_leaving and caller in self._watchers:  # a code is due to the others, and nothing else
                    send(caller.socket, _LEAVING)
                self._disconnect(caller)
            for peer in tuple(self._connected):
                self._drop(peer)
        self._listener.socket.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(max(self._next_turn() - time.monotonic(), 0.0)):
            key.data()
        for peer in [peer for peer in self._connected if peer.greeting.is_whole]:
            self._read(peer)  # [Note: quiet reading]
        now = time.monotonic()
        if now - self._last_beat >= self._interval:
            late_by, self._last_beat = now - self._last_beat - self._interval, now
            self._beat(now, late_by=late_by)
        with self.lock:
            silent = {worker: now - peer.last for worker, peer in self._peers.items() if peer.due < now}
        for worker, seconds in silent.items():
            self._tell(self._on_silent, worker, seconds)

    def _next_turn(self) -> float:
        """When the next beat is due, or the deadline of a worker."""
        with self.lock:
            return min([self._last_beat + self._interval, *(peer.due for peer in self._peers.values())])

    def _tell(self, callback: Callable[[], Callable[..., None] | None], worker: int, *seconds: float) -> None:
        self.forget(worker)
        if (function := callback()) is not None:
            function(worker, *seconds)

    def _beat(self, now: float, *, late_by: float) -> None:
        with self.lock:
            peers = dict(self._peers)
            for peer in peers.values():
                if late_by > _LATE_SELF * self._interval:  # this process stood still: others may have sent meanwhile
                    peer.last = now
                if not self._num_beats % _JUDGE_EVERY:
                    peer.deadline = self._deadline(peer.gaps)
        self._num_beats += 1
        for watcher in self._watchers:
            send(watcher.socket, _BEAT)
        if self._listener.is_due():
            for caller in [caller for caller in self._strangers if caller.since <= now - HANDSHAKE_SECONDS]:
                self._disconnect(caller)
        for peer in self._connected - set(peers.values()):
            self._drop(peer)
        for peer in peers.values():
            if peer.must_connect:
                with contextlib.suppress(OSError):  # no descriptor is left: the next beat tries again
                    self._connect(peer)
        for worker, peer in peers.items():
            if peer.closed_at is not None and peer.closed_at <= now - _GRACE * self._interval:
                self._tell(self._on_ended, worker)

    # Connections to others.

    def _connect(self, peer: _Peer) -> None:
        peer.socket = connect(peer.contact.address)
        peer.must_connect, peer.greeting, peer.latest = False, Greeting(peer.contact, self._job, self._key), b""
        if peer.socket is not None:
            self._connected.add(peer)
            self._selector.register(peer.socket, selectors.EVENT_READ, partial(self._read, peer))

    def _read(self, peer: _Peer) -> None:
        if peer.socket is None:
            return
        now = time.monotonic()
        try:
            data = peer.socket.recv(_MAX_BYTES)
        except BlockingIOError:
            return
        except ConnectionRefusedError:
            peer.closed_at = now if peer.was_greeted else None
            self._drop(peer)
            return
        except OSError:  # reset, or no route
            data = b""
        greeting, was_whole = peer.greeting, peer.greeting.is_whole
        beats = greeting.take(data)
        if answer := greeting.taken():
            peer.was_greeted = True
            send(peer.socket, answer)
        if greeting.is_whole and not was_whole:
            self.has_met = True
            with contextlib.suppress(OSError):  # Windows has no such option, and wakes for each heartbeat
                peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _MAX_BYTES)
        if greeting.is_whole and beats:
            self._note_beat(peer, now)
            peer.latest = beats[-1:]
        if not data:
            peer.must_connect = greeting.has_hello and greeting.is_whole is not False and not peer.latest
            peer.closed_at = now if peer.latest == _BEAT else None
        if not data or greeting.is_whole is False or beats.strip(_BEAT + _LEAVING):
            self._drop(peer)

    def _note_beat(self, peer: _Peer, now: float) -> None:
        with self.lock:
            if peer.was_heard:
                peer.gaps.append(now - peer.last)
            peer.last, peer.was_heard = now, True

    def _drop(self, peer: _Peer) -> None:
        self._connected.discard(peer)
        if peer.socket is not None:
            self._selector.unregister(peer.socket)
            peer.socket.close()
            peer.socket = None

    # Connections of others.

    def _greet(self, other: socket.socket, host: str) -> None:
        caller = _Inbound(other, host, time.monotonic(), Handshake.hello())
        self._strangers.add(caller)
        self._selector.register(other, selectors.EVENT_READ, partial(self._receive_from, caller))
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send(other, self.contact.hello(self._job, caller.nonce))

    def _receive_from(self, caller: _Inbound) -> None:
        """A caller sends the answer to the hello, and nothing after that; or it has gone."""
        if caller not in self._strangers:
            if caller in self._watchers:
                self._disconnect(caller)
            return
        try:
            data = caller.socket.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.received += data
        is_whole = len(caller.received) == Handshake.ANSWER_BYTES
        reply = self._handshake.reply(caller.nonce, caller.received) if is_whole else None
        if reply is not None:
            self._strangers.discard(caller)
            self._watchers.add(caller)
            caller.has_asked, caller.received = True, b""
            send(caller.socket, reply + _BEAT)
        elif not data or len(caller.received) >= Handshake.ANSWER_BYTES:
            self._disconnect(caller)

    def _disconnect(self, caller: _Inbound) -> None:
        self._strangers.discard(caller)
        self._watchers.discard(caller)
        self._selector.unregister(caller.socket)
        caller.socket.close()


def _weak(function: Callable[P, None]) -> Callable[[], Callable[P, None] | None]:
    """A reference to a function; one to a method does not keep its object."""
    return weakref.WeakMethod(function) if isinstance(function, MethodType) else lambda: function


_all: weakref.WeakSet[LivenessMonitor] = weakref.WeakSet()


def _close_in_child() -> None:
    for liveness in list(_all):
        liveness.close_in_child()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_close_in_child)

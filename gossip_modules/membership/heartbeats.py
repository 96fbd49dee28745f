"""Heartbeats: small datagrams between workers, by which each knows in time that another one is stopped or cut off."""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import selectors
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import ParamSpec

from .liveness.background_log import log
from .liveness.contact import PACKET, SECRET_BYTES, Address, Contact, Packet, digest
from .liveness.lifelines import Lifelines, open_listener

P = ParamSpec("P")
_NUM_GAPS = 64
_GRACE = 2  # intervals: see `Lifelines`
_LATE_SELF = 4  # intervals: who was late itself has no opinion of others


@dataclass
class _Peer:
    """What is known of one worker."""

    contact: Contact
    packet: bytes  # its heartbeat
    last: float
    deadline: float  # seconds of silence, as of the last beat
    was_heard: bool = False
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_GAPS))

    @property
    def due(self) -> float:
        """When it is silent for too long, if it says nothing until then."""
        return self.last + self.deadline if self.was_heard else math.inf


class Heartbeats:
    """Sends a datagram to each watched worker every `interval`, and says who has been silent for too long.

    A worker that is slow (it writes a checkpoint, it evaluates) sends on, as a thread of its own does; one that is
    stopped or cut off does not. The deadline of a worker is the median of the times between its datagrams plus six
    times their median absolute deviation, and at least `floor`. Who was never heard, as where a network carries no
    UDP, is never silent: then only the timeout of the connection is left. A process that ends is noticed by its
    lifeline, without a deadline.

    A datagram counts that comes from the address of the worker, with a code that strangers cannot make: see
    [Note: secrets of workers].

    Args:
        worker: the id of this worker.
        job: the name of the job; datagrams of others are dropped.
        host: the address of this machine at which this worker is reached; it listens and sends there only.
        on_silent: called by the thread with the worker and the seconds of who has been silent for too long; once. If it
            is a method, all ends with its object: a worker that was lost without `close` is not to seem alive.
        on_ended: called by the thread with a worker whose process has ended; once.
        interval: seconds between two datagrams.
        floor: seconds of silence that are always allowed.
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
    ) -> None:
        self._socket, listener = open_listener(host)
        self.address: Address = (host, self._socket.getsockname()[1])
        self._worker, self._secret = worker, secrets.token_bytes(SECRET_BYTES)
        self._job = digest(job)
        self._packet = self.contact.packet(Packet.HEARTBEAT, self._job)
        self._interval, self._floor = interval, floor
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self._on_silent, self._on_ended = _weak(on_silent), _weak(on_ended)
        self._selector = selectors.DefaultSelector()
        self._lifelines = Lifelines(
            self._selector, listener, contact=self.contact, job=self._job, grace=_GRACE * interval
        )
        self.has_said_farewell = False
        self._last_beat = time.monotonic()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossip-heartbeats", daemon=True)
        self._thread.start()

    @property
    def contact(self) -> Contact:
        """Where others reach this worker, and how they know it."""
        return Contact(self._worker, self.address, self._secret)

    def watch(self, peers: Mapping[int, Contact]) -> None:
        """Watch these workers, by worker, and no others; what is known of them is kept."""
        with self._lock:
            self._peers = {worker: self._peers.get(worker) or self._peer(of) for worker, of in peers.items()}

    def _peer(self, contact: Contact) -> _Peer:
        packet = contact.packet(Packet.HEARTBEAT, self._job)
        return _Peer(contact, packet, time.monotonic(), self._first_deadline)

    def forget(self, peer: int) -> None:
        """Watch it no more."""
        with self._lock:
            self._peers.pop(peer, None)

    @property
    def has_met(self) -> bool:
        """Whether a lifeline to anybody was ever open."""
        return self._lifelines.has_met

    def deadline(self, peer: int) -> float:
        """The seconds of silence that are allowed."""
        with self._lock:
            known = self._peers.get(peer)
            return self._floor if known is None else self._deadline(known)

    def close(self) -> None:
        """Send no more; idempotent."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            if self._thread is not threading.current_thread():
                self._thread.join(1.0)

    @property
    def _first_deadline(self) -> float:
        return max(self._floor, 10 * self._interval)

    def _deadline(self, peer: _Peer) -> float:
        if len(peer.gaps) < 8:
            return self._first_deadline
        median = statistics.median(peer.gaps)
        mad = statistics.median(abs(gap - median) for gap in peer.gaps)
        return max(self._floor, median + 6 * mad)

    def _run(self) -> None:
        self._selector.register(self._socket, selectors.EVENT_READ, self._receive)
        with self._selector:
            while not self._is_closed.is_set() and self._on_silent() is not None:
                try:
                    self._turn()
                except Exception:  # noqa: BLE001 (without it, this worker would seem dead, and all others alive)
                    log.exception("heartbeats of a worker go on after an error")
                    self._is_closed.wait(self._interval)
            self._lifelines.close(with_farewell=self.has_said_farewell)
        self._socket.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(max(self._next_turn() - time.monotonic(), 0.0)):
            key.data(key.fileobj)
        now = time.monotonic()
        if now - self._last_beat >= self._interval:
            late_by, self._last_beat = now - self._last_beat - self._interval, now
            self._beat(now, late_by=late_by)
        self._tell_who_is_silent(now)

    def _next_turn(self) -> float:
        """When the next beat is due, or somebody's time is over."""
        with self._lock:
            return min([self._last_beat + self._interval, *(peer.due for peer in self._peers.values())])

    def _receive(self, _: object) -> None:
        now = time.monotonic()
        for _ in range(256):  # then it is time to send
            try:
                packet, source = self._socket.recvfrom(64)
            except BlockingIOError:
                return
            except OSError:  # an earlier datagram found nobody, or no way there
                continue
            if len(packet) != PACKET.size:
                continue
            _, sender, _ = PACKET.unpack(packet)
            with self._lock:
                peer = self._peers.get(sender)
                if peer is None or source != peer.contact.address or not hmac.compare_digest(packet, peer.packet):
                    continue
                if peer.was_heard:
                    peer.gaps.append(now - peer.last)
                peer.last, peer.was_heard = now, True

    def _beat(self, now: float, *, late_by: float) -> None:
        with self._lock:
            peers = dict(self._peers)
            if late_by > _LATE_SELF * self._interval:  # this process stood still: others may have spoken meanwhile
                for peer in peers.values():
                    peer.last = now
            for peer in peers.values():
                peer.deadline = self._deadline(peer)
        for peer in peers.values():
            with contextlib.suppress(OSError):  # no route, or a full buffer: as if it were lost on its way
                self._socket.sendto(self._packet, peer.contact.address)
        self._lifelines.close_expired()
        self._lifelines.watch({worker: peer.contact for worker, peer in peers.items()})
        for worker in self._lifelines.ended():
            self.forget(worker)
            on_ended = self._on_ended()
            if on_ended is not None:
                on_ended(worker)

    def _tell_who_is_silent(self, now: float) -> None:
        with self._lock:
            silent = {worker: now - peer.last for worker, peer in self._peers.items() if peer.due < now}
        for worker, seconds in silent.items():
            self.forget(worker)
            on_silent = self._on_silent()
            if on_silent is not None:
                on_silent(worker, seconds)


def _weak(function: Callable[P, None]) -> Callable[[], Callable[P, None] | None]:
    """A reference to a function; one to a method does not keep its object."""
    return weakref.WeakMethod(function) if isinstance(function, MethodType) else lambda: function

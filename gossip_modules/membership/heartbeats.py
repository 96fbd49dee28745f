"""Heartbeats: small datagrams between workers, by which each knows in time that another one is stopped or cut off."""

from __future__ import annotations

import contextlib
import hashlib
import selectors
import socket
import statistics
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_PACKET = struct.Struct("!8sQ")  # the job, and who sends
_NUM_GAPS = 64
_LATE_SELF = 4  # intervals: who was late itself has no opinion of others


@dataclass
class _Peer:
    """What is known of one worker."""

    address: tuple[str, int]
    last: float
    was_heard: bool = False
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_GAPS))


class Heartbeats:
    """Sends a datagram to each watched worker every `interval`, and says who has been silent for too long.

    A worker that is slow (it writes a checkpoint, it evaluates) sends on, as a thread of its own does; one that is
    stopped or cut off does not. The deadline of a worker is the median of the times between its datagrams plus six
    times their median absolute deviation, and at least `floor`. Who was never heard, as where a network carries no
    UDP, is never silent: then only the timeout of the connection is left.

    Args:
        worker: of this worker.
        job: name of the job; datagrams of others are dropped.
        host: the address that this worker is reached at.
        on_silent: called by the thread with the worker and the seconds of who has been silent for too long; once.
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
        interval: float = 0.05,
        floor: float = 0.2,
    ) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._socket.setblocking(False)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        self._job = hashlib.sha256(job.encode()).digest()[:8]
        self._packet = _PACKET.pack(self._job, worker)
        self._interval, self._floor = interval, floor
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self._on_silent = weakref.WeakMethod(on_silent) if hasattr(on_silent, "__self__") else lambda: on_silent
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossip-heartbeats", daemon=True)
        self._thread.start()

    def watch(self, peers: Mapping[int, tuple[str, int]]) -> None:
        """Watch these workers, by worker, with their addresses, and no others; what is known of them is kept."""
        now = time.monotonic()
        with self._lock:
            kept = {worker: self._peers.get(worker) or _Peer(address, now) for worker, address in peers.items()}
            self._peers = kept

    def forget(self, peer: int) -> None:
        """Watch it no more."""
        with self._lock:
            self._peers.pop(peer, None)

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

    def _deadline(self, peer: _Peer) -> float:
        if len(peer.gaps) < 8:
            return max(self._floor, 10 * self._interval)
        median = statistics.median(peer.gaps)
        mad = statistics.median(abs(gap - median) for gap in peer.gaps)
        return max(self._floor, median + 6 * mad)

    def _run(self) -> None:
        last_beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self._is_closed.is_set():
                if selector.select(max(last_beat + self._interval - time.monotonic(), 0.0)):
                    self._receive()
                now = time.monotonic()
                if now - last_beat >= self._interval:
                    self._beat(now, late_by=now - last_beat - self._interval)
                    last_beat = now
        self._socket.close()

    def _receive(self) -> None:
        now = time.monotonic()
        for _ in range(256):  # then it is time to send
            try:
                packet, _ = self._socket.recvfrom(64)
            except BlockingIOError:
                return
            except ConnectionError:  # an earlier datagram found nobody
                continue
            if len(packet) != _PACKET.size:
                continue
            job, sender = _PACKET.unpack(packet)
            with self._lock:
                peer = self._peers.get(sender)
                if peer is None or job != self._job:
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
            with contextlib.suppress(OSError):  # no route, or a full buffer: as if it were lost on its way
                self._socket.sendto(self._packet, peer.address)
        for worker, peer in peers.items():
            if peer.was_heard and now - peer.last > self._deadline(peer):
                self.forget(worker)
                on_silent = self._on_silent()
                if on_silent is not None:
                    on_silent(worker, now - peer.last)

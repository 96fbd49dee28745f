"""Router: carries packets between the TUN devices of hosts, and delays, loses or drops them."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

_MAX_PACKET = 65536
_BATCH = 64  # packets of one device, before it is the turn of others


@dataclass(frozen=True)
class Condition:
    """What becomes of packets to and from one host.

    Args:
        delay: seconds that each takes longer.
        loss: the fraction that is lost.
    """

    delay: float = 0.0
    loss: float = 0.0


_GOOD = Condition()


class Router:
    """A thread that carries IPv4 packets between hosts, each known by its address.

    Packets go through at once unless `set_condition` or `cut` says otherwise; those to nobody are dropped, as is what a
    device has no room for.

    Args:
        seed: of the draws of lost packets.
    """

    def __init__(self, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._devices: dict[bytes, int] = {}
        self._conditions: dict[bytes, Condition] = {}
        self._parts: dict[object, frozenset[bytes]] = {}
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, bytes, bytes]] = []  # a heap: when, order, to whom, the packet
        self._order = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, b"")
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="chaos-router", daemon=True)
        self._thread.start()

    def attach(self, address: str, device: int) -> None:
        """Carry the packets of a device, which is this router's from now on; one that had the address is closed."""
        key = socket.inet_aton(address)
        with self._lock:
            self._detach(key)
            self._devices[key] = device
            self._selector.register(device, selectors.EVENT_READ, key)
        self._wake.send(b".")

    def set_condition(self, address: str, condition: Condition) -> None:
        """Of the host with an address, until the next call for it."""
        with self._lock:
            self._conditions[socket.inet_aton(address)] = condition

    def cut(self, name: object, addresses: Iterable[str]) -> None:
        """Drop all packets between these hosts and all others, until `mend(name)`."""
        with self._lock:
            self._parts[name] = frozenset(map(socket.inet_aton, addresses))

    def mend(self, name: object) -> None:
        """Undo `cut(name, ...)`; nothing where there is none."""
        with self._lock:
            self._parts.pop(name, None)

    def close(self) -> None:
        """Carry nothing any more, and close all devices. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake.send(b".")
        self._thread.join()
        self._selector.close()
        for device in (*self._devices.values(), self._wake.detach(), self._woken.detach()):
            os.close(device)

    def _run(self) -> None:
        while not self._is_closed:
            seconds = max(self._waiting[0][0] - time.monotonic(), 0.0) if self._waiting else None
            for key, _ in self._selector.select(seconds):
                if not key.data:
                    self._woken.recv(4096)
                    continue
                with self._lock:
                    self._read(key.fd, key.data)
            with self._lock:
                now = time.monotonic()
                while self._waiting and self._waiting[0][0] <= now:
                    _, _, target, packet = heapq.heappop(self._waiting)
                    self._write(target, packet)

    def _read(self, device: int, source: bytes) -> None:
        """Under the lock: take packets of a host, and send each on its way."""
        for _ in range(_BATCH):
            if self._devices.get(source) != device:  # another one has its address now
                return
            try:
                packet = os.read(device, _MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:  # the device has gone
                packet = b""
            if not packet:
                self._detach(source)
                return
            if packet[0] >> 4 != 4:  # IPv6, of which there is none
                continue
            target = packet[16:20]
            if any((source in part) != (target in part) for part in self._parts.values()):
                continue
            ends = [self._conditions.get(end, _GOOD) for end in (source, target)]
            if any(end.loss and self._random.random() < end.loss for end in ends):
                continue
            delay = sum(end.delay for end in ends)
            if delay:
                heapq.heappush(self._waiting, (time.monotonic() + delay, next(self._order), target, packet))
            else:
                self._write(target, packet)

    def _detach(self, address: bytes) -> None:
        """Under the lock: close the device that has an address, if any."""
        device = self._devices.pop(address, None)
        if device is not None:
            self._selector.unregister(device)
            os.close(device)

    def _write(self, target: bytes, packet: bytes) -> None:
        device = self._devices.get(target)
        if device is not None:
            with contextlib.suppress(OSError):  # no room: it is lost, as on a wire
                os.write(device, packet)

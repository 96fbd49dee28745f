"""NetworkBackend: each worker a process on a host of its own: a network namespace behind a router."""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import math
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection

from .backend import Body, send
from .process_backend import Host, ProcessBackend, receive

_NETMASK = "255.255.0.0"
_STORE = "10.77.0.1"


NAME = "gossip0"
"""Of the device."""
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_IFF_UP = 0x1
_LOOK_SECONDS = 0.05  # between two looks whether the router was closed
_MAX_PACKET = 65536
_BATCH = 64  # packets of one device, before it is the turn of others


class NetworkBackend(ProcessBackend):
    """See `Backend`. The store and each worker are hosts; their only network is a router in this process.

    Needs Linux with /dev/net/tun, and root or the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN.
    """

    has_network = True

    def __init__(self, body: Body) -> None:
        self._router = Router()
        self._conditions: dict[int, Condition] = {}
        try:
            super().__init__(body)
        except BaseException:
            self._router.close()
            raise

    def set_condition(self, rank: int, **changed: float) -> None:
        """Set `delay` or `loss` of the packets to and from a worker; see `Condition`."""
        self._conditions[rank] = replace(self._conditions.get(rank, Condition()), **changed)
        self._router.set_condition(_address(rank), self._conditions[rank])

    def cut(self, ranks: Iterable[int]) -> None:
        """No packets pass between these workers and all others, nor the store."""
        ranks = frozenset(ranks)
        self._router.cut(ranks, [_address(rank) for rank in ranks])

    def mend(self, ranks: Iterable[int]) -> None:
        """Undo `cut(ranks)`."""
        self._router.mend(frozenset(ranks))

    def close(self) -> None:
        """See `Backend`."""
        super().close()
        self._router.close()

    def _host(self, rank: int | None) -> Host:
        return _RoutedHost(_STORE if rank is None else _address(rank))

    def _admit(self, host: Host, pipe: Connection) -> None:
        answer = receive(pipe)
        if "error" in answer:
            raise PermissionError(
                f"got no host for a worker ({answer['error']}), expected Linux with /dev/net/tun and root; "
                "backend='processes' needs neither, and has no Delay, Loss and Partition"
            )
        self._router.attach(host.address, reduction.recv_handle(pipe))


class _RoutedHost(Host):
    """A namespace; its device is sent to the router."""

    def enter(self, pipe: Connection) -> None:
        """See `Host`."""
        try:
            device = enter_namespace(self.address, _NETMASK)
        except OSError as error:
            send(pipe, error=str(error))
            raise SystemExit(1) from None
        send(pipe, has_device=True)
        reduction.send_handle(pipe, device, os.getppid())
        os.close(device)


def _address(rank: int) -> str:
    """The address of the host of a worker."""
    return f"10.77.{1 + rank // 250}.{1 + rank % 250}"


def enter_namespace(address: str, netmask: str) -> int:
    """Move this thread, and its later threads, to a network namespace of their own.

    The namespace has a loopback and a TUN device with the given address.

    Args:
        address, netmask: IPv4, like "10.77.0.2" and "255.255.0.0".

    Returns:
        The descriptor of the device: a read is a packet that the namespace sends, a write is one that it gets. The
        namespace lasts until it is closed, also when the process has ended: then its kernel still answers, as on a
        machine whose process has died.

    Raises:
        PermissionError: this process may not, which takes root or CAP_SYS_ADMIN and CAP_NET_ADMIN.
        OSError: there is no /dev/net/tun.
    """
    import fcntl  # Windows has none

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise PermissionError(number, f"no network namespace ({os.strerror(number)}), expected to run as root")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", NAME.encode(), _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFADDR, _address_request(address))
            fcntl.ioctl(any_socket, _SIOCSIFNETMASK, _address_request(netmask))
            for name in ("lo", NAME):
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), _IFF_UP))
    except BaseException:
        os.close(device)
        raise
    return device


def _address_request(address: str) -> bytes:
    """A struct ifreq of the device with an address."""
    return struct.pack("16sHH4s16x", NAME.encode(), socket.AF_INET, 0, socket.inet_aton(address))


@dataclass(frozen=True)
class Condition:
    """What becomes of packets to and from one host.

    Args:
        delay: the added seconds of each packet.
        loss: the lost fraction.
        jitter: further seconds of each packet, drawn from 0 to this number; packets may overtake each other.
    """

    delay: float = 0.0
    loss: float = 0.0
    jitter: float = 0.0


_GOOD = Condition()


class Router:
    """A thread that carries IPv4 packets between hosts, each known by its address.

    Packets go through at once unless `set_condition` or `cut` says otherwise; those to nobody are dropped, as is what a
    device has no room for.

    Args:
        seed: the seed of the draws of lost packets.
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

    def set_condition(self, address: str, condition: Condition) -> None:
        """Set the condition of the host with an address, until the next call for it."""
        with self._lock:
            self._conditions[socket.inet_aton(address)] = condition

    def cut(self, name: object, addresses: Iterable[str]) -> None:
        """Drop all packets between these hosts and all others, until `mend(name)`."""
        with self._lock:
            self._parts[name] = frozenset(map(socket.inet_aton, addresses))

    def mend(self, name: object) -> None:
        """Undo `cut(name, ...)`, if it was called."""
        with self._lock:
            self._parts.pop(name, None)

    def close(self) -> None:
        """Carry nothing any more, and close all devices. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.join()
        self._selector.close()
        for device in self._devices.values():
            os.close(device)

    def _run(self) -> None:
        while not self._is_closed:
            next_due = self._waiting[0][0] if self._waiting else math.inf
            for key, _ in self._selector.select(min(max(next_due - time.monotonic(), 0.0), _LOOK_SECONDS)):
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
            delay = sum(end.delay + (self._random.random() * end.jitter if end.jitter else 0.0) for end in ends)
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

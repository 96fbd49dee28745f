"""Datagrams: messages by UDP between the ranks of a transport. Each of them comes once, late, twice, or never."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import secrets
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import threads
from .agreement import rows_of_all
from .base import Transport
from .forks import close_in_children, forget_in_children
from .job_key import CODE_BYTES, NONCE_BYTES, code_of, is_code
from .own_address import check_reachable, checked_host

_HEADER = struct.Struct("<2sBx16sQIq")  # magic, kind, link, number, chunk, weight
_MAGIC = b"gd"
_MAX_KIND = 1
_LINK_BYTES = 16
_ADDRESS_BYTES = 6
_MACHINE_BYTES = 64  # the longest name of a machine on Linux
MAX_BYTES = 65_507  # the largest payload of UDP over IPv4
_BUFFER_BYTES = 1 << 23  # that the kernel is asked for; it gives less where net.core.rmem_max is less
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # Linux, asm-generic/socket.h; for a process that administers the network
_SIOCGIFADDR = 0x8915  # Linux, sockios.h


class Datagram(NamedTuple):
    """A message of a few numbers with a body.

    Attributes:
        kind: 0 or 1, with a meaning of the caller.
        number: how many messages of this sender come before it, or what the caller counts in its place; below 2^64.
        chunk: the place of the body in the vector of the sender; below 2^32.
        weight: a 64-bit integer.
        body: bytes. In a received message they are valid until the handler returns.
    """

    kind: int
    number: int = 0
    chunk: int = 0
    weight: int = 0
    body: bytes | memoryview = b""


@dataclass
class DatagramCounts:
    """The datagrams of one socket.

    Attributes:
        sent: handed to the kernel.
        unsent: refused by the kernel, since a buffer is full or there is no way to the peer.
        received: from a peer of this session, with the code of the key of the job.
        refused: others: of strangers, of another session, altered, or cut off.
        bytes_sent, bytes_received: of `sent` and `received`, without the headers of UDP and IP.
    """

    sent: int = 0
    unsent: int = 0
    received: int = 0
    refused: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


Handler = Callable[[int, Datagram], object]


class Datagrams:
    """A UDP socket for messages to and from the other ranks; its constructor is collective.

    Nothing waits for a peer after the constructor: `send` hands a message to the kernel or drops it, and a thread hands
    received messages to a handler. Each message has the number of its link, from one rank to another one in this
    session, which is drawn from random numbers of both ends. So a message of another run, of another link or of a
    stranger has another number and is left out. With a key each message has a code of all its bytes.

    [Note: a thread for datagrams] At the usual `net.core.rmem_max` of 212,992 bytes the kernel keeps 92 waiting
    datagrams of 1,392 bytes for a socket, and drops the others. A model is longer, and training looks at the socket
    once a step. So a thread empties it while the model is computed.

    Args:
        transport: the transport over the ranks, for the exchange of addresses.
        key: the key of the job; None: messages have no code.
        host: the IPv4 address of this machine at which the others reach it; None: see `own_host`.

    Attributes:
        counts: the counters.
        address: the address of the socket.
        error: the error that has ended the thread; None: none.

    Raises:
        ValueError: `host` is no address of this machine, or ranks on several machines have loopback addresses.
    """

    def __init__(self, transport: Transport, *, key: bytes | None, host: str | None = None) -> None:
        self._key, self._is_closed = key, False
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.counts = DatagramCounts()
        self._socket = close_in_children(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        try:
            self._socket.bind((own_host() if host is None else checked_host(host, others="the other ranks"), 0))
            for force, option in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
                try:
                    if sys.platform != "linux":
                        raise PermissionError
                    self._socket.setsockopt(socket.SOL_SOCKET, force, _BUFFER_BYTES)
                except PermissionError:
                    with contextlib.suppress(OSError):
                        self._socket.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
            self.address: tuple[str, int] = self._socket.getsockname()
            self._meet(transport)
        except BaseException:
            self._socket.close()
            raise

    def _meet(self, transport: Transport) -> None:
        """Exchange addresses and random numbers."""
        own, (name, port) = secrets.token_bytes(NONCE_BYTES), self.address
        machine = socket.gethostname().encode()[:_MACHINE_BYTES].ljust(_MACHINE_BYTES, b"\0")
        row = own + socket.inet_aton(name) + port.to_bytes(2, "big") + machine
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(transport.device)
        rows = rows_of_all(transport, mine, what="exchanging the addresses of datagrams").tolist()
        hosts = [socket.inet_ntoa(bytes(numbers[NONCE_BYTES : NONCE_BYTES + 4])) for numbers in rows]
        ends = [bytes(numbers[NONCE_BYTES + _ADDRESS_BYTES :]) for numbers in rows]
        machines = [end.rstrip(b"\0").decode(errors="replace") for end in ends]
        check_reachable(hosts, machines, transport.names)
        self._addresses: dict[int, tuple[str, int]] = {}
        self._links: dict[int, bytes] = {}
        self._senders: dict[bytes, int] = {}
        for peer, numbers in enumerate(rows):
            nonce, place = bytes(numbers[:NONCE_BYTES]), bytes(numbers[NONCE_BYTES:])
            if peer == transport.rank:
                continue
            self._addresses[peer] = (socket.inet_ntoa(place[:4]), int.from_bytes(place[4:_ADDRESS_BYTES], "big"))
            self._links[peer] = self._link(transport.rank, peer, own + nonce)
            self._senders[self._link(peer, transport.rank, nonce + own)] = peer

    def _link(self, sender: int, receiver: int, nonces: bytes) -> bytes:
        return code_of(self._key, "datagrams", sender, receiver, content=nonces)[:_LINK_BYTES]

    @staticmethod
    def overhead(key: bytes | None) -> int:
        """The bytes of a datagram beside its body."""
        return _HEADER.size + (0 if key is None else CODE_BYTES)

    def send(self, peer: int, datagram: Datagram) -> int:
        """Hand a message to the kernel, without waiting; returns its bytes, 0 if the kernel takes none now.

        Args:
            peer: the receiver, a rank of the transport.
            datagram: the message.

        Raises:
            ValueError: the message is longer than a datagram may be here.
        """
        kind, number, chunk, weight, body = datagram
        message = _HEADER.pack(_MAGIC, kind, self._links[peer], number, chunk, weight) + body
        if self._key is not None:
            message += code_of(self._key, "datagram", content=message)
        try:
            self._socket.sendto(message, socket.MSG_DONTWAIT, self._addresses[peer])
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise ValueError(
                    f"got a datagram of {len(message)} bytes, expected at most {MAX_BYTES}, or fewer where the "
                    "interface takes fewer; pass a smaller datagram_bytes"
                ) from error
            self.counts.unsent += 1  # a full buffer, or no way to the peer: the message is lost
            return 0
        self.counts.sent += 1
        self.counts.bytes_sent += len(message)
        return len(message)

    def listen(self, handle: Handler) -> None:
        """Start the thread, once. Messages that have come before wait in the buffer of the kernel.

        Args:
            handle: called with (sender, message) in the thread. An exception ends the thread, see `error`.
        """
        _listening.add(self)
        self._thread = threads.start(self._listen, handle, name=f"gossip-datagrams-{self.address[1]}")

    def _listen(self, handle: Handler) -> None:
        buffer = bytearray(1 << 16)
        view = memoryview(buffer)
        try:
            while not self._is_closed:
                try:
                    size = self._socket.recv_into(buffer)
                except ConnectionError:  # of an earlier send, on some systems
                    continue
                except OSError:
                    if self._is_closed:
                        return
                    raise
                if self._is_closed:
                    return
                found = self._read(view[:size])
                if found is None:
                    self.counts.refused += 1
                    continue
                self.counts.received += 1
                self.counts.bytes_received += size
                handle(*found)
        except BaseException as error:  # noqa: BLE001 (the training thread raises it)
            self.error = error

    def _read(self, message: memoryview) -> tuple[int, Datagram] | None:
        """The sender and the message; None: it is not of a peer in this session."""
        size = _HEADER.size
        if len(message) < self.overhead(self._key):
            return None
        magic, kind, link, number, chunk, weight = _HEADER.unpack_from(message)
        peer = self._senders.get(link)
        if magic != _MAGIC or kind > _MAX_KIND or peer is None:
            return None
        if self._key is not None:
            message, code = message[:-CODE_BYTES], message[-CODE_BYTES:]
            if not is_code(code, self._key, "datagram", content=message):
                return None
        return peer, Datagram(kind, number, chunk, weight, message[size:])

    def close(self) -> None:
        """Close the socket and end the thread; idempotent, waits for no peer."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):  # wakes the thread
            self._socket.sendto(b"", self.address)
        with contextlib.suppress(OSError):  # as well, where a firewall drops that
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._socket.close()


def own_host() -> str:
    """The IPv4 address of this machine for other ranks.

    It is the address of the first interface in the environment variable GLOO_SOCKET_IFNAME, or else of the interface to
    MASTER_ADDR. Without both it is 127.0.0.1.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names and sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", names[0].encode()[:15])
            try:
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
            except OSError as error:
                raise ValueError(
                    f"got GLOO_SOCKET_IFNAME={names[0]!r}, an interface without an IPv4 address ({error}), expected "
                    "one that has it; or pass host="
                ) from error
    if master := os.environ.get("MASTER_ADDR"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((master, 9))  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


_listening: weakref.WeakSet[Datagrams] = weakref.WeakSet()
forget_in_children(_listening)


@atexit.register
def _close_all() -> None:
    for datagrams in list(_listening):
        datagrams.close()

"""PeerConnection: one TCP connection between two workers, in the clear or under TLS; every wait on it has an end."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator

from ...transport.bounded_listener import BACKLOG
from .message import HEADER_BYTES, MessageError, MessageHeader

PEER_SECONDS = 10.0  # without progress, after which the other end is given up
CHUNK_BYTES = 1 << 20  # that one system call sends or receives at most
_MAX_SECONDS = 1e6  # a socket counts milliseconds in 32 bits
_LENGTH = struct.Struct("<Q")  # of the frame that follows


class PeerLostError(ConnectionError):
    """The other end did not answer in time, or closed the connection."""


class PeerConnection:
    """One connection: a request, its reply, and the end. Both ends of the protocol are here.

    [Note: The wire of dpwa] A frame is its length, 8 bytes, little-endian, and that many bytes. The client sends one
    frame: a header of 56 bytes (`MessageHeader`). The server answers with a header, and with a second frame, the bytes
    of the model, where the header says so. Then the server closes. Both ends know the length of each frame before it
    comes, so a frame that declares another length is refused unread, and no memory is ever taken for what a length
    says. Each wait ends at a deadline, and a reply also when no byte of it was taken for PEER_SECONDS. TLS, if there is
    any, is below the frames.

    A connection belongs to one thread, which also closes it; `end` may come from any thread. `_lock` keeps `end` from a
    descriptor that is closed and belongs to another socket.

    Args:
        sock: the connected socket; wrapped by a context, without a handshake, if the connection is under TLS.
        host: the host of the other end.

    Attributes:
        has_asked: whether a request has arrived. For `BoundedListener`, as `host` and `since`.
        since: when the connection was made or the request arrived.
        num_sent: the number of bytes sent.
        num_received: the number of bytes received.
    """

    def __init__(self, sock: socket.socket, host: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.host = sock, host
        self.has_asked = False
        self.since = time.monotonic()
        self.num_sent = self.num_received = 0
        self._lock = threading.Lock()

    def secure(self, deadline: float) -> None:
        """The handshake of TLS, if the connection is under TLS. Comes before the first frame."""
        if isinstance(self.socket, ssl.SSLSocket):
            self._limit(deadline)
            self.socket.do_handshake()

    def send(self, message: MessageHeader, model: memoryview | None = None, *, deadline: float) -> None:
        """Send a header, and a model if there is one.

        Raises:
            OSError: the other end has gone, or does not read.
        """
        head = _LENGTH.pack(HEADER_BYTES) + message.pack()
        parts: list[bytes | memoryview] = [head] if model is None else [head + _LENGTH.pack(len(model)), model]
        for part in parts:
            rest = memoryview(part)
            while rest:
                self._limit(deadline, PEER_SECONDS)
                num_bytes = self.socket.send(rest[:CHUNK_BYTES])
                self.num_sent += num_bytes
                rest = rest[num_bytes:]

    def receive(self, deadline: float) -> MessageHeader:
        """The next frame, which must be a header.

        Raises:
            MessageError: it is none.
            OSError: the other end has gone, or does not send.
        """
        header = bytearray(HEADER_BYTES)
        self.receive_into(memoryview(header), deadline)
        return MessageHeader.parse(bytes(header))

    def receive_into(self, frame: memoryview, deadline: float) -> None:
        """frame <- the next frame, which must be as long; raises as `receive`."""
        length = bytearray(_LENGTH.size)
        self._fill(memoryview(length), deadline)
        (num_bytes,) = _LENGTH.unpack(length)
        if num_bytes != len(frame):
            raise MessageError(f"got a frame of {num_bytes} bytes, expected {len(frame)}; a stranger sent it")
        self._fill(frame, deadline)

    def end(self) -> None:
        """Let every wait on this connection fail; from any thread. Idempotent."""
        with self._lock, contextlib.suppress(OSError):  # it is closed
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # SSLSocket.shutdown drops the session under a thread

    def close(self) -> None:
        """Close the socket; idempotent. Called by the thread of the connection."""
        with self._lock:
            self.socket.close()

    def _fill(self, rest: memoryview, deadline: float) -> None:
        while rest:
            self._limit(deadline)
            num_bytes = self.socket.recv_into(rest[:CHUNK_BYTES])
            if num_bytes == 0:
                raise PeerLostError(f"the connection was closed with {len(rest)} bytes to come")
            self.num_received += num_bytes
            rest = rest[num_bytes:]

    def _limit(self, deadline: float, longest: float = _MAX_SECONDS) -> None:
        """The next wait ends at the deadline, or after the longest time if that is sooner."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise PeerLostError("the time of the connection is over")
        self.socket.settimeout(min(left, longest))


class PeerConnections:
    """The open connections of one side of a worker, which any thread may end together, and all later ones with them.

    Attributes:
        open: they.
        is_stopped: whether they have been ended.
    """

    def __init__(self) -> None:
        self.open: set[PeerConnection] = set()
        self.is_stopped = False

    @contextlib.contextmanager
    def holding(self, connection: PeerConnection) -> Iterator[None]:
        """A context in which a connection counts as open; it is closed at the end.

        Raises:
            PeerLostError: the connections have been ended.
        """
        self.open.add(connection)
        try:
            if self.is_stopped:
                raise PeerLostError("this worker is closed")
            yield
        finally:
            self.open.discard(connection)
            connection.close()

    def stop(self) -> None:
        """Let every wait on every connection fail, now and in future; idempotent."""
        self.is_stopped = True  # first: a connection that is not among the open ones yet is checked by its thread
        for connection in tuple(self.open):
            connection.end()


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of "tcp://host:port"; the host is empty and the port 0 for `*`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return "" if host == "*" else host.strip("[]"), 0 if port == "*" else int(port)


def listen(address: str, *, name: str) -> socket.socket:
    """A socket that listens at "tcp://host:port" and does not block; the host may be `*`, the port `*` or 0.

    Args:
        address: where to listen.
        name: the name of this worker, for errors.

    Raises:
        ConnectionError: the address cannot be bound.
    """
    host, port = split_address(address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        raise ConnectionError(
            f"worker {name!r}: cannot bind {address}: {error}, expected an address of this machine at which no process "
            "listens; is another process using this port?"
        ) from error
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """Where a listener is reached, as "tcp://host:port"."""
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def connect(address: str, context: ssl.SSLContext | None, deadline: float) -> PeerConnection:
    """A new connection to a worker, before the handshake of TLS. Waits for PEER_SECONDS at most.

    The wait is for a thread, since the resolution of a name has no timeout.

    Raises:
        PeerLostError: the name is not known, or the address cannot be reached in time.
    """
    place, made = split_address(address), list[socket.socket]()
    seconds = min(max(deadline - time.monotonic(), 0.001), PEER_SECONDS)

    def try_it() -> None:
        with contextlib.suppress(OSError, UnicodeError):  # then none is made
            made.append(socket.create_connection(place, timeout=seconds))

    thread = threading.Thread(target=try_it, name="gossip-connect", daemon=True)
    thread.start()
    thread.join(seconds)
    if not made:
        raise PeerLostError(f"cannot connect to {address!r}")
    sock = made[0]
    if context is not None:
        sock = context.wrap_socket(sock, server_hostname=place[0], do_handshake_on_connect=False)
    return PeerConnection(sock, place[0])

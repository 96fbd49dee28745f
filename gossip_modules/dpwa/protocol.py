"""The protocol of dpwa: length-prefixed frames over TCP, in the clear or under TLS, for a server and a client."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from ..flat.layout import FlatLayout
from ..transport.bounded_listener import BACKLOG
from ..transport.forks import close_in_children
from ..transport.job_key import CODE_BYTES, NONCE_BYTES, VARIABLE, Handshake
from .interpolation import Standing

MAGIC = b"gdpw"
VERSION = 2
# magic, version, kind, flags, digest, 4 free bytes, tensors, clock, loss, bytes of the model; little-endian.
_HEADER = struct.Struct("<4sBBH16s4xIddQ")
HEADER_BYTES = _HEADER.size
_HAS_LOSS = 1


class MessageError(ValueError):
    """Bytes that are not a message of this protocol."""


class RefusedModelError(ValueError):
    """A message whose model must not be merged."""


class MessageKind(IntEnum):
    """The kind of a message: one of two requests, or of the answers to them."""

    FETCH = 1
    PROBE = 2
    MODEL = 3  # the model follows, if it has the shape of the request
    EMPTY = 4  # the answer to a probe, or nothing is published yet


_KINDS = frozenset(MessageKind)


class ModelShape(NamedTuple):
    """The properties that two models must have in common before one is merged into the other.

    digest: a hash of 16 bytes of the name, shape, dtype and strides of every tensor, the layout and the byte order.
    num_tensors: the number of tensors.
    num_bytes: the number of bytes of the flat vector.
    """

    digest: bytes
    num_tensors: int
    num_bytes: int

    @classmethod
    def of(cls, signature: Sequence[str], layout: FlatLayout) -> ModelShape:
        """The shape of a vector of this layout over the tensors of this signature (`FlatBuffer.signature`)."""
        places = [(str(segment.dtype), segment.start, segment.numel) for segment in layout.segments]
        text = repr((sys.byteorder, list(signature), places, layout.num_bytes))
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return cls(digest, len(signature), layout.num_bytes)

    def __str__(self) -> str:
        return f"{self.num_tensors} tensors, {self.num_bytes} bytes"


class MessageHeader(NamedTuple):
    """A header.

    kind: the kind of the message.
    shape: the shape of the sender's model.
    standing: the clock and loss of the sender.
    """

    kind: MessageKind
    shape: ModelShape
    standing: Standing = Standing()

    def pack(self) -> bytes:
        """The 56 bytes."""
        (clock, loss), (*shape, num_bytes) = self.standing, self.shape
        flags = 0 if loss is None else _HAS_LOSS
        return _HEADER.pack(MAGIC, VERSION, self.kind, flags, *shape, clock, loss or 0.0, num_bytes)

    @classmethod
    def parse(cls, data: bytes) -> MessageHeader:
        """The message in these bytes. Allocates no memory whose size depends on them.

        Raises:
            MessageError: they are not a message, or one of another version.
        """
        if len(data) != HEADER_BYTES:
            raise MessageError(f"got a header of {len(data)} bytes, expected {HEADER_BYTES}; a stranger sent it")
        magic, version, kind, flags, digest, num_tensors, clock, loss, num_bytes = _HEADER.unpack(data)
        if magic != MAGIC:
            raise MessageError(f"got a header that begins with {magic!r}, expected {MAGIC!r}; a stranger sent it")
        if version != VERSION:
            raise MessageError(f"got version {version}, expected {VERSION}; install the same release on all workers")
        if kind not in _KINDS or flags & ~_HAS_LOSS:
            raise MessageError(
                f"got kind {kind} with flags {flags:#x}, expected kinds 1 to {max(MessageKind)} and flag 0x1"
            )
        shape = ModelShape(digest, num_tensors, num_bytes)
        return cls(MessageKind(kind), shape, Standing(clock, loss if flags & _HAS_LOSS else None))

    def check(self, own: ModelShape) -> None:
        """Refuse a model that cannot be merged into one of shape `own`, before its bytes are looked at.

        Raises:
            RefusedModelError: the shape differs, or the clock or loss is not a finite number; says which.
        """
        if self.shape != own:
            why = "names, shapes or dtypes differ" if str(self.shape) == str(own) else "sizes differ"
            raise RefusedModelError(
                f"got a model of {self.shape}, expected {own}: {why}; wrap the same model on all workers"
            )
        clock, loss = self.standing
        if not math.isfinite(clock) or clock < 0:
            raise RefusedModelError(f"got clock {clock}, expected a finite number >= 0; the peer is broken")
        if loss is not None and not math.isfinite(loss):
            raise RefusedModelError(f"got loss {loss}, expected a finite number; the peer has diverged")


PEER_SECONDS = 10.0  # without progress, after which the other end is given up
CHUNK_BYTES = 1 << 20  # that one system call sends or receives at most
_MAX_SECONDS = 1e6  # a socket counts milliseconds in 32 bits
_LENGTH = struct.Struct("<Q")  # of the frame that follows
_TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"  # of TLS 1.2, fatal, protocol_version
_TLS = "expected TLS on both ends or on none; check server_ssl= and client_ssl= of both workers"


_HELLO = b"gdpw-key"  # begins the first message of a worker with a key, where a frame has its length
_KEY = f"expected a worker with the key of the job; set {VARIABLE} to the same secret on all workers"


class PeerLostError(ConnectionError):
    """The other end did not answer in time, or closed the connection."""


class PeerConnection:
    """One connection: a request, its reply, and the end. Both ends of the protocol are here.

    [Note: The wire of dpwa] A frame is its length, 8 bytes, little-endian, and that many bytes. The client sends one
    frame: a header of 56 bytes (`MessageHeader`). The server answers with a header and, if the header announces a
    model, a second frame with its bytes. Then the server closes. Both ends know the length of each frame before it
    comes, so a frame that declares another length is refused unread, and no memory is ever taken for a declared length.
    Each wait ends at a deadline, and a reply also when no byte of it was taken for PEER_SECONDS. TLS, if there is any,
    is below the frames. Where the job has a key, the three messages of `Handshake` come before them.

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
        self.socket, self.host = close_in_children(sock), host
        self.has_asked = False
        self.since = time.monotonic()
        self.num_sent = self.num_received = 0
        self._lock = threading.Lock()

    def secure(self, deadline: float) -> None:
        """The handshake of TLS, if the connection is under TLS. Comes before the first frame.

        Raises:
            RefusedModelError: the two ends do not agree on TLS; says why.
        """
        if not isinstance(self.socket, ssl.SSLSocket):
            return
        self._limit(deadline)
        try:
            self.socket.do_handshake()
        except (ssl.SSLEOFError, ConnectionError) as error:
            raise RefusedModelError(f"got a connection that was closed in the handshake of TLS, {_TLS}") from error
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):  # past TLS, to tell a client in the clear the reason
                socket.socket.send(self.socket, _TLS_ALERT)
            raise RefusedModelError(
                f"got {error}, {_TLS}, and the certificate, which must be for the host of the address"
            ) from error

    def show_key(self, key: bytes, deadline: float, *, is_server: bool) -> None:
        """The handshake of workers whose job has a key; comes after `secure`, and before the first frame.

        Raises:
            RefusedModelError: the other end has another key, or none.
            OSError: the other end has gone, or does not send.
        """
        handshake = Handshake(key, "dpwa")
        if is_server:
            hello = handshake.hello()
            self._send([_HELLO + hello], deadline)
            reply = handshake.reply(hello, self._receive_bytes(Handshake.ANSWER_BYTES, deadline))
            self._send([reply or bytes(CODE_BYTES)], deadline)  # zeros are a wrong code: the other end says so
            if reply is None:
                raise RefusedModelError(f"got a stranger, {_KEY}")
            return
        hello = self._receive_bytes(len(_HELLO) + NONCE_BYTES, deadline)
        if not hello.startswith(_HELLO):
            raise RefusedModelError(f"got a stranger, {_KEY}")
        answer, expected = handshake.answer(hello[len(_HELLO) :])
        self._send([answer], deadline)
        if not hmac.compare_digest(self._receive_bytes(CODE_BYTES, deadline), expected):
            raise RefusedModelError(f"got a stranger, {_KEY}")

    def send(self, message: MessageHeader, model: memoryview | None = None, *, deadline: float) -> None:
        """Send a header, and a model if there is one.

        Raises:
            OSError: the other end has gone, or does not read.
        """
        head = _LENGTH.pack(HEADER_BYTES) + message.pack()
        self._send([head] if model is None else [head + _LENGTH.pack(len(model)), model], deadline)

    def _send(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
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
            MessageError: it is no header.
            OSError: the other end has gone, or does not send.
        """
        header = bytearray(HEADER_BYTES)
        self.receive_into(memoryview(header), deadline)
        return MessageHeader.parse(bytes(header))

    def receive_into(self, frame: memoryview, deadline: float) -> None:
        """frame <- the next frame, which must be as long; raises as `receive`."""
        length = bytearray(_LENGTH.size)
        try:
            self._fill(memoryview(length), deadline)
        finally:
            if length.startswith(_TLS_ALERT[:2]):
                raise MessageError(f"got an alert of TLS in place of a frame, {_TLS}")
        if length == _HELLO:
            raise MessageError(f"got a worker that asks for the key of the job, {_KEY}")
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

    def _receive_bytes(self, num_bytes: int, deadline: float) -> bytes:
        data = bytearray(num_bytes)
        self._fill(memoryview(data), deadline)
        return bytes(data)

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
        open: the connections.
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


def listen(address: str, *, name: str) -> tuple[socket.socket, str]:
    """A socket that listens at "tcp://host:port" and does not block, and the address at which peers reach it.

    Args:
        address: where to listen; the host may be `*`, the port `*` or 0.
        name: the name of this worker, for errors.

    Raises:
        ConnectionError: the address cannot be bound.
    """
    host, port = split_address(address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = close_in_children(socket.create_server((host, port), family=family, backlog=BACKLOG))
    except (OSError, UnicodeError) as error:
        raise ConnectionError(
            f"worker {name!r}: cannot bind {address}: {error}, expected an address of this machine at which no process "
            "listens; is another process using this port?"
        ) from error
    listener.setblocking(False)
    host, port = listener.getsockname()[:2]
    return listener, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


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


_NAMES = (
    *("bytes_sent", "bytes_received", "num_fetches", "num_failed_fetches", "num_refused_models"),
    *("num_refused_connections", "num_garbage_messages", "num_unread_replies", "num_models_sent"),
)


class Counts:
    """Counts that several threads add to, by the names of `PairwiseDataParallel.comm_stats`; `_lock` guards them.

    `refusals` has the last reason why a peer's model or TLS was refused, for the training thread, by peer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_NAMES, 0)
        self.refusals: dict[str, str] = {}

    def add(self, **counts: int) -> None:
        """Add these; from any thread."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def read(self) -> dict[str, int]:
        """All counts."""
        with self._lock:
            return dict(self._counts)

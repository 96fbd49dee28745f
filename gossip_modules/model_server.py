"""The serving side of a worker: answers its peers with the model it has published last."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message
from zmq.utils.z85 import encode as encode_z85

from .curve_keys import CurveKeys
from .flat_layout import FlatLayout
from .flat_vector import FlatVector
from .interpolation import Standing
from .model_message import HEADER_BYTES, MIN_LIMIT_BYTES, Kind, Message, MessageError, ModelShape
from .snapshot_pool import Snapshot, SnapshotPool

MAX_REPLIES = 4  # models on their way at once; who asks beyond that is told that we are busy
QUEUE_LENGTH = 64  # messages waiting to be read, or to be sent to one peer
HEARTBEAT_SECONDS, VANISHED_SECONDS = 5, 30  # a connection that says nothing for so long is closed
HANDSHAKE_SECONDS = 10
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where libzmq asks who may connect (ZeroMQ RFC 27)
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass
class ServerStats:
    """What was served. Written by the serving thread only.

    num_garbage_messages: what strangers said that is no request of ours.
    num_refused_connections: failed handshakes: no ZeroMQ, no key, or a key that is not authorised; and requests with a
        key that is not authorised any more.
    """

    bytes_sent: int = 0
    num_models_sent: int = 0
    num_garbage_messages: int = 0
    num_refused_connections: int = 0


class ModelServer:
    """Answers requests in a thread of its own with an immutable snapshot of the model.

    [Note: Serving never blocks training] A model is sent without a copy, straight from the snapshot, which is not
    written again before its last byte has left. Publishing takes another snapshot: one copy, and a lock that is held
    for as long as it takes to swap a reference or to hand a reference to ZeroMQ, never while bytes move. At most
    MAX_REPLIES models are on their way, so that MAX_REPLIES + 2 snapshots always are enough, however slow clients are;
    a client that has vanished is dropped when it misses heartbeats.

    Messages longer than 1 KiB are refused before memory is taken for them (ZMQ_MAXMSGSIZE), queues are bounded,
    and what is no request is counted and dropped. What ZeroMQ does not bound is the number of frames of one message, so
    without keys a stranger can make us keep as many bytes as he sends in one; with keys he cannot begin.

    Args:
        context: shared with nobody who authenticates differently.
        address: where to bind, like "tcp://0.0.0.0:45000"; port `*` takes a free one.
        name: of this worker, for errors.
        shape: of its model.
        layout: of its model.
        is_pinned: whether the model is on a GPU.
        curve: keys; None = anybody who reaches the address is answered.

    Raises:
        ValueError: `address` is none.
        ConnectionError: it cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        name: str,
        shape: ModelShape,
        layout: FlatLayout,
        is_pinned: bool,
        curve: CurveKeys | None,
    ) -> None:
        self.shape = shape
        self.stats = ServerStats()
        self._lock = threading.Lock()
        self._pool = SnapshotPool(layout, max_snapshots=MAX_REPLIES + 2, is_pinned=is_pinned)
        self._latest: tuple[Message, Snapshot] | None = None
        self._next: tuple[Message, Snapshot] | None = None  # its copy from a GPU may not have landed
        self._authorized: set[str] = set()
        self._has_keys = curve is not None
        self._bell, self._clapper = socket.socketpair()
        self._zap = context.socket(zmq.REP) if curve is not None else None
        self._router = context.socket(zmq.ROUTER)
        self._monitor = self._router.get_monitor_socket(_FAILED_HANDSHAKES)
        try:
            if self._zap is not None and curve is not None:
                self._zap.linger = 0
                self._zap.bind(ZAP_ADDRESS)
                self.authorize(curve.peers.values())
            self._bind(address, curve)
        except BaseException as error:
            self.close()
            if not isinstance(error, zmq.ZMQError):
                raise
            if error.errno in (zmq.EINVAL, zmq.EPROTONOSUPPORT):
                raise ValueError(f"worker {name!r}: got address {address!r}, expected 'tcp://host:port'") from error
            raise ConnectionError(
                f"worker {name!r}: cannot bind {address}: {error}; is another process using this port?"
            ) from error
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, x: FlatVector, standing: Standing) -> bool:
        """Serve a copy of x from now on, or from when its copy from the GPU has landed; training thread.

        Returns:
            False where the last copy from the GPU has not landed: then that one is what is served next.
        """
        with self._lock:
            self._promote()
            if self._next is not None:
                return False
            snapshot = self._pool.take([] if self._latest is None else [self._latest[1]])
        self._pool.write(snapshot, x)
        with self._lock:
            self._next = (Message(Kind.MODEL, 0, self.shape, standing), snapshot)
        return True

    def withdraw(self) -> None:
        """Serve nothing until the next `publish`; training thread. Replies that have begun are completed."""
        with self._lock:
            self._latest = self._next = None

    @property
    def is_serving(self) -> bool:
        """Whether a model is published and not withdrawn."""
        with self._lock:
            return self._latest is not None or self._next is not None

    def authorize(self, keys: Iterable[str]) -> None:
        """Answer exactly the holders of these public keys, on connections that exist too."""
        authorized = set(keys)
        with self._lock:
            self._authorized = authorized

    def serve(self) -> None:
        """The body of the serving thread: answers until `stop()`, then closes everything."""
        poller = zmq.Poller()
        for waited_for in (self._router, self._monitor, self._zap, self._bell):
            if waited_for is not None:
                poller.register(waited_for, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._bell.fileno() in ready:
                    return
                if self._zap in ready:
                    self._authenticate()
                if self._monitor in ready:
                    self._count_failure()
                if self._router in ready:
                    self._answer()
        finally:
            self.close()

    def stop(self) -> None:
        """End `serve()`; idempotent, and also right where that never ran in a thread."""
        with contextlib.suppress(OSError):  # it has ended
            self._clapper.send(b"!")

    def close(self) -> None:
        """Close all sockets; idempotent. `serve()` does so at its end, so this is for who never called it."""
        if not self._router.closed:
            self._router.disable_monitor()
        for opened in (self._monitor, self._router, self._zap):
            if opened is not None:
                opened.close()
        self._bell.close()
        self._clapper.close()

    def _promote(self) -> None:
        """The next snapshot <- the latest one, if it has landed. Under the lock."""
        if self._next is not None and self._next[1].is_written:
            self._latest, self._next = self._next, None

    def _answer(self) -> None:
        frames = self._router.recv_multipart(copy=False)
        if self._has_keys and not self._is_authorized(frames[-1]):
            self.stats.num_refused_connections += 1
            return
        try:
            if len(frames) != 2:
                raise MessageError(f"got {len(frames) - 1} frames, expected one")
            request = Message.parse(frames[1].bytes)
            if request.kind not in (Kind.FETCH, Kind.PROBE):
                raise MessageError(f"got kind {request.kind.name}, expected a request")
        except MessageError:
            self.stats.num_garbage_messages += 1
            return
        client = frames[0].bytes
        with self._lock:
            self._promote()
            latest = self._latest
            if request.kind is Kind.PROBE:
                kind = Kind.ALIVE
            elif latest is None:
                kind = Kind.EMPTY
            elif request.shape != self.shape:
                kind = Kind.OTHER_MODEL
            elif self._pool.num_readings() >= MAX_REPLIES:
                kind = Kind.BUSY
            else:
                kind = Kind.MODEL
            message = Message(kind, 0, self.shape) if latest is None else latest[0]
            header = message._replace(kind=kind, request=request.request).pack()
            is_sent = self._send(client, header) is not None
            if kind is Kind.MODEL and is_sent and latest is not None:
                reading = self._send(client, latest[1].vector.raw.numpy())
                if reading is not None:
                    latest[1].readings.append(reading)
                    self.stats.num_models_sent += 1
                    self.stats.bytes_sent += self.shape.num_bytes
        self.stats.bytes_sent += HEADER_BYTES * is_sent

    def _send(self, client: bytes, data: Any) -> zmq.MessageTracker | None:
        """Queue a message without a copy; None where the client has gone or does not read."""
        try:
            self._router.send(client, zmq.SNDMORE | zmq.NOBLOCK)
            return self._router.send(data, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return None

    def _authenticate(self) -> None:
        """Answer libzmq's question who may connect: holders of authorised keys (ZeroMQ RFC 27, ZAP)."""
        assert self._zap is not None
        version, request, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        key = encode_z85(credentials[0]) if mechanism == b"CURVE" else b""
        with self._lock:
            is_welcome = key.decode() in self._authorized
        # libzmq puts the third part, the user's identity, on each message of this connection.
        status = (b"200", b"OK", key) if is_welcome else (b"400", b"this key is not authorised", b"")
        self._zap.send_multipart([version, request, *status, b""])

    def _is_authorized(self, frame: zmq.Frame) -> bool:
        """Whether the key that this connection has proved to hold is authorised still."""
        with self._lock, contextlib.suppress(zmq.ZMQError):  # no identity
            return frame.get("User-Id") in self._authorized
        return False

    def _count_failure(self) -> None:
        parse_monitor_message(self._monitor.recv_multipart())
        self.stats.num_refused_connections += 1

    def _bind(self, address: str, curve: CurveKeys | None) -> None:
        router = self._router
        router.linger = 0
        router.setsockopt(zmq.MAXMSGSIZE, MIN_LIMIT_BYTES)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.RCVHWM, QUEUE_LENGTH)
        router.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
        router.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_SECONDS)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * VANISHED_SECONDS)
        router.setsockopt(zmq.HANDSHAKE_IVL, 1000 * HANDSHAKE_SECONDS)
        if curve is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt_string(zmq.CURVE_SECRETKEY, curve.secret)
            router.setsockopt_string(zmq.ZAP_DOMAIN, "gossip")
            router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.bind(address)

"""CurveServer: serves the holders of authorised keys only, and encrypts all traffic."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message
from zmq.utils.z85 import encode as encode_z85

from ...flat.layout import FlatLayout
from .curve_keys import CurveKeys
from .message import HEADER_BYTES, MIN_LIMIT_BYTES, Message, MessageError, MessageKind, ModelShape
from .server import ModelServer

QUEUE_LENGTH = 64  # messages waiting to be read, or to be sent to one peer
HEARTBEAT_SECONDS, VANISHED_SECONDS = 5, 30  # a connection that says nothing for so long is closed
HANDSHAKE_SECONDS = 10
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where libzmq asks who may connect (ZeroMQ RFC 27)
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class CurveServer(ModelServer):
    """Serves the holders of authorised keys, over ZeroMQ's ROUTER and CURVE; others are refused in the handshake.

    Messages longer than 1 KiB are refused before memory is taken for them (ZMQ_MAXMSGSIZE), queues are bounded, and a
    client that has vanished is dropped when it misses heartbeats. The number of frames of one message is not bounded,
    but only holders of keys can send any.

    Args:
        context: the context of the sockets, not shared with sockets that authenticate in another way.
        address: where to bind, like "tcp://0.0.0.0:45000"; port `*` takes a free one.
        name: the name of this worker, for errors.
        shape: the shape of its model.
        layout: the layout of its model.
        is_pinned: whether the model is on a GPU.
        curve: the keys.

    Raises:
        ValueError: `address` is not of this form.
        ConnectionError: the address cannot be bound.
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
        curve: CurveKeys,
    ) -> None:
        super().__init__(shape=shape, layout=layout, is_pinned=is_pinned)
        self._authorized: set[str] = set()
        self._wakeup, self._wakeup_sender = socket.socketpair()
        self._zap = context.socket(zmq.REP)
        self._router = context.socket(zmq.ROUTER)
        self._monitor = self._router.get_monitor_socket(_FAILED_HANDSHAKES)
        try:
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

    def authorize(self, keys: Iterable[str]) -> None:
        """See `ModelServer`."""
        authorized = set(keys)
        with self._lock:
            self._authorized = authorized

    def serve(self) -> None:
        """See `ModelServer`."""
        poller = zmq.Poller()
        for waited_for in (self._router, self._monitor, self._zap, self._wakeup):
            poller.register(waited_for, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._wakeup.fileno() in ready:
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
        """See `ModelServer`."""
        with contextlib.suppress(OSError):  # it has ended
            self._wakeup_sender.send(b"!")

    def close(self) -> None:
        """See `ModelServer`."""
        if not self._router.closed:
            self._router.disable_monitor()
        for opened in (self._monitor, self._router, self._zap):
            opened.close()
        self._wakeup.close()
        self._wakeup_sender.close()

    def _answer(self) -> None:
        frames = self._router.recv_multipart(copy=False)
        if not self._is_authorized(frames[-1]):
            self.stats.num_refused_connections += 1
            return
        try:
            if len(frames) != 2:
                raise MessageError(f"got {len(frames) - 1} frames, expected one")
            request = Message.parse(frames[1].bytes)
            if request.kind not in (MessageKind.FETCH, MessageKind.PROBE):
                raise MessageError(f"got kind {request.kind.name}, expected a request")
        except MessageError:
            self.stats.num_garbage_messages += 1
            return
        answer = self._answer_to(request)
        client = frames[0].bytes
        is_sent = self._send(client, answer.header) is not None
        self.stats.bytes_sent += HEADER_BYTES * is_sent
        if answer.model is not None:
            published, reading = answer.model
            tracker = self._send(client, published.snapshot.vector.raw.numpy()) if is_sent else None
            if tracker is None:
                reading.end()
            else:
                reading.tracker = tracker
                self.stats.num_models_sent += 1
                self.stats.bytes_sent += self.shape.num_bytes

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
        """Answer libzmq's request whether a client may connect: if its key is authorised (ZeroMQ RFC 27, ZAP)."""
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

    def _bind(self, address: str, curve: CurveKeys) -> None:
        router = self._router
        router.linger = 0
        router.setsockopt(zmq.MAXMSGSIZE, MIN_LIMIT_BYTES)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.RCVHWM, QUEUE_LENGTH)
        router.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
        router.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_SECONDS)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * VANISHED_SECONDS)
        router.setsockopt(zmq.HANDSHAKE_IVL, 1000 * HANDSHAKE_SECONDS)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt_string(zmq.CURVE_SECRETKEY, curve.secret)
        router.setsockopt_string(zmq.ZAP_DOMAIN, "gossip")
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.bind(address)

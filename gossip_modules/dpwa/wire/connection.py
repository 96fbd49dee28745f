"""PeerConnection: a connection to one peer that reports at once when it is refused or closed."""

from __future__ import annotations

import contextlib

import zmq
from zmq.utils.monitor import parse_monitor_message

from .curve_keys import CurveKeys
from .message import MessageError

CURVE_OVERHEAD_BYTES = 64  # of a frame that is encrypted, at most
QUEUE_LENGTH = 4  # replies waiting to be read: a header and a model, twice
_FAILURES = {
    zmq.EVENT_CLOSED: "the connection was refused",
    zmq.EVENT_DISCONNECTED: "the connection was closed",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed; does only one of the two use keys, or other keys?",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the peer does not know the key of this worker",
}


class PeerConnection:
    """A socket to one peer, and the monitor that reports its failures. Belongs to one thread.

    It does not reconnect: once it has failed, its owner makes a new one.

    Args:
        context: the context of the socket.
        address: the address of the peer, "tcp://host:port".
        max_bytes: the longest message; longer ones are refused before memory is taken for them, and close the
            connection.
        keys: the keys of this worker, and the public key that the peer must have; None = no encryption.

    Raises:
        zmq.ZMQError: `address` is not of this form.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        max_bytes: int,
        keys: tuple[CurveKeys, str] | None,
    ) -> None:
        self.address = address
        self.server_key = None if keys is None else keys[1]
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        # Attempts to reconnect would fill the monitor while it is not read, until libzmq blocks on it.
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + CURVE_OVERHEAD_BYTES * (keys is not None))
        self.socket.setsockopt(zmq.RCVHWM, QUEUE_LENGTH)
        self.socket.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
        if keys is not None:
            curve, server_key = keys
            self.socket.setsockopt_string(zmq.CURVE_PUBLICKEY, curve.public)
            self.socket.setsockopt_string(zmq.CURVE_SECRETKEY, curve.secret)
            self.socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_key)
        self.monitor = self.socket.get_monitor_socket(sum(_FAILURES))
        try:
            self.socket.connect(address)
        except BaseException:
            self.close()
            raise

    def failure(self) -> str | None:
        """Why the connection has failed, None while it has not; never waits."""
        with contextlib.suppress(zmq.Again):
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            return _FAILURES[zmq.Event(event)]
        return None

    def answer(self) -> zmq.Frame | None:
        """The next message, None while there is none; never waits.

        Raises:
            MessageError: it has a second frame, so it is not of this protocol; the rest is dropped by `close()`.
        """
        with contextlib.suppress(zmq.Again):
            frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            if frame.more:
                raise MessageError("got a message of several frames, expected one; the peer is broken")
            return frame
        return None

    def close(self) -> None:
        """Close the socket and its monitor, and drop what is in transfer; idempotent."""
        if not self.socket.closed:
            self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()

"""ModelServer: answers peers with the model that this worker has published last."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial

from ...engine.background import Background
from ...transport.bounded_listener import TICK_SECONDS, BoundedListener
from .connection import PEER_SECONDS, PeerConnection, PeerConnections, address_of, listen
from .counts import Counts
from .message import MessageError, MessageHeader, MessageKind, ModelShape
from .snapshot_pool import SnapshotPool


class ModelServer:
    """Answers requests from snapshots of the model, each connection in a thread of its own. What it gives is bounded:

    - Connections, and with them threads: see `BoundedListener`.
    - Bytes: a request has 56, and a connection one request. Nothing else is read; see [Note: The wire of dpwa].
    - Time: PEER_SECONDS from the connection to the end of its request, the handshake of TLS included; then the time of
      a round, at least PEER_SECONDS, to the end of the reply.
    - Memory: see [Note: Serving never blocks training]. Peers that do not read make the models of others older, by the
      time of a reply at most, and never keep a peer without one.

    `serve` is the body of the thread that accepts; `stop` may be called from any.

    Args:
        address: where to bind, like "tcp://0.0.0.0:45000"; port `*` takes a free one.
        name: the name of this worker, for errors.
        shape: the shape of its model.
        snapshots: what it serves.
        counts: mutated.
        background: starts the threads that answer.
        round_seconds: the longest time of a round of a peer.
        max_connections: how many connections may be open at once.
        context: of TLS, for the server's side; None = in the clear.

    Attributes:
        address: the address at which peers reach it: as configured, with the port that `*` has become.

    Raises:
        ValueError: the host of `address` is not known.
        ConnectionError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        shape: ModelShape,
        snapshots: SnapshotPool,
        counts: Counts,
        background: Background,
        round_seconds: float,
        max_connections: Callable[[], int],
        context: ssl.SSLContext | None,
    ) -> None:
        self.shape = shape
        self._name, self._snapshots, self._counts, self._background = name, snapshots, counts, background
        self._reply_seconds, self._context = max(round_seconds, PEER_SECONDS), context
        self._connections = PeerConnections()
        self._socket = listen(address, name=name)
        self.address = address_of(self._socket)
        self._selector = selectors.DefaultSelector()
        self._listener: BoundedListener[PeerConnection] = BoundedListener(
            self._socket,
            self._selector,
            data=None,
            connections=self._connections.open,
            max_connections=max_connections,
            admit=self._admit,
            close=self._end,
        )

    def serve(self) -> None:
        """Accept connections until `stop()`."""
        try:
            while not self._connections.is_stopped:
                if self._selector.select(None if self._listener.is_accepting else TICK_SECONDS):
                    self._listener.accept()
                self._listener.is_due()
        finally:
            self._selector.close()
            self._socket.close()

    def stop(self) -> None:
        """End `serve()` and all replies; idempotent."""
        self._connections.stop()
        with contextlib.suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes the selector

    def _admit(self, sock: socket.socket, host: str) -> None:
        with contextlib.suppress(OSError):  # it has gone
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            connection = PeerConnection(sock, host)
            self._connections.open.add(connection)
            self._background.start(f"gossip-answer-{self._name}", partial(self._answer, connection))

    def _end(self, connection: PeerConnection) -> None:
        """End a connection for another one."""
        self._connections.open.discard(connection)
        connection.end()

    def _answer(self, connection: PeerConnection) -> None:
        """The body of a thread that answers."""
        try:
            with self._connections.holding(connection):
                self._reply(connection)
        except MessageError:
            self._counts.add(num_garbage_messages=1)
        except OSError:
            self._counts.add(**{"num_unread_replies" if connection.has_asked else "num_refused_connections": 1})
        except Exception as error:
            raise RuntimeError(f"worker {self._name!r}: serving peers failed: {error!r}") from error
        finally:
            self._counts.add(bytes_sent=connection.num_sent)

    def _reply(self, connection: PeerConnection) -> None:
        deadline = connection.since + PEER_SECONDS
        connection.secure(deadline)
        request = connection.receive(deadline)
        if request.kind not in (MessageKind.FETCH, MessageKind.PROBE):
            raise MessageError(f"got kind {request.kind.name}, expected a request")
        connection.has_asked, connection.since = True, time.monotonic()
        deadline = connection.since + self._reply_seconds
        with self._snapshots.for_peer() as snapshot:
            if request.kind is MessageKind.PROBE or snapshot is None:
                connection.send(MessageHeader(MessageKind.EMPTY, self.shape), deadline=deadline)
                return
            is_same = request.shape == self.shape
            model = snapshot.vector.raw.numpy().data if is_same else None
            connection.send(MessageHeader(MessageKind.MODEL, self.shape, snapshot.standing), model, deadline=deadline)
            self._counts.add(num_models_sent=is_same)

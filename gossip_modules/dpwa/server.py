"""ModelServer: answers peers with the model that this worker has published last."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from ..engine.background import Background
from ..engine.snapshots import SnapshotPool
from ..transport.bounded_listener import TICK_SECONDS, BoundedListener
from ..transport.job_key import key_of
from .config import PairwiseConfig
from .protocol import (
    PEER_SECONDS,
    Counts,
    MessageError,
    MessageHeader,
    MessageKind,
    ModelShape,
    PeerConnection,
    PeerConnections,
    RefusedModelError,
    listen,
)


class ModelServer:
    """Answers requests from snapshots of the model, each connection in a thread of its own, within bounds:

    - Connections, and with them threads: see `BoundedListener`.
    - Bytes: a request has 56, and a connection one request. Nothing else is read; see [Note: The wire of dpwa] of
      `PeerConnection`.
    - Time: PEER_SECONDS from the connection to the end of its request, the handshake of TLS included; then the time of
      a round, at least PEER_SECONDS, to the end of the reply.
    - Memory: see [Note: Serving never blocks training] of `SnapshotPool`. Peers that do not read make the models of
      others older, by the time of a reply at most, and never keep a peer without one.

    `serve` is the body of the thread that accepts; `stop` may be called from any.

    Args:
        config: the name, the address, the timeout and the TLS of this worker.
        shape: the shape of its model.
        snapshots: the models that are served.
        counts: mutated.
        background: starts the threads that answer.
        max_connections: returns how many connections may be open at once.

    Attributes:
        address: the address at which peers reach it: as configured, with the port that `*` has become.

    Raises:
        ConnectionError: the address cannot be bound.
        ValueError: the key of the job, GOSSIP_JOB_KEY, has fewer than 16 bytes.
    """

    def __init__(
        self,
        config: PairwiseConfig,
        *,
        shape: ModelShape,
        snapshots: SnapshotPool,
        counts: Counts,
        background: Background,
        max_connections: Callable[[], int],
    ) -> None:
        self.shape = shape
        self._config, self._snapshots, self._counts, self._background = config, snapshots, counts, background
        self._connections, self._key = PeerConnections(), key_of()
        self._socket, self.address = listen(config.peers[config.name], name=config.name)
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
            if self._config.server_ssl is not None:
                sock = self._config.server_ssl.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            connection = PeerConnection(sock, host)
            self._connections.open.add(connection)
            self._background.start(f"gossip-answer-{self._config.name}", partial(self._answer, connection))

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
        except (OSError, RefusedModelError):
            self._counts.add(**{"num_unread_replies" if connection.has_asked else "num_refused_connections": 1})
        except Exception as error:
            raise RuntimeError(f"worker {self._config.name!r}: serving peers failed: {error!r}") from error
        finally:
            self._counts.add(bytes_sent=connection.num_sent)

    def _reply(self, connection: PeerConnection) -> None:
        deadline = connection.since + PEER_SECONDS
        connection.secure(deadline)
        if self._key is not None:
            connection.show_key(self._key, deadline, is_server=True)
        request = connection.receive(deadline)
        if request.kind not in (MessageKind.FETCH, MessageKind.PROBE):
            raise MessageError(f"got kind {request.kind.name}, expected a request")
        connection.has_asked, connection.since = True, time.monotonic()
        deadline = connection.since + max(self._config.timeout.total_seconds(), PEER_SECONDS)
        with self._snapshots.reading() as snapshot:
            if request.kind is MessageKind.PROBE or snapshot is None:
                connection.send(MessageHeader(MessageKind.EMPTY, self.shape), deadline=deadline)
                return
            is_same = request.shape == self.shape
            model = snapshot.vector.raw.numpy().data if is_same else None
            connection.send(MessageHeader(MessageKind.MODEL, self.shape, snapshot.standing), model, deadline=deadline)
            self._counts.add(num_models_sent=is_same)

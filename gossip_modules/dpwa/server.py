"""ModelServer: answers peers with the model that this worker has published last, from a few snapshots."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..engine.background import Background
from ..engine.shared_model import HostCopy
from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from ..transport.bounded_listener import TICK_SECONDS, BoundedListener
from .config import PairwiseConfig
from .interpolation import Standing
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

MAX_SNAPSHOTS = 7


class ModelSnapshot:
    """A copy of a model in host memory.

    Args:
        vector: the memory; pinned if the model is on a GPU.

    Attributes:
        standing: the clock and loss of its publication.
        written: the event after which a copy from a GPU is complete.
        num_readings: the number of its readers; it is not written while there are any.
    """

    def __init__(self, vector: FlatVector) -> None:
        self.vector = vector
        self.num_readings = 0
        self.standing = Standing()
        self.written: torch.cuda.Event | None = None


class SnapshotPool:
    """A few snapshots that are used again and again: training publishes into one while peers read others.

    [Note: Serving never blocks training] A model is sent without a copy, directly from its snapshot, which is not
    written again before its last byte has left. Publishing takes another snapshot: one copy, and a lock that is held
    while a reference is exchanged, never while bytes are copied or sent. While slow peers read all snapshots but the
    latest, that one stays the latest, so memory is bounded and no peer is without a model.

    `publish` and `withdraw` belong to the training thread; contexts may be entered in any. `_lock` guards all state.

    Args:
        layout: the layout of the model.
        is_pinned: whether snapshots are in pinned memory, for copies from a GPU.
    """

    def __init__(self, layout: FlatLayout, *, is_pinned: bool) -> None:
        self.snapshots: list[ModelSnapshot] = []
        self._layout, self._is_pinned = layout, is_pinned
        self._copy = HostCopy()
        self._lock = threading.Lock()
        self._latest: ModelSnapshot | None = None
        self._next: ModelSnapshot | None = None  # its copy from a GPU may not be complete

    def publish(self, x: FlatVector, standing: Standing) -> bool:
        """Serve a copy of x from now on, or from when its copy from the GPU is complete.

        Returns:
            False where the last copy from the GPU is not complete, which is served next, or all snapshots are read.
        """
        with self._lock:
            self._promote()
            snapshot = None if self._next is not None else self.take()
        if snapshot is None:
            return False
        self.write(snapshot, x)
        with self._lock:
            snapshot.standing, self._next = standing, snapshot
        return True

    def withdraw(self) -> None:
        """Serve no model until the next `publish`. Replies that have begun are completed."""
        with self._lock:
            self._latest = self._next = None

    @property
    def is_serving(self) -> bool:
        """Whether a model is published and not withdrawn."""
        return self._latest is not None or self._next is not None

    @contextlib.contextmanager
    def reading(self, *, is_newest: bool = False) -> Iterator[ModelSnapshot | None]:
        """A context with the latest snapshot, whole and not written inside; None before the first snapshot.

        Args:
            is_newest: whether to wait for a copy from the GPU that is not complete.
        """
        with self._lock:
            self._promote()
            snapshot = (self._next if is_newest else None) or self._latest
            if snapshot is not None:
                snapshot.num_readings += 1
        try:
            if snapshot is not None and snapshot.written is not None:
                snapshot.written.synchronize()
            yield snapshot
        finally:
            if snapshot is not None:
                with self._lock:
                    snapshot.num_readings -= 1

    def take(self) -> ModelSnapshot | None:
        """A snapshot that is neither read nor the latest one; its content is old. None: all are. Under the lock."""
        for snapshot in self.snapshots:
            if snapshot is not self._latest and snapshot.num_readings == 0:
                return snapshot
        if len(self.snapshots) == MAX_SNAPSHOTS:
            return None
        # Zeros, not empty memory: the padding between segments is sent too, and must not reveal what was there before.
        raw = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned, device="cpu")
        self.snapshots.append(ModelSnapshot(FlatVector(self._layout, raw)))
        return self.snapshots[-1]

    def write(self, snapshot: ModelSnapshot, x: FlatVector) -> None:
        """snapshot <- x. From a GPU nothing waits: see `ModelSnapshot.written` and [Note: copies to the host]."""
        snapshot.written = self._copy.write(snapshot.vector, x)

    def _promote(self) -> None:
        """Make the next snapshot the latest one, if its copy is complete. Under the lock."""
        if self._next is not None and (self._next.written is None or self._next.written.query()):
            self._latest, self._next = self._next, None


class ModelServer:
    """Answers requests from snapshots of the model, each connection in a thread of its own, within bounds:

    - Connections, and with them threads: see `BoundedListener`.
    - Bytes: a request has 56, and a connection one request. Nothing else is read; see [Note: The wire of dpwa].
    - Time: PEER_SECONDS from the connection to the end of its request, the handshake of TLS included; then the time of
      a round, at least PEER_SECONDS, to the end of the reply.
    - Memory: see [Note: Serving never blocks training]. Peers that do not read make the models of others older, by the
      time of a reply at most, and never keep a peer without one.

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
        self._connections = PeerConnections()
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

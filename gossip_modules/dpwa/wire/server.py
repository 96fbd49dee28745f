"""ModelServer: answers peers with the model that this worker has published last."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...flat.layout import FlatLayout
from ...flat.vector import FlatVector
from ..interpolation import Standing
from .message import Message, MessageKind, ModelShape
from .snapshot_pool import Reading, Snapshot, SnapshotPool

MAX_REPLIES = 4  # snapshots that are sent at once


@dataclass
class ServerStats:
    """Counts of what was served. Written by the serving thread only.

    bytes_sent: the bytes of all messages.
    num_models_sent: the number of models among them.
    num_garbage_messages: the number of messages that are not requests of this protocol.
    num_refused_connections: the number of connections without ZeroMQ's protocol, without an authorised key, or with a
        handshake that took too long, and of those that were closed for others because there were too many; also the
        number of requests with a key that is not authorised any more.
    num_unread_replies: the number of replies that were broken off because the client did not read them.
    """

    bytes_sent: int = 0
    num_models_sent: int = 0
    num_garbage_messages: int = 0
    num_refused_connections: int = 0
    num_unread_replies: int = 0


class Published(NamedTuple):
    """A published model.

    message: the header that describes it.
    snapshot: the model.
    number: its number among all that were published.
    """

    message: Message
    snapshot: Snapshot
    number: int


class Answer(NamedTuple):
    """What is sent to a peer.

    header: the packed header.
    model: the model, and its reading, which the caller ends once it is sent; None where only the header is sent.
    """

    header: bytes
    model: tuple[Published, Reading] | None


class ModelServer(ABC):
    """Answers requests in a thread of its own with an immutable snapshot of the model.

    [Note: Serving never blocks training] A model is sent without a copy, directly from the snapshot, which is not
    written again before its last byte has left. Publishing takes another snapshot: one copy, and a lock that is held
    while a reference is exchanged, never while bytes are copied or sent. At most MAX_REPLIES snapshots are being sent,
    one is the latest, one the next, and the fetching thread reads one to compare models, so MAX_REPLIES + 3 are always
    enough, however slow clients are.

    `publish`, `withdraw` and `is_serving` belong to the training thread, `latest` to the fetching thread, `stop` and
    `authorize` to any, the rest to the serving thread. `_lock` guards `_latest`, `_next` and the pool.

    Args:
        shape: the shape of the model.
        layout: the layout of the model.
        is_pinned: whether the model is on a GPU.
    """

    address: str
    """The address at which peers reach it: as configured, with the port that `*` has become."""
    num_peers: int
    """The number of known peers; any thread may write it."""

    def __init__(self, *, shape: ModelShape, layout: FlatLayout, is_pinned: bool) -> None:
        self.shape = shape
        self.stats = ServerStats()
        self.num_peers = 0
        self._lock = threading.Lock()
        self._pool = SnapshotPool(layout, max_snapshots=MAX_REPLIES + 3, is_pinned=is_pinned)
        self._num_published = 0
        self._latest: Published | None = None
        self._next: Published | None = None  # its copy from a GPU may not be complete

    @abstractmethod
    def serve(self) -> None:
        """The body of the serving thread: answers until `stop()`, then closes everything."""

    @abstractmethod
    def stop(self) -> None:
        """End `serve()`; idempotent, and also right where that never ran in a thread."""

    @abstractmethod
    def close(self) -> None:
        """Close all sockets; idempotent. `serve()` does so at its end; call this only if it was never started."""

    def authorize(self, keys: Iterable[str]) -> None:
        """Answer only the holders of these public keys from now on, also on existing connections; any thread."""
        raise NotImplementedError(f"{type(self).__name__} answers everybody")

    def publish(self, x: FlatVector, standing: Standing) -> bool:
        """Serve a copy of x from now on, or from when its copy from the GPU is complete.

        Returns:
            False where the last copy from the GPU is not complete: then that one is served next, and not x.
        """
        with self._lock:
            self._promote()
            if self._next is not None:
                return False
            snapshot = self._pool.take([] if self._latest is None else [self._latest.snapshot])
        self._pool.write(snapshot, x)
        with self._lock:
            self._num_published += 1
            self._next = Published(Message(MessageKind.MODEL, 0, self.shape, standing), snapshot, self._num_published)
        return True

    def withdraw(self) -> None:
        """Serve no model until the next `publish`. Replies that have begun are completed."""
        with self._lock:
            self._latest = self._next = None

    @property
    def is_serving(self) -> bool:
        """Whether a model is published and not withdrawn."""
        with self._lock:
            return self._latest is not None or self._next is not None

    @contextlib.contextmanager
    def latest(self) -> Iterator[FlatVector | None]:
        """A context with the model that was published last, which is not written inside; None where there is none."""
        with self._lock:
            published = self._next or self._latest
            reading = None if published is None else published.snapshot.read()
        if published is None or reading is None:
            yield None
            return
        try:
            if published.snapshot.written is not None:
                published.snapshot.written.synchronize()
            yield published.snapshot.vector
        finally:
            reading.end()

    def _answer_to(self, request: Message) -> Answer:
        """What to send. The snapshot in it is not written before its reading has ended."""
        with self._lock:
            self._promote()
            latest, chosen = self._latest, None
            if request.kind is MessageKind.PROBE:
                kind = MessageKind.ALIVE
            elif latest is None:
                kind = MessageKind.EMPTY
            elif request.shape != self.shape:
                kind = MessageKind.OTHER_MODEL
            else:
                chosen = self._choose(latest)
                kind = MessageKind.BUSY if chosen is None else MessageKind.MODEL
            about = chosen or latest
            message = Message(kind, 0, self.shape) if about is None else about.message
            header = message._replace(kind=kind, request=request.request).pack()
            return Answer(header, None if chosen is None else (chosen, chosen.snapshot.read()))

    def _choose(self, latest: Published) -> Published | None:
        """The model for a peer that asks, None where as many replies are being sent as allowed. Under the lock."""
        return None if self._pool.num_readings() >= MAX_REPLIES else latest

    def _promote(self) -> None:
        """Make the next snapshot the latest one, if its copy is complete. Under the lock."""
        if self._next is not None and self._next.snapshot.is_written:
            self._latest, self._next = self._next, None

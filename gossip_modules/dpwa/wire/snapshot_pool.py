"""SnapshotPool: copies of a model that are served while training goes on, and never written while they are read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from ...engine.shared_model import HostCopy
from ...flat.layout import FlatLayout
from ...flat.vector import FlatVector
from ..interpolation import Standing

MAX_READ = 4  # snapshots that are sent to peers at once
MAX_SNAPSHOTS = MAX_READ + 3


class ModelSnapshot:
    """A copy of a model in host memory.

    Args:
        vector: the memory; pinned if the model is on a GPU.

    Attributes:
        number: its number among all publications; 0 = none, or withdrawn.
        standing: the clock and loss of its publication.
        written: the event after which a copy from a GPU is complete.
        num_readings: how often it is being read now; it is not written meanwhile.
    """

    def __init__(self, vector: FlatVector) -> None:
        self.vector = vector
        self.number = self.num_readings = 0
        self.standing = Standing()
        self.written: torch.cuda.Event | None = None


class SnapshotPool:
    """A few snapshots that are used again and again: training publishes into one while peers read others.

    [Note: Serving never blocks training] A model is sent without a copy, directly from its snapshot, which is not
    written again before its last byte has left. Publishing takes another snapshot: one copy, and a lock that is held
    while a reference is exchanged, never while bytes are copied or sent. At most MAX_READ snapshots are being sent,
    each to any number of peers; a peer that asks beyond that gets the newest of those. One more is the latest, one the
    next, and the fetching thread reads one to compare models, so MAX_SNAPSHOTS are always enough, however slow peers
    are.

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
        self._num_published = 0
        self._latest: ModelSnapshot | None = None
        self._next: ModelSnapshot | None = None  # its copy from a GPU may not be complete

    def publish(self, x: FlatVector, standing: Standing) -> bool:
        """Serve a copy of x from now on, or from when its copy from the GPU is complete.

        Returns:
            False where the last copy from the GPU is not complete: then that one is served next, and not x.
        """
        with self._lock:
            self._promote()
            if self._next is not None:
                return False
            snapshot = self.take()
        self.write(snapshot, x)
        with self._lock:
            self._num_published += 1
            snapshot.number, snapshot.standing = self._num_published, standing
            self._next = snapshot
        return True

    def withdraw(self) -> None:
        """Serve no model until the next `publish`. Replies that have begun are completed."""
        with self._lock:
            self._latest = self._next = None
            for snapshot in self.snapshots:
                snapshot.number = 0

    @property
    def is_serving(self) -> bool:
        """Whether a model is published and not withdrawn."""
        with self._lock:
            return self._latest is not None or self._next is not None

    def for_peer(self) -> contextlib.AbstractContextManager[ModelSnapshot | None]:
        """A context with the snapshot that a peer gets, whole and not written inside; None where there is none."""
        return self._read(self._choose)

    @contextlib.contextmanager
    def newest(self) -> Iterator[FlatVector | None]:
        """A context with the model that was published last, not written inside; None where there is none."""
        with self._read(lambda: self._next or self._latest) as snapshot:
            if snapshot is not None and snapshot.written is not None:
                snapshot.written.synchronize()
            yield None if snapshot is None else snapshot.vector

    def take(self) -> ModelSnapshot:
        """A snapshot that is neither read nor the latest one; its content is old. Under the lock."""
        for snapshot in self.snapshots:
            if snapshot is not self._latest and snapshot.num_readings == 0:
                return snapshot
        assert len(self.snapshots) < MAX_SNAPSHOTS, "fewer snapshots are read at once than there are"
        # Zeros, not empty memory: the padding between segments is sent too, and must not reveal what was there before.
        raw = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned, device="cpu")
        self.snapshots.append(ModelSnapshot(FlatVector(self._layout, raw)))
        return self.snapshots[-1]

    def write(self, snapshot: ModelSnapshot, x: FlatVector) -> None:
        """snapshot <- x. From a GPU nothing waits: see `ModelSnapshot.written` and [Note: copies to the host]."""
        snapshot.written = self._copy.write(snapshot.vector, x)

    @contextlib.contextmanager
    def _read(self, choose: Callable[[], ModelSnapshot | None]) -> Iterator[ModelSnapshot | None]:
        with self._lock:
            self._promote()
            snapshot = choose()
            if snapshot is not None:
                snapshot.num_readings += 1
        try:
            yield snapshot
        finally:
            with self._lock:
                if snapshot is not None:
                    snapshot.num_readings -= 1

    def _choose(self) -> ModelSnapshot | None:
        latest = self._latest
        read = [snapshot for snapshot in self.snapshots if snapshot.num_readings]
        if latest is None or latest in read or len(read) < MAX_READ:
            return latest
        complete = [snapshot for snapshot in read if 0 < snapshot.number < latest.number]
        return max(complete, key=lambda snapshot: snapshot.number, default=None)

    def _promote(self) -> None:
        """Make the next snapshot the latest one, if its copy is complete. Under the lock."""
        if self._next is not None and (self._next.written is None or self._next.written.query()):
            self._latest, self._next = self._next, None

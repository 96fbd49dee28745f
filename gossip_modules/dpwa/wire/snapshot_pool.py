"""Copies of a model that are served while training goes on: written once, never while somebody reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from ...engine.host_copy import HostCopy
from ...flat.layout import FlatLayout
from ...flat.vector import FlatVector


class Tracker(Protocol):
    """Says when bytes have left."""

    @property
    def done(self) -> bool:
        """Whether they have left or never will."""


class Reading:
    """Bytes of a snapshot on their way to somebody: until `end`, or until a tracker says so."""

    def __init__(self) -> None:
        self.tracker: Tracker | None = None
        self._is_over = False

    @property
    def done(self) -> bool:
        """Whether the snapshot is not read any more."""
        return self._is_over or (self.tracker is not None and self.tracker.done)

    def end(self) -> None:
        """The bytes have left or never will; from any thread."""
        self._is_over = True


class Snapshot:
    """A copy of a model in host memory.

    Args:
        vector: the memory, pinned where a GPU writes it.
    """

    def __init__(self, vector: FlatVector) -> None:
        self.vector = vector
        self.readings: list[Reading] = []
        self.written: torch.cuda.Event | None = None  # recorded after the copy from a GPU

    @property
    def is_written(self) -> bool:
        """Whether the copy has landed."""
        return self.written is None or self.written.query()

    def read(self) -> Reading:
        """A new reading: until it has ended the snapshot is not written."""
        self.readings.append(Reading())
        return self.readings[-1]

    def num_readings(self) -> int:
        """How many replies with these bytes are on their way."""
        self.readings = [reading for reading in self.readings if not reading.done]
        return len(self.readings)


class SnapshotPool:
    """A few snapshots of one layout that are written over again, made when they are first needed.

    Args:
        layout: of the model.
        max_snapshots: how much host memory this may take, in models.
        is_pinned: for copies from a GPU.
    """

    def __init__(self, layout: FlatLayout, *, max_snapshots: int, is_pinned: bool) -> None:
        self.layout = layout
        self.max_snapshots = max_snapshots
        self.is_pinned = is_pinned
        self.snapshots: list[Snapshot] = []
        self._copy = HostCopy()

    def write(self, snapshot: Snapshot, x: FlatVector) -> None:
        """snapshot <- x. From a GPU nothing waits: see `Snapshot.is_written` and [Note: copies to the host]."""
        snapshot.written = self._copy.write(snapshot.vector, x)

    def num_readings(self) -> int:
        """How many replies are on their way."""
        return sum(snapshot.num_readings() for snapshot in self.snapshots)

    def take(self, in_use: Collection[Snapshot]) -> Snapshot:
        """A snapshot that nobody reads or writes and that is not `in_use`; its content is old."""
        for snapshot in self.snapshots:
            if snapshot not in in_use and snapshot.is_written and snapshot.num_readings() == 0:
                return snapshot
        assert len(self.snapshots) < self.max_snapshots, "replies on their way are limited to fewer than snapshots"
        # Zeros, not empty memory: the padding between segments travels too, and must not tell what was there before.
        raw = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, pin_memory=self.is_pinned)
        self.snapshots.append(Snapshot(FlatVector(self.layout, raw)))
        return self.snapshots[-1]

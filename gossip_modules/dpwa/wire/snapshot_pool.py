"""SnapshotPool: copies of a model that are served while training goes on, and never written while they are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from ...engine.host_copy import HostCopy
from ...flat.layout import FlatLayout
from ...flat.vector import FlatVector


class Tracker(Protocol):
    """Knows whether bytes have been sent."""

    @property
    def done(self) -> bool:
        """Whether they have been sent or never will be."""


class Reading:
    """Protects a snapshot from being written while it is read: until `end`, or until its tracker is done."""

    def __init__(self) -> None:
        self.tracker: Tracker | None = None
        self._is_over = False

    @property
    def done(self) -> bool:
        """Whether the snapshot is not read any more."""
        return self._is_over or (self.tracker is not None and self.tracker.done)

    def end(self) -> None:
        """Let the snapshot be written again; from any thread."""
        self._is_over = True


class Snapshot:
    """A copy of a model in host memory.

    Args:
        vector: the memory; pinned if the model is on a GPU.
    """

    def __init__(self, vector: FlatVector) -> None:
        self.vector = vector
        self.readings: list[Reading] = []
        self.written: torch.cuda.Event | None = None  # recorded after the copy from a GPU

    @property
    def is_written(self) -> bool:
        """Whether the copy from a GPU is complete."""
        return self.written is None or self.written.query()

    def read(self) -> Reading:
        """A new reading: until it has ended the snapshot is not written."""
        self.readings.append(Reading())
        return self.readings[-1]

    def num_readings(self) -> int:
        """The number of readings that have not ended."""
        self.readings = [reading for reading in self.readings if not reading.done]
        return len(self.readings)


class SnapshotPool:
    """A few snapshots of one layout that are used again and again, made when they are first needed.

    It has no lock: `ModelServer._lock` guards it, except that `write` comes without, on a snapshot that nobody reads.

    Args:
        layout: the layout of the model.
        max_snapshots: the largest number of snapshots.
        is_pinned: whether they are in pinned memory, for copies from a GPU.
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
        """The number of readings of all snapshots that have not ended."""
        return sum(snapshot.num_readings() for snapshot in self.snapshots)

    def take(self, in_use: Collection[Snapshot]) -> Snapshot:
        """A snapshot that is neither read nor written nor `in_use`; its content is old."""
        for snapshot in self.snapshots:
            if snapshot not in in_use and snapshot.is_written and snapshot.num_readings() == 0:
                return snapshot
        assert len(self.snapshots) < self.max_snapshots, "fewer replies are sent at once than there are snapshots"
        # Zeros, not empty memory: the padding between segments is sent too, and must not reveal what was there before.
        raw = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, pin_memory=self.is_pinned, device="cpu")
        self.snapshots.append(Snapshot(FlatVector(self.layout, raw)))
        return self.snapshots[-1]

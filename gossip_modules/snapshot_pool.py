"""Copies of a model that are served while training goes on: written once, never while somebody reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from .flat_layout import FlatLayout
from .flat_vector import FlatVector


class Reading(Protocol):
    """Bytes of a snapshot on their way to somebody."""

    @property
    def done(self) -> bool:
        """Whether they have left or never will."""


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
        self._twin: FlatVector | None = None
        self._stream: torch.cuda.Stream
        self._copied: torch.cuda.Event

    def write(self, snapshot: Snapshot, x: FlatVector) -> None:
        """snapshot <- x. From a GPU nothing waits: see `Snapshot.is_written`.

        [Note: Snapshot of a GPU] x is copied on the GPU in training's stream, since the optimizer may change it
        next, and that copy goes to the host on a side stream.
        """
        if not x.raw.is_cuda:
            snapshot.vector.raw.copy_(x.raw)
            return
        if self._twin is None:
            self._twin, self._stream = x.like(), torch.cuda.Stream(x.raw.device)
            self._copied = torch.cuda.Event()
        training = torch.cuda.current_stream(x.raw.device)
        training.wait_event(self._copied)  # the last copy to the host reads the twin
        self._twin.raw.copy_(x.raw)
        self._stream.wait_stream(training)  # the twin is written before it is copied
        with torch.cuda.stream(self._stream):
            snapshot.vector.raw.copy_(self._twin.raw, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)
        snapshot.written = self._copied

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

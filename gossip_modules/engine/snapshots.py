"""SnapshotPool: copies of a model that peers read at any time, while training publishes the next one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ..devices import host_zeros
from ..flat.vector import FlatVector

MAX_SNAPSHOTS = 7


class Snapshot:
    """A copy of a model in host memory.

    Args:
        vector: the memory; pinned if the model is on a GPU.

    Attributes:
        standing: the numbers that were published with the model.
        written: the event after which a copy from a GPU is complete.
        num_readings: the number of its readers; it is not written while there are any.
    """

    def __init__(self, vector: FlatVector) -> None:
        self.vector = vector
        self.num_readings = 0
        self.standing: Any = None
        self.written: torch.Event | None = None

    def wait(self) -> None:
        """Wait until a copy from a GPU is complete."""
        if self.written is not None:
            self.written.synchronize()


class SnapshotPool:
    """A few snapshots that are used again and again: training publishes into one while peers read others.

    [Note: Serving never blocks training] A model is sent without a copy, directly from its snapshot, which is not
    written again before its last byte has left. Publishing is one copy, into the latest snapshot while nobody reads
    that, and else into spare memory, which an older snapshot becomes after its last reading. While slow peers read all
    snapshots, the latest stays the latest, so memory is bounded and no peer is without a model.

    `publish` and `withdraw` belong to the training thread, the other methods to any. `lock` guards all state; it is
    held while a model is copied, never while one is sent.

    Args:
        x: the model, whose layout and device every published model has. Nothing is published yet.

    Attributes:
        lock: see above; reentrant.
        snapshots: the latest one first, then older ones that are read.
        spare: vectors like a snapshot that nobody uses, for the next snapshots and for the user of the pool.
        is_open: whether readers get the latest one. `publish` sets it, and `withdraw` clears it.
    """

    def __init__(self, x: FlatVector) -> None:
        self.lock = threading.RLock()
        self.snapshots: list[Snapshot] = []
        self.spare: list[FlatVector] = []
        self.is_open = False
        self._layout, self._device = x.layout, x.raw.device
        self._copy = HostCopy()

    def vector(self) -> FlatVector:
        """A new vector of zeros like a snapshot: in host memory, pinned if the model is on a GPU.

        The padding between segments is sent too, and must not reveal the content of other memory.
        """
        return FlatVector(self._layout, host_zeros([self._layout.num_bytes], torch.uint8, beside=self._device))

    def take(self) -> FlatVector:
        """A spare vector with old content, or a new one."""
        return self.spare.pop() if self.spare else self.vector()

    @property
    def latest(self) -> Snapshot:
        """The snapshot of the last publication."""
        return self.snapshots[0]

    @property
    def is_copying(self) -> bool:
        """Whether the last publication still waits for a GPU."""
        written = self.latest.written if self.snapshots else None
        return written is not None and not written.query()

    def fits(self, x: FlatVector) -> bool:
        """Whether x has the layout and the device of the model."""
        return x.raw.device == self._device and (x.layout is self._layout or x.layout == self._layout)

    def check(self, x: FlatVector, *, who: str = "") -> None:
        """Raise ValueError where x does not fit; `who` is in front of the error."""
        if not self.fits(x):
            raise ValueError(
                f"{who}got a model of {x.layout.num_bytes} bytes on {x.raw.device} whose dtypes, trained tensors or "
                f"device changed since it was wrapped ({self._layout.num_bytes} bytes on {self._device}), expected the "
                "same: peers may ask for it at any time; call .to(), .half() and requires_grad_() before wrapping"
            )

    def publish(self, x: FlatVector, standing: Any = None) -> bool:
        """Let readers have a copy of x from now on. For x on a GPU, readers wait for the copy, and training does not.

        Returns:
            False where peers read all snapshots.
        """
        self.check(x)
        with self.lock:
            if not self.snapshots or self.latest.num_readings:
                if len(self.snapshots) == MAX_SNAPSHOTS:
                    return False
                self.snapshots.insert(0, Snapshot(self.take()))
            self.latest.written = self._copy.write(self.latest.vector, x)
            self.latest.standing, self.is_open = standing, True
            return True

    def withdraw(self) -> None:
        """Let readers have no model until the next `publish`. Those that have one go on."""
        with self.lock:
            self.is_open = False

    def acquire(self) -> Snapshot | None:
        """The latest snapshot, which is not written until its `release`; None where readers get none."""
        with self.lock:
            if not self.is_open:
                return None
            self.latest.num_readings += 1
            return self.latest

    def release(self, snapshot: Snapshot | None) -> None:
        """End the reading of a snapshot of `acquire`."""
        if snapshot is not None:
            with self.lock:
                snapshot.num_readings -= 1
                if not snapshot.num_readings and snapshot is not self.latest:
                    snapshot.wait()
                    self.snapshots.remove(snapshot)
                    self.spare.append(snapshot.vector)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Snapshot | None]:
        """A context with the latest snapshot, whole and not written inside; None where readers get none."""
        snapshot = self.acquire()
        try:
            if snapshot is not None:
                snapshot.wait()
            yield snapshot
        finally:
            self.release(snapshot)


class HostCopy:
    """Copies vectors with one layout to host memory, one after the other. Training does not wait.

    [Note: copies to the host] An x on a GPU is first copied on the GPU, in the stream of training, since the optimizer
    may change x next. A side stream copies this copy to pinned host memory.
    """

    def __init__(self) -> None:
        self._staging_buffer: FlatVector | None = None
        self._stream: torch.Stream
        self._copied: torch.Event

    def write(self, out: FlatVector, x: FlatVector) -> torch.Event | None:
        """out <- x. Called by the training thread.

        Args:
            out: a vector in host memory, pinned if x is on a GPU. Do not use it before the event.
            x: the vector to copy. You may change it at once.

        Returns:
            For x on a GPU, an event that is recorded when `out` is written; else None, and `out` is written.
        """
        if x.raw.device.type == "cpu":
            out.raw.copy_(x.raw)
            return None
        training = torch.accelerator.current_stream(x.raw.device)
        if self._staging_buffer is None:
            self._staging_buffer, self._stream = x.like(), torch.Stream(x.raw.device)
        else:
            training.wait_event(self._copied)  # the last copy to the host reads the buffer
        self._staging_buffer.raw.copy_(x.raw)
        self._stream.wait_stream(training)  # the buffer is written before it is copied
        with self._stream:
            out.raw.copy_(self._staging_buffer.raw, non_blocking=True)
            self._copied = torch.Event(x.raw.device)
            self._copied.record(self._stream)
        return self._copied

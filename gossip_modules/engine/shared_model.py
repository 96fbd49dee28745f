"""SharedModel: one object with one lock between training and the threads that serve peers."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ..flat.vector import FlatVector, scale_and_add_


class SharedModel:
    """The public model y of a rank, which peers receive, and the pending correction for training.

    The training thread calls `publish` and `collect` at the safe point. Threads of the engine call `snapshot` and
    `deliver` at any time. Peers receive snapshots that are taken under the lock, so no message mixes old and new
    values. A correction is added to the pending correction and never overwrites parameters, so no update is lost.

    [Note: pinned memory] For parameters on a GPU, y and the pending correction are in pinned host memory. `publish` is
    a `HostCopy`, and the background threads wait for it before they read or change y. `collect` queues the copy to the
    GPU in the stream of training, which does not wait for it.

    [Note: buffers of a pending correction] A correction is a difference to the model at the beginning of an exchange.
    BatchNorm statistics decay meanwhile, so a late correction can make a variance negative. So the buffers r of a peer
    are averaged with the present buffers b when the correction is applied: b <- (1 - alpha) b + alpha r. This keeps
    variances non-negative. Several averages are combined into one share of b and one term that is added.

    Args:
        x: the model. y starts as a copy of it, which peers may not receive yet.

    Attributes:
        is_open: whether peers may receive y. `publish` sets it, and `withdraw` clears it.

    Raises:
        ValueError: (`publish`, `collect`) the tensors, dtypes or device of x have changed.
    """

    def __init__(self, x: FlatVector) -> None:
        self.lock = threading.RLock()
        self._device = x.raw.device
        self._is_pinned = x.raw.is_cuda
        self._layout = x.layout
        self._public = self.host_vector()
        self._pending: FlatVector | None = None  # made, with _in_transfer, when it is first needed
        self._in_transfer: FlatVector
        self._arrived: FlatVector | None = None  # the pending correction on the GPU
        self._applied: torch.cuda.Event
        self._has_pending = self._is_kept = False
        self._first_buffers = tuple(segment.numel for segment in x.layout.where(is_buffer=False).segments)
        self._has_buffers = any(segment.numel for segment in x.layout.where(is_buffer=True).segments)
        self._buffer_share = 1.0  # [Note: buffers of a pending correction]
        self._buffer_terms = [buffers.clone() for buffers in self.buffers_of(self._public)]
        self.is_open = False
        self._copy = HostCopy()
        self._written: torch.cuda.Event | None = None  # recorded after the last copy from a GPU to y
        self.publish(x)
        self.withdraw()

    @property
    def has_pending(self) -> bool:
        """Whether `collect` would change anything."""
        return self._has_pending

    def host_vector(self) -> FlatVector:
        """Return a new vector like y: zeros in host memory, pinned if parameters are on a GPU."""
        raw = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned, device="cpu")
        return FlatVector(self._layout, raw)

    def publish(self, x: FlatVector) -> None:
        """y <- x, in one copy. Called by the training thread."""
        self._check(x)
        with self.lock:
            self.is_open = True
            self._written = self._copy.write(self._public, x)

    def withdraw(self) -> None:
        """Do not let peers receive y until the next `publish`, because parameters change or must stay unchanged."""
        with self.lock:
            self.is_open = False

    def collect(self, x: FlatVector, *, is_kept: bool = False) -> bool:
        """x <- x + the pending correction, which becomes zero. Called by the training thread.

        Buffers are averaged: see [Note: buffers of a pending correction].

        Args:
            x: the model, mutated.
            is_kept: whether `add_again` may follow. It adds all corrections since the last call with is_kept=False.

        Returns:
            Whether there was a correction.
        """
        self._check(x)
        with self.lock:
            was_kept, self._is_kept = self._is_kept, is_kept and (self._is_kept or self._has_pending)
            if not self._has_pending:
                return False
            assert self._pending is not None
            if self._is_pinned and self._arrived is None:  # made here, in the stream of training
                self._arrived, self._applied = x.like(), torch.cuda.Event()
            elif self._is_pinned:
                self._applied.synchronize()  # the GPU has read the memory for the next corrections
            self._pending, self._in_transfer, self._has_pending = self._in_transfer, self._pending, False
            in_transfer, share = self._in_transfer, self._buffer_share
            if self._has_buffers:
                for buffers, term in zip(self.buffers_of(in_transfer), self._buffer_terms, strict=True):
                    buffers.copy_(term)
            if self._arrived is not None:
                self._arrived.raw.copy_(in_transfer.raw, non_blocking=True)
                self._applied.record(torch.cuda.current_stream(x.raw.device))
                in_transfer = self._arrived
            self._add(x, in_transfer, alpha=1.0, share=share)
            if is_kept and was_kept:
                if self._is_pinned:
                    self._applied.synchronize()  # the GPU has its copy
                self._in_transfer.add_segments_(self._pending, alpha=1.0)  # before memory of the pending one is reused
            return True

    def add_again(self, x: FlatVector) -> bool:
        """x <- x + the corrections that `collect` kept, without buffers; returns whether there were any."""
        self._check(x)
        with self.lock:
            if not self._is_kept:
                return False
            parameters, corrections = (y.where(is_buffer=False).segments for y in (x, self._in_transfer))
            for own, correction in zip(parameters, corrections, strict=True):
                own.add_(correction.to(own.device))
            return True

    def snapshot(self, out: FlatVector) -> None:
        """out <- y, where `out` is a `host_vector()` of the caller."""
        self._wait_for_y()  # without the lock, which training may want
        with self.lock:
            self._wait_for_y()
            out.raw.copy_(self._public.raw)

    def deliver(self, correction: FlatVector, *, alpha: float) -> None:
        """Add alpha * correction to y and to the pending correction.

        Args:
            correction: received - sent for parameters, the received values for buffers. The buffers are overwritten.
            alpha: the factor; from 0 to 1 if there are buffers.
        """
        self._wait_for_y()
        with self.lock:
            self._wait_for_y()
            if self._pending is None:
                self._pending, self._in_transfer = self.host_vector(), self.host_vector()
            if self._has_pending:
                self._pending.add_segments_(correction, alpha=alpha)
            else:
                for pending, segment in zip(self._pending.segments, correction.segments, strict=True):
                    torch.mul(segment, alpha, out=pending)
            if self._has_buffers:
                self._average_buffers(correction, alpha)
            self._has_pending = True
            self._add(self._public, correction, alpha=alpha, share=1 - alpha)

    def buffers_of(self, vector: FlatVector) -> list[Tensor]:
        """Return the buffers of each segment; views."""
        return [segment[first:] for segment, first in zip(vector.segments, self._first_buffers, strict=True)]

    def _average_buffers(self, received: FlatVector, alpha: float) -> None:
        """Include one more average in the share and the terms of the pending correction."""
        share = self._buffer_share if self._has_pending else 1.0
        self._buffer_share = (1 - alpha) * share
        for term, buffers in zip(self._buffer_terms, self.buffers_of(received), strict=True):
            if not self._has_pending:
                term.zero_()
            scale_and_add_(term, buffers, scale=1 - alpha, alpha=alpha)

    def _add(self, x: FlatVector, correction: FlatVector, *, alpha: float, share: float) -> None:
        """x <- x + alpha * correction for parameters; b <- share * b + alpha * r for buffers, r of the correction."""
        if not self._has_buffers:
            x.add_segments_(correction, alpha=alpha)
            return
        results = self.buffers_of(correction)
        for result, buffers in zip(results, self.buffers_of(x), strict=True):
            scale_and_add_(result, buffers, scale=alpha, alpha=share)
        x.add_segments_(correction, alpha=alpha)  # whole segments, since the length of a loop affects rounding
        for result, buffers in zip(results, self.buffers_of(x), strict=True):
            buffers.copy_(result)

    def _check(self, x: FlatVector) -> None:
        if x.raw.device != self._device or (x.layout is not self._layout and x.layout != self._layout):
            raise ValueError(
                f"got a model of {x.layout.num_bytes} bytes on {x.raw.device} whose dtypes, trained tensors or device "
                f"changed since it was wrapped ({self._layout.num_bytes} bytes on {self._device}), expected the same: "
                "peers may ask for it at any time; call .to() and requires_grad_() before wrapping"
            )

    def _wait_for_y(self) -> None:
        """Wait until y is written: see [Note: pinned memory]."""
        if (written := self._written) is not None:
            written.synchronize()


class HostCopy:
    """Copies vectors with one layout to host memory, one after the other. Training does not wait.

    [Note: copies to the host] An x on a GPU is first copied on the GPU, in the stream of training, since the optimizer
    may change x next. A side stream copies this copy to pinned host memory.
    """

    def __init__(self) -> None:
        self._staging_buffer: FlatVector | None = None
        self._stream: torch.cuda.Stream
        self._copied: torch.cuda.Event

    def write(self, out: FlatVector, x: FlatVector) -> torch.cuda.Event | None:
        """out <- x. Called by the training thread.

        Args:
            out: a vector in host memory, pinned if x is on a GPU. Do not use it before the event.
            x: the vector to copy. You may change it at once.

        Returns:
            For x on a GPU, an event that is recorded when `out` is written; else None, and `out` is written.
        """
        if not x.raw.is_cuda:
            out.raw.copy_(x.raw)
            return None
        training = torch.cuda.current_stream(x.raw.device)
        if self._staging_buffer is None:
            self._staging_buffer, self._stream = x.like(), torch.cuda.Stream(x.raw.device)
        else:
            training.wait_event(self._copied)  # the last copy to the host reads the buffer
        self._staging_buffer.raw.copy_(x.raw)
        self._stream.wait_stream(training)  # the buffer is written before it is copied
        with torch.cuda.stream(self._stream):
            out.raw.copy_(self._staging_buffer.raw, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)
        return self._copied

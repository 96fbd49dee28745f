"""SharedModel: one object with one lock between training and the threads that talk to peers."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ..flat.vector import FlatVector, scale_and_add_


class SharedModel:
    """y, what peers see of a rank, and the pending correction, which training has not applied yet.

    The training thread calls `publish` and `collect` at the safe point, threads of the engine `snapshot` and `deliver`
    at any time. All that a peer gets is a snapshot taken under the lock, so no message is ever half old and half new,
    and a correction is added to the pending one, never written over parameters, so no update is lost.

    [Note: pinned memory] For parameters on a GPU, y and the pending correction are in pinned host memory. `publish` is
    a `HostCopy`, and the background threads wait for it before they read or change y. `collect` queues the copy to the
    GPU in the stream of training, which does not wait for it.

    [Note: buffers of a pending correction] A correction is a difference to what a rank was when an exchange began.
    Added late to BatchNorm statistics, which decay meanwhile, it can make a variance negative. So the buffers of a
    peer, r, are averaged with those that are there when the correction is applied, b <- (1 - alpha) b + alpha r, which
    keeps variances non-negative. Several averages are kept as what they come to: a share of b, and a term added to it.

    Args:
        x: the parameters; y starts as a copy of them, which is not for peers yet.

    Attributes:
        is_open: whether peers may have y: from a `publish` on, until `withdraw`.

    Raises:
        ValueError: (`publish`, `collect`) x is not what it was: other tensors, dtypes or another device.
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
        self._written: torch.cuda.Event | None = None  # y, by the last copy from a GPU
        self.publish(x)
        self.withdraw()

    @property
    def has_pending(self) -> bool:
        """Whether `collect` would change anything."""
        return self._has_pending

    def host_vector(self) -> FlatVector:
        """A new vector like y: zeros in host memory, pinned if parameters are on a GPU."""
        raw = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned, device="cpu")
        return FlatVector(self._layout, raw)

    def publish(self, x: FlatVector) -> None:
        """y <- x, in one copy. Called by the training thread."""
        self._check(x)
        with self.lock:
            self.is_open = True
            self._written = self._copy.write(self._public, x)

    def withdraw(self) -> None:
        """Until the next `publish` y is not for peers: parameters become something else, or must stay as they are."""
        with self.lock:
            self.is_open = False

    def collect(self, x: FlatVector, *, is_kept: bool = False) -> bool:
        """x <- x + the pending correction, which is zero then; returns whether there was one. For the training thread.

        Buffers are averaged: [Note: buffers of a pending correction].

        is_kept: whether `add_again` may follow; it adds all corrections since the last call without.
        """
        self._check(x)
        with self.lock:
            was_kept, self._is_kept = self._is_kept, is_kept and (self._is_kept or self._has_pending)
            if not self._has_pending:
                return False
            assert self._pending is not None
            if self._is_pinned and self._arrived is None:  # here: it belongs to training's stream
                self._arrived, self._applied = x.like(), torch.cuda.Event()
            elif self._is_pinned:
                self._applied.synchronize()  # the memory that corrections go to now has been read
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
        """x <- x + the corrections that `collect` has kept, without buffers; returns whether there were any."""
        self._check(x)
        with self.lock:
            if not self._is_kept:
                return False
            parameters, corrections = (y.where(is_buffer=False).segments for y in (x, self._in_transfer))
            for own, correction in zip(parameters, corrections, strict=True):
                own.add_(correction.to(own.device))
            return True

    def snapshot(self, out: FlatVector) -> None:
        """out <- y. `out`: a `host_vector()` of the caller's."""
        self._wait_for_y()  # without the lock, which training may want
        with self.lock:
            self._wait_for_y()
            out.raw.copy_(self._public.raw)

    def deliver(self, correction: FlatVector, *, alpha: float) -> None:
        """y <- y + alpha * correction, and the same to the pending correction.

        Args:
            correction: received - sent; where there are buffers, those received. They are overwritten.
            alpha: from 0 to 1 where there are buffers.
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
        """The buffers of each segment."""
        return [segment[first:] for segment, first in zip(vector.segments, self._first_buffers, strict=True)]

    def _average_buffers(self, received: FlatVector, alpha: float) -> None:
        """The share and the terms of the pending correction <- those with one average more."""
        share = self._buffer_share if self._has_pending else 1.0
        self._buffer_share = (1 - alpha) * share
        for term, buffers in zip(self._buffer_terms, self.buffers_of(received), strict=True):
            if not self._has_pending:
                term.zero_()
            scale_and_add_(term, buffers, scale=1 - alpha, alpha=alpha)

    def _add(self, x: FlatVector, correction: FlatVector, *, alpha: float, share: float) -> None:
        """x <- x + alpha * correction; its buffers b <- share * b + alpha * those of the correction."""
        if not self._has_buffers:
            x.add_segments_(correction, alpha=alpha)
            return
        results = self.buffers_of(correction)
        for result, buffers in zip(results, self.buffers_of(x), strict=True):
            scale_and_add_(result, buffers, scale=alpha, alpha=share)
        x.add_segments_(correction, alpha=alpha)  # of all: the length of a loop decides how its last elements round
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
        """[Note: pinned memory]"""
        if (written := self._written) is not None:
            written.synchronize()


class HostCopy:
    """Copies vectors of one layout to host memory, one after the other; training goes on at once.

    [Note: copies to the host] x on a GPU is copied there in training's stream, since the optimizer may change it next,
    and that copy goes to pinned host memory on a side stream.
    """

    def __init__(self) -> None:
        self._staging_buffer: FlatVector | None = None
        self._stream: torch.cuda.Stream
        self._copied: torch.cuda.Event

    def write(self, out: FlatVector, x: FlatVector) -> torch.cuda.Event | None:
        """out <- x. Called by the training thread.

        Args:
            out: in host memory, pinned if x is on a GPU; not to be touched before the event.
            x: may be changed at once.

        Returns:
            For x on a GPU, the event after which `out` is written; None: it is.
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

"""SharedModel: one object with one lock between training and the thread that exchanges models with peers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.engine import MAX_KEPT
from ..engine.snapshots import SnapshotPool
from ..flat.vector import FlatVector, scale_and_add_
from .momentum import ContinuousMomentum


class SharedModel:
    """The public model y of a rank, which peers receive, and the pending correction for training.

    The training thread calls `publish` and `collect` at the safe point. The exchanging thread reads `snapshots` and
    calls `deliver` at any time. Peers receive a snapshot that is not written meanwhile, so no message mixes old and new
    values. A correction is added to the pending correction and never overwrites parameters, so no update is lost.

    [Note: three vectors] Beside the model a rank needs y, the vector into which an exchange receives, and a third one:
    the pending correction, or the y of before, which an exchange still sends while training has published the next y.
    These two are never needed together, since an exchange releases its y before it delivers the correction, and
    training takes the correction before it publishes.

    [Note: pinned memory] For parameters on a GPU, y and the pending correction are in pinned host memory. `publish` is
    a `HostCopy`, and the background threads wait for it before they read or change y. `collect` queues the copy to the
    GPU in the stream of training, which does not wait for it; `deliver` does.

    [Note: buffers of a pending correction] A correction is a difference to the model at the beginning of an exchange.
    BatchNorm statistics decay meanwhile, so a late correction can make a variance negative. So the buffers r of a peer
    are averaged with the present buffers b when the correction is applied: b <- (1 - alpha) b + alpha r. This keeps
    variances non-negative. Several averages are combined into one share of b and one term that is added.

    Args:
        x: the model. y starts as a copy of it, which peers may not receive yet.
        momentum: is applied to each correction; None: corrections stay as they are.

    Attributes:
        snapshots: the latest one is y.
        lock: guards y and the pending correction.

    Raises:
        ValueError: (`publish`, `collect`) the tensors, dtypes or device of x have changed.
    """

    def __init__(self, x: FlatVector, momentum: ContinuousMomentum | None = None) -> None:
        self.snapshots, self._momentum = SnapshotPool(x), momentum
        self.lock = self.snapshots.lock
        self._pending: FlatVector | None = None  # None: no exchange has ended since the last `collect`
        self._kept: list[FlatVector] = []  # the corrections for `add_again`, at most MAX_KEPT
        self._arrived: FlatVector | None = None  # the pending correction on the GPU
        self._applied: torch.Event | None = None  # recorded after the copy to it
        self._steps: list[int] = []  # of the exchanges in the pending correction
        self._first_buffers = tuple(segment.numel for segment in x.layout.where(is_buffer=False).segments)
        self._has_buffers = any(segment.numel for segment in x.layout.where(is_buffer=True).segments)
        self._buffer_share = 1.0  # [Note: buffers of a pending correction]
        self.publish(x, step=0)
        self.withdraw()
        self._buffer_terms = [buffers.clone() for buffers in self.buffers_of(self.snapshots.latest.vector)]

    @property
    def has_pending(self) -> bool:
        """Whether `collect` would change anything."""
        return bool(self._steps)

    def publish(self, x: FlatVector, *, step: int) -> None:
        """y <- x, the model of a training step. Called by the training thread."""
        self.snapshots.publish(x, step)

    def withdraw(self) -> None:
        """Do not let peers receive y until the next `publish`, because parameters change or must stay unchanged."""
        self.snapshots.withdraw()

    def collect(self, x: FlatVector, *, is_kept: bool = False) -> Sequence[int]:
        """x <- x + the pending correction, which becomes zero. Called by the training thread.

        Buffers are averaged: see [Note: buffers of a pending correction].

        Args:
            x: the model, mutated.
            is_kept: whether `add_again` may follow. It adds the corrections since the last call with is_kept=False.

        Returns:
            The step of y for each exchange in the correction; none if there was no correction.
        """
        self.snapshots.check(x)
        with self.lock:
            steps, self._steps = self._steps, []
            correction, self._pending = self._pending, None
            if not is_kept:
                self._kept = []
            if correction is None:
                return steps
            if self._momentum is not None:
                self._momentum.apply_(correction, len(steps))
            for buffers, term in zip(self.buffers_of(correction), self._buffer_terms, strict=True):
                buffers.copy_(term)
            present = correction
            if x.raw.device.type != "cpu":
                if self._arrived is None:  # made here, in the stream of training
                    self._arrived, self._applied = x.like(), torch.Event(x.raw.device)
                assert self._applied is not None
                self._arrived.raw.copy_(correction.raw, non_blocking=True)
                self._applied.record(torch.accelerator.current_stream(x.raw.device))
                present = self._arrived
            self._add(x, present, alpha=1.0, share=self._buffer_share)
            if is_kept and len(self._kept) < MAX_KEPT:
                self._kept.append(correction)
                return steps
            if is_kept:
                self._kept[-1].add_segments_(correction, alpha=1.0)
            self.snapshots.spare.append(correction)
            return steps

    def add_again(self, x: FlatVector, *, after: int = 0) -> bool:
        """x <- x + the corrections that `collect` kept, without buffers; returns whether there were any.

        Args:
            x: the model, mutated.
            after: the number of kept corrections that x has already.
        """
        self.snapshots.check(x)
        with self.lock:
            for kept in self._kept[after:]:
                for own, correction in zip(x.parameters, kept.parameters, strict=True):
                    own.add_(correction.to(own.device))
            return len(self._kept) > after

    def deliver(self, correction: FlatVector, *, alpha: float, step: int) -> None:
        """Add alpha * correction to y and to the pending correction.

        Args:
            correction: received - sent for parameters, the received values for buffers. The buffers are overwritten.
            alpha: the factor; from 0 to 1 if there are buffers.
            step: the step of the y that was sent.
        """
        self._wait_for_gpu()  # without the lock, which training may want
        with self.lock:
            self._wait_for_gpu()
            if self._pending is not None:
                self._pending.add_segments_(correction, alpha=alpha)
            else:
                self._pending = self.snapshots.take()
                for pending, segment in zip(self._pending.segments, correction.segments, strict=True):
                    torch.mul(segment, alpha, out=pending)
            if self._has_buffers:
                self._average_buffers(correction, alpha)
            self._steps.append(step)
            self._add(self.snapshots.latest.vector, correction, alpha=alpha, share=1 - alpha)

    def buffers_of(self, vector: FlatVector) -> list[Tensor]:
        """Return the buffers of each segment; views."""
        return [segment[first:] for segment, first in zip(vector.segments, self._first_buffers, strict=True)]

    def _average_buffers(self, received: FlatVector, alpha: float) -> None:
        """Include one more average in the share and the terms of the pending correction."""
        share = self._buffer_share if self._steps else 1.0
        self._buffer_share = (1 - alpha) * share
        for term, buffers in zip(self._buffer_terms, self.buffers_of(received), strict=True):
            if not self._steps:
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

    def _wait_for_gpu(self) -> None:
        """Wait until y is written and the pending correction is read: see [Note: pinned memory]."""
        self.snapshots.latest.wait()
        if self._applied is not None:
            self._applied.synchronize()

"""GroupResult: the newest group average, between the worker that computes it and training that merges it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.shared_model import SharedModel
from ..flat.vector import FlatVector


class GroupResult:
    """Two vectors in host memory: the newest average, for training, and an accumulator, for the worker.

    The worker copies y into the accumulator, averages it with the other members of its group without any lock, and then
    exchanges the two vectors. Except for that average, every method and attribute is for the thread that holds the lock
    of `shared`; so training never reads a vector that the worker writes.

    Args:
        shared: y, the model that this rank has published.

    Attributes:
        vector: the newest average.
        accumulator: the vector that the worker averages.
    """

    def __init__(self, shared: SharedModel) -> None:
        self.vector, self.accumulator = shared.host_vector(), shared.host_vector()
        self._shared = shared
        self._correction: FlatVector | None = None  # with its bounds, made when they are first needed
        self._bounds: list[tuple[Tensor, Tensor]]
        self._on_gpu: FlatVector | None = None  # with its event, made when they are first needed
        self._copied: torch.cuda.Event

    def take_snapshot(self) -> None:
        """accumulator <- y."""
        self._wait_for_copy()  # the accumulator was the result before
        self._shared.snapshot(self.accumulator)

    def finish(self, *, is_skipped: bool) -> None:
        """Make the accumulator the newest average; `is_skipped`: after it has taken y, as the average is not finite."""
        if is_skipped:
            self._shared.snapshot(self.accumulator)
        self.vector, self.accumulator = self.accumulator, self.vector

    def merge_to(self, x: FlatVector, *, weight: float) -> None:
        """x <- (1 - weight) x + weight * average."""
        average = self._beside(x, self.vector)
        if weight == 1.0:
            x.raw.copy_(average.raw)
        else:
            x.combine_(1 - weight, [average], [weight])

    def correct(self, x: FlatVector) -> None:
        """x <- x + (average - y), where y is the contribution of this rank: later steps of x are kept.

        [Note: statistics] For buffers that sum can leave the range of the values that ranks have: a running variance
        that has decayed since y was published could become negative. So each element of a buffer is clamped to the
        interval between the average and its present value.
        """
        buffers_of = self._shared.buffers_of
        correction = self._beside(x, self._difference(x))
        for (average, low), mean, own in zip(self._bounds, buffers_of(self.vector), buffers_of(x), strict=True):
            average.copy_(mean, non_blocking=True)
            torch.minimum(own, average, out=low)
            torch.maximum(own, average, out=average)
        x.add_segments_(correction, alpha=1.0)
        for (high, low), own in zip(self._bounds, buffers_of(x), strict=True):
            torch.clamp(own, low, high, out=own)

    def _difference(self, x: FlatVector) -> FlatVector:
        """average - y, in host memory."""
        if self._correction is None:
            self._correction = self._shared.host_vector()
            buffers = self._shared.buffers_of(x)
            self._bounds = [(torch.empty_like(own), torch.empty_like(own)) for own in buffers]
        self._wait_for_copy()  # of the last correction
        self._shared.snapshot(self._correction)
        for y, average in zip(self._correction.segments, self.vector.segments, strict=True):
            torch.sub(average, y, out=y)
        return self._correction

    def _beside(self, x: FlatVector, vector: FlatVector) -> FlatVector:
        """The vector on the device of x; on a GPU it is a copy that is queued in training's stream."""
        if not x.raw.is_cuda:
            return vector
        if self._on_gpu is None:
            self._on_gpu, self._copied = x.like(), torch.cuda.Event()
        self._on_gpu.raw.copy_(vector.raw, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(x.raw.device))
        return self._on_gpu

    def _wait_for_copy(self) -> None:
        if self._on_gpu is not None:
            self._copied.synchronize()

"""GroupResult: the newest group average, between the worker that computes it and training that merges it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.shared_model import SharedModel
from ..flat.vector import FlatVector


class GroupResult:
    """Two vectors in host memory: the newest average, for training, and an accumulator, for the worker.

    The worker copies y into the accumulator, averages it with those of its group without any lock, and then exchanges
    the two vectors. Except for that average, every method and attribute is for the thread that holds the lock of
    `shared`; so training never reads a vector that the worker writes.

    Args:
        shared: what this rank has published, y.
        x: the parameters.

    Attributes:
        vector: the newest average.
        accumulator: what the worker averages.
    """

    def __init__(self, shared: SharedModel, x: FlatVector) -> None:
        self.vector, self.accumulator = shared.host_vector(), shared.host_vector()
        self._shared = shared
        self._first_buffers = [segment.numel for segment in x.layout.where(is_buffer=False).segments]
        self._correction: FlatVector | None = None  # with its bounds, made when they are first needed
        self._bounds: list[tuple[Tensor, Tensor]]
        self._is_on_gpu = x.raw.is_cuda
        if self._is_on_gpu:
            self._on_gpu, self._copied = x.like(), torch.cuda.Event()

    def take_snapshot(self) -> None:
        """accumulator <- y."""
        if self._is_on_gpu:
            self._copied.synchronize()  # the accumulator was the result before, whose copy to the GPU may be queued
        self._shared.snapshot(self.accumulator)

    def finish(self, *, is_skipped: bool) -> None:
        """Make the accumulator the newest average; `is_skipped`: after it has taken y, as the average is not finite."""
        if is_skipped:
            self._shared.snapshot(self.accumulator)
        self.vector, self.accumulator = self.accumulator, self.vector

    def merge_to(self, x: FlatVector, *, weight: float) -> None:
        """x <- (1 - weight) x + weight * average."""
        average = self.vector
        if self._is_on_gpu:
            average = self._copy_to_gpu(average, x)
        if weight == 1.0:
            x.raw.copy_(average.raw)
        else:
            x.combine_(1 - weight, [average], [weight])

    def correct(self, x: FlatVector) -> None:
        """x <- x + (average - y), where y is what this rank contributed: steps that x has taken since then are kept.

        [Note: statistics] For buffers that sum can leave the range of the values that ranks have: a running variance
        that has decayed since y was published could become negative. So each element of a buffer is clamped to the
        interval between the average and its present value.
        """
        correction = self._difference(x)
        for (average, _), buffers in zip(self._bounds, self._buffers_of(self.vector), strict=True):
            average.copy_(buffers, non_blocking=True)
        if self._is_on_gpu:
            correction = self._copy_to_gpu(correction, x)
        for (average, low), buffers in zip(self._bounds, self._buffers_of(x), strict=True):
            torch.minimum(buffers, average, out=low)
            torch.maximum(buffers, average, out=average)
        x.add_segments_(correction, alpha=1.0)
        for (high, low), buffers in zip(self._bounds, self._buffers_of(x), strict=True):
            torch.clamp(buffers, low, high, out=buffers)

    def _difference(self, x: FlatVector) -> FlatVector:
        """average - y, in host memory."""
        if self._correction is None:
            self._correction = self._shared.host_vector()
            self._bounds = [(torch.empty_like(buffers), torch.empty_like(buffers)) for buffers in self._buffers_of(x)]
        elif self._is_on_gpu:
            self._copied.synchronize()  # the copy of the last correction to the GPU reads this memory
        self._shared.snapshot(self._correction)
        for y, average in zip(self._correction.segments, self.vector.segments, strict=True):
            torch.sub(average, y, out=y)
        return self._correction

    def _copy_to_gpu(self, vector: FlatVector, x: FlatVector) -> FlatVector:
        """A copy beside x, queued in training's stream."""
        self._on_gpu.raw.copy_(vector.raw, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(x.raw.device))
        return self._on_gpu

    def _buffers_of(self, vector: FlatVector) -> list[Tensor]:
        return [segment[first:] for segment, first in zip(vector.segments, self._first_buffers, strict=True)]

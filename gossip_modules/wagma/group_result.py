"""GroupResult and LentModel: the memory of a group average, for late training, and for training on time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.snapshots import SnapshotPool
from ..flat.vector import FlatVector
from .group_average import chunks_of


class GroupResult:
    """The newest average, in host memory, until training has merged it.

    The worker takes a vector, writes an average to it without any lock, and puts it in the place of the one before.
    Training merges it, and then the memory is spare: see [Note: vectors of WAGMA] of `WaitAvoidingWorker`. Call the
    methods with the lock of the snapshots, so that training never reads a vector during a write of the worker.

    Args:
        published: the published models of this rank; the latest one is y.
    """

    def __init__(self, published: SnapshotPool) -> None:
        self._published = published
        self._newest: FlatVector | None = None
        self._bounds: list[tuple[Tensor, Tensor]] = []  # made when they are first needed, as the next ones
        self._on_gpu: FlatVector | None = None
        self._copied: torch.Event | None = None

    def take(self) -> FlatVector:
        """The memory of the next average; its content is old."""
        if self._copied is not None:
            self._copied.synchronize()  # a merge may still read it
        return self._published.take()

    def put(self, average: FlatVector | None) -> None:
        """Make this the newest average; None: training has the newest one already."""
        self._end()
        self._newest = average

    def merge_to(self, x: FlatVector, *, weight: float) -> None:
        """x <- (1 - weight) x + weight * average."""
        average = self._beside(x)
        if weight == 1.0:
            x.raw.copy_(average.raw)
        else:
            x.combine_(1 - weight, [average], [weight])
        self._end()

    def correct(self, x: FlatVector) -> None:
        """x <- x + (average - y) with the contribution y of this rank: later steps of x are kept.

        [Note: statistics] For buffers that sum can leave the range of the ranks' values: a running variance could
        become negative if it has decayed since y was published. So each element of a buffer is clamped to the interval
        between the average and its present value.
        """
        assert self._newest is not None, "each average is merged once"
        if not self._bounds:
            self._bounds = [(torch.empty_like(own), torch.empty_like(own)) for own in x.buffers]
        for (high, low), mean, own in zip(self._bounds, self._newest.buffers, x.buffers, strict=True):
            high.copy_(mean)
            torch.minimum(own, high, out=low)
            torch.maximum(own, high, out=high)
        y = self._published.latest
        y.wait()
        for average, own in zip(self._newest.segments, y.vector.segments, strict=True):
            torch.sub(average, own, out=average)
        x.add_segments_(self._beside(x), alpha=1.0)
        for (high, low), own in zip(self._bounds, x.buffers, strict=True):
            torch.clamp(own, low, high, out=own)
        self._end()

    def _beside(self, x: FlatVector) -> FlatVector:
        """Return the average on the device of x; on a GPU it is a copy, queued in training's stream."""
        assert self._newest is not None, "each average is merged once"
        if x.raw.device.type == "cpu":
            return self._newest
        if self._on_gpu is None or self._copied is None:
            self._on_gpu, self._copied = x.like(), torch.Event(x.raw.device)
        self._on_gpu.raw.copy_(self._newest.raw, non_blocking=True)
        self._copied.record(torch.accelerator.current_stream(x.raw.device))
        return self._on_gpu

    def _end(self) -> None:
        if self._newest is not None:
            self._published.spare.append(self._newest)
        self._newest = None


class LentModel:
    """A model that training lends to the awaited round: see [Note: averages in place] of `WaitAvoidingWorker`.

    Args:
        x: the model; the round writes its average to it.
        y: the memory of the snapshot of x.
    """

    def __init__(self, x: FlatVector, y: FlatVector) -> None:
        self.x, self._y, self._num_filled = x, y, 0

    def fill(self, k: int) -> None:
        """Chunk k of y <- chunk k of x."""
        chunks_of(self._y)[k].raw.copy_(chunks_of(self.x)[k].raw)
        self._num_filled = k + 1

    def take_back(self) -> None:
        """Set x and y to the model from before a failed round."""
        for k, (own, copy) in enumerate(zip(*map(chunks_of, (self.x, self._y)), strict=True)):
            if k < self._num_filled:
                own.raw.copy_(copy.raw)
            else:
                copy.raw.copy_(own.raw)

"""HostCopy: a vector's way to host memory, on which training waits for no bus."""

from __future__ import annotations

import torch

from ..flat.vector import FlatVector


class HostCopy:
    """Copies vectors of one layout to host memory, one after the other; training goes on at once.

    [Note: copies to the host] x on a GPU is copied there in training's stream, since the optimizer may change it next,
    and that copy goes to pinned host memory on a side stream.
    """

    def __init__(self) -> None:
        self._twin: FlatVector | None = None
        self._stream: torch.cuda.Stream
        self._landed: torch.cuda.Event

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
        if self._twin is None:
            self._twin, self._stream = x.like(), torch.cuda.Stream(x.raw.device)
        else:
            training.wait_event(self._landed)  # the last copy to the host reads the buffer
        self._twin.raw.copy_(x.raw)
        self._stream.wait_stream(training)  # the buffer is written before it is copied
        with torch.cuda.stream(self._stream):
            out.raw.copy_(self._twin.raw, non_blocking=True)
            self._landed = torch.cuda.Event()
            self._landed.record(self._stream)
        return self._landed

"""HostCopy: a vector's way to host memory, without a wait of the training thread."""

from __future__ import annotations

import torch

from ..flat.vector import FlatVector


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

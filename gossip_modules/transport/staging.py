"""Staging buffers: memory that can go on the wire, for tensors that cannot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_STAGED = 64  # buffers kept, and more where a round has more; else addresses change from call to call


class Staging:
    """A buffer for each tensor of another device: pinned memory for those of a GPU, kept from round to round.

    Args:
        device: the device of messages on the wire; a tensor there needs no buffer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}
        self._max_buffers = MAX_STAGED
        self._source: torch.device | None = None

    def expect(self, num_tensors: int) -> None:
        """A round of so many tensors begins: the buffers of a few such rounds are kept."""
        self._max_buffers = max(self._max_buffers, 4 * num_tensors)

    def buffer_for(self, x: Tensor, *, fill: bool = False, keep: bool = False) -> Tensor:
        """`x` itself where it can go on the wire, else a buffer like it.

        Args:
            x: the tensor to send, or to receive into.
            fill: whether x is copied into the buffer.
            keep: whether the buffer is kept for the next round.
        """
        if x.device.type == self.device.type:
            return x
        self._source = x.device
        key = (x.data_ptr(), x.dtype, x.shape)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = torch.empty(x.shape, dtype=x.dtype, device=self.device, pin_memory=x.is_cuda)
            if keep:
                if len(self._buffers) >= self._max_buffers:
                    self._buffers.clear()
                self._buffers[key] = buffer
        return buffer.copy_(x, non_blocking=True) if fill else buffer

    def synchronize(self) -> None:
        """Return when the copies between buffers and tensors since the last call have ended."""
        if self._source is not None and self._source.type == "cuda":
            # Copies into buffers must end before a send reads them, copies out before a receive overwrites them.
            torch.cuda.current_stream(self._source).synchronize()
        self._source = None

    @staticmethod
    def copy_back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Each tensor <- its buffer."""
        for x, buffer in pairs:
            if x is not buffer:
                x.copy_(buffer, non_blocking=x.is_cuda)  # the host waits for what it reads

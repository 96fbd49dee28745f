"""The exact average for workers that need no process group otherwise."""

from __future__ import annotations

import torch

from .connect import connect
from .flat_vector import FlatVector
from .gossiper import GlobalAverage


class AverageOnDemand(GlobalAverage):
    """The exact average over all workers, whose process group is made when it is first asked for, by all of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_connected = False

    @property
    def num_bytes_sent(self) -> int:
        """By averages so far."""
        return self.transport.num_bytes_sent if self._is_connected else 0

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`. Raises RuntimeError where torch.distributed is not initialised."""
        if not self._is_connected:
            super().__init__(connect(module_device=self._device))
            self._is_connected = True
        super().start(s, t)

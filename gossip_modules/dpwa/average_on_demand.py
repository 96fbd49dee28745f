"""AverageOnDemand: the exact average over all workers of dpwa, which use no process group otherwise."""

from __future__ import annotations

from datetime import timedelta

import torch

from ..flat.vector import FlatVector
from ..rounds.mixer import GlobalAverage
from ..transport.connect import connect
from ..transport.process_group import ProcessGroupTransport


class AverageOnDemand(GlobalAverage):
    """The exact average over all workers. Its process group is made by all of them at the first average.

    Args:
        device: the device of the parameters.
        timeout: the timeout of the wait for the other ranks, and of the average.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self._device, self._timeout = device, timeout
        self._connection: ProcessGroupTransport | None = None

    @property
    def num_bytes_sent(self) -> int:
        """The bytes that averages have sent so far."""
        return 0 if self._connection is None else self._connection.num_bytes_sent

    def close(self) -> None:
        """Release the process group, if there is one; idempotent. No averages after it."""
        if self._connection is not None:
            self._connection.close()

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            TimeoutError, ConnectionError: a rank has not come to this average in time, or is gone; names it.
        """
        if self._connection is None:
            self._connection = connect(module_device=self._device, timeout=self._timeout)
            super().__init__(self._connection)
        super().start(s, t)

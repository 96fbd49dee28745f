"""WatchedAverage: the average over all ranks, beside the threads of WAGMA."""

from __future__ import annotations

from typing import Any

from ..rounds.mixer import GlobalAverage
from ..transport.base import Transport
from .engine import WaitAvoidingEngine


class WatchedAverage(GlobalAverage):
    """The average over all ranks that wrappers take after `settle()`; errors name who is at fault."""

    def __init__(self, engine: WaitAvoidingEngine, transport: Transport) -> None:
        super().__init__(transport)
        self._engine = engine

    def mix(self, x: Any, t: int) -> Any:
        """See `Mixer`."""
        with self._engine.worker.detector.together("the average over all ranks", t=self._engine.t):
            return super().mix(x, t)

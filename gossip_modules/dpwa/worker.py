"""What both ways of training with dpwa can do with the worker that they own."""

from __future__ import annotations

from ..wrappers.averaging import FlatAveraging
from .average_on_demand import AverageOnDemand
from .engine import PairwiseEngine


class PairwiseWorker(FlatAveraging):
    """A model that is served at an address, and whose peers may change."""

    _engine: PairwiseEngine
    _averager: AverageOnDemand

    @property
    def address(self) -> str:
        """Where this worker is reached: as configured, with the port that `*` has become."""
        return self._engine.address

    def add_peer(self, name: str, address: str, *, public_key: str | None = None) -> None:
        """See `PairwiseEngine.add_peer`; from any thread."""
        self._engine.add_peer(name, address, public_key=public_key)

    def remove_peer(self, name: str) -> None:
        """See `PairwiseEngine.remove_peer`; from any thread."""
        self._engine.remove_peer(name)

    @property
    def _bytes_sent(self) -> int:
        return self._engine.num_bytes_sent + self._averager.num_bytes_sent

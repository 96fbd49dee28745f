"""PairwiseWorker: an address, and peers that change, for both forms of pairwise averaging."""

from __future__ import annotations

from ..old_calls import foreign_arguments
from ..wrappers.averaging import AveragingMixin
from .average_on_demand import AverageOnDemand
from .config import CURVE_ARGUMENTS
from .engine import PairwiseEngine


class PairwiseWorker(AveragingMixin):
    """A model that is served at an address, and whose peers may change."""

    _engine: PairwiseEngine
    _averager: AverageOnDemand

    @property
    def address(self) -> str:
        """Where this worker is reached: as configured, with the port that `*` has become."""
        return self._engine.server.address

    @foreign_arguments(CURVE_ARGUMENTS)
    def add_peer(self, name: str, address: str) -> None:
        """See `PairwiseEngine.add_peer`; from any thread."""
        self._engine.add_peer(name, address)

    def remove_peer(self, name: str) -> None:
        """See `PairwiseEngine.remove_peer`; from any thread."""
        self._engine.remove_peer(name)

    def comm_stats(self) -> dict[str, float]:
        """The communication of this worker so far; local and cheap.

        Returns:
            As `GossipWrapper.comm_stats`, where num_rounds is merges and num_skipped those that were left out as the
            own model was not finite, and: bytes_received, num_fetches (requests), num_failed_fetches (refused, timed
            out, broken off), num_refused_models (another shape, infinities or NaN in the model or its loss, too far
            from ours, or TLS that failed), num_refused_losses (own ones that were not finite, and not published),
            num_refused_connections (without a request in time, without TLS that we trust, or too many),
            num_garbage_messages, num_unread_replies (whose reader left or was too slow), num_models_sent, clock; and by
            the names of `Membership.stats`: live (this worker, and peers whose last request has not failed), joins
            (peers that were added, or answered again), deaths (failed requests to peers that counted as live, also to
            one that has never answered), deadline (of a request, in seconds).
        """
        statistics = self._engine.statistics()
        return {**statistics, **super().comm_stats()}

    @property
    def _bytes_sent(self) -> int:
        return int(self._engine.statistics()["bytes_sent"]) + self._averager.num_bytes_sent

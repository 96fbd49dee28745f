"""Local SGD: an exact average of the parameters now and then."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.records.submission import Submission
from gossip_modules import LocalSGD


@dataclass(frozen=True)
class LocalSGDEntry(Submission):
    """Local steps and averages.

    Args:
        rate: see `Submission`.
        sync_every: the steps from one average to the next.
    """

    sync_every: int

    title = "Local SGD"
    grid = tuple({"rate": rate, "sync_every": period} for period in (10, 30) for rate in (0.008, 0.016, 0.032))

    def method(self) -> LocalSGD:
        """See `Submission`."""
        return LocalSGD(sync_every=self.sync_every)

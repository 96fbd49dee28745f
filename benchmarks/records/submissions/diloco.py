"""DiLoCo: an outer step by Nesterov's momentum now and then."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.records.submission import Submission
from gossip_modules import DiLoCo


@dataclass(frozen=True)
class DiLoCoEntry(Submission):
    """Local steps and outer steps.

    Args:
        rate: see `Submission`.
        sync_every: the steps from one outer step to the next.
    """

    sync_every: int

    title = "DiLoCo"
    grid = tuple({"rate": rate, "sync_every": period} for period in (10, 30) for rate in (0.008, 0.016, 0.032))

    def method(self) -> DiLoCo:
        """See `Submission`."""
        return DiLoCo(sync_every=self.sync_every)

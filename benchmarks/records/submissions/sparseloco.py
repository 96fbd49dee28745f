"""SparseLoCo: an outer step from a few coded elements of the drift of each worker now and then."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.records.submission import Submission
from gossip_modules import SparseLoCo


@dataclass(frozen=True)
class SparseLoCoEntry(Submission):
    """Local steps and outer steps with sparse messages.

    Args:
        rate: see `Submission`.
        sync_every: the steps from one outer step to the next.
    """

    sync_every: int

    title = "SparseLoCo"
    grid = tuple({"rate": rate, "sync_every": period} for period in (10, 30) for rate in (0.008, 0.016, 0.032))

    def method(self) -> SparseLoCo:
        """See `Submission`."""
        return SparseLoCo(sync_every=self.sync_every)

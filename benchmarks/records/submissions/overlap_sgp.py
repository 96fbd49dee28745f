"""Overlap SGP: a message to one peer in each step, which arrives one step later."""

from __future__ import annotations

from benchmarks.records.submission import Submission


class OverlapSGPEntry(Submission):
    """Stochastic gradient push under the computation."""

    title = "Overlap SGP"
    grid = tuple({"rate": rate} for rate in (0.004, 0.008, 0.016, 0.032, 0.064))

    def method(self) -> str:
        """See `Submission`."""
        return "osgp"

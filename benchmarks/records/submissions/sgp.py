"""SGP: a message to one peer in each step, on the exponential graph."""

from __future__ import annotations

from benchmarks.records.submission import Submission


class SGPEntry(Submission):
    """Stochastic gradient push."""

    title = "SGP"
    grid = tuple({"rate": rate} for rate in (0.004, 0.008, 0.016, 0.032, 0.064))

    def method(self) -> str:
        """See `Submission`."""
        return "sgp"

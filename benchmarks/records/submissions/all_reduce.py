"""AllReduce SGD: an exact average of the gradients in each step."""

from __future__ import annotations

from benchmarks.records.submission import Submission


class AllReduceEntry(Submission):
    """DistributedDataParallel's method."""

    title = "AllReduce"
    grid = tuple({"rate": rate} for rate in (0.004, 0.008, 0.016, 0.032, 0.064))

    def method(self) -> str:
        """See `Submission`."""
        return "ar"

"""PowerGossip: two vectors of each matrix of the difference to each neighbour on a ring."""

from __future__ import annotations

from benchmarks.records.submission import Submission


class PowerGossipEntry(Submission):
    """Gossip with messages of rank one."""

    title = "PowerGossip"
    grid = tuple({"rate": rate} for rate in (0.004, 0.008, 0.016, 0.032, 0.064))

    def method(self) -> str:
        """See `Submission`."""
        return "powergossip"

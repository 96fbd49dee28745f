"""Counts: what a worker of dpwa has sent, received and refused."""

from __future__ import annotations

import threading


class Counts:
    """Counts that several threads add to, by the names of `PairwiseDataParallel.comm_stats`; `_lock` guards them.

    The last refusal of each peer stands in `refusals`, from which the training thread takes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            (
                *("bytes_sent", "bytes_received", "num_fetches", "num_failed_fetches", "num_refused_models"),
                *("num_refused_connections", "num_garbage_messages", "num_unread_replies", "num_models_sent"),
            ),
            0,
        )
        self.refusals: dict[str, str] = {}

    def add(self, **counts: int) -> None:
        """Add these; from any thread."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def read(self) -> dict[str, int]:
        """All of them."""
        with self._lock:
            return dict(self._counts)

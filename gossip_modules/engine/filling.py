"""Filling: the gossip thread corrects a model and copies it into the snapshot, chunk by chunk as it sends it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch.profiler import record_function

from ..flat.vector import FlatVector


class Filling:
    """x <- x + alpha * s, then s <- x, chunk by chunk on the gossip thread.

    Inside a `with` of it, so that x is whole when training goes on, whatever happens to the round.

    Args:
        x, s: of one layout; s is the correction of the last round, if there is one.
        chunks: of both, in pairs.
        alpha: of that correction; None = there is none.
    """

    def __init__(
        self, x: FlatVector, s: FlatVector, chunks: Sequence[tuple[FlatVector, FlatVector]], *, alpha: float | None
    ) -> None:
        self._x, self._s, self._chunks, self._alpha = x, s, chunks, alpha
        self._num_done = 0
        self._is_done = threading.Event()

    def __enter__(self) -> Filling:
        if self._alpha is not None:
            self._x.push_sum_weight.add_(self._s.push_sum_weight, alpha=self._alpha)
        self._s.push_sum_weight.copy_(self._x.push_sum_weight)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for k in range(self._num_done, len(self._chunks)):
                self._fill(k)
        finally:
            self._is_done.set()

    def fill(self, k: int) -> None:
        """Chunks up to k; see `Mixer.start_filling`.

        Twice as many with each call: see [Note: Filling] of `OverlapEngine`.
        """
        for index in range(self._num_done, min((2 << k) - 1, len(self._chunks))):
            self._fill(index)

    def _fill(self, k: int) -> None:
        x, s = self._chunks[k]
        self._num_done = k + 1  # before the work: a chunk that fails may not be corrected twice
        with record_function("gossip.fill"):
            if self._alpha is None:
                s.raw.copy_(x.raw)
            else:
                x.apply_and_refresh_(s, alpha=self._alpha)
        if self._num_done == len(self._chunks):
            self._is_done.set()

    def wait(self) -> None:
        """Return when x may be touched. Waits for this process only: no peer is asked for anything meanwhile."""
        try:
            self._is_done.wait()
        except BaseException:  # Control-C: who catches it must not find x half corrected
            self._is_done.wait()
            raise

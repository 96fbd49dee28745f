"""RelativePace: the number of rounds of the other ranks during one training step of a rank."""

from __future__ import annotations

import time
from collections import deque

_NUM_STEPS = 3  # that are kept
_SLOW = 2  # rounds per own step


class RelativePace:
    """The least number of rounds, and of seconds, that passed during one of the last three steps of a rank.

    The least of three, so that a single slow step does not count: `is_slow` needs three slow steps in a row.
    Used by the training thread only.
    """

    def __init__(self) -> None:
        self._rounds: deque[int] = deque(maxlen=_NUM_STEPS)
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)
        self._start: tuple[int, float] | None = None

    def start_step(self, newest: int) -> None:
        """Note that a step begins, with the ranks ahead at round `newest`."""
        self._start = newest, time.perf_counter()

    def finish_step(self, newest: int, *, is_halted: bool) -> None:
        """Note that the step has ended.

        Args:
            newest: the round of the ranks ahead.
            is_halted: whether those ranks are waiting: they may be faster than this step shows.
        """
        if self._start is None:
            return
        rounds = newest - self._start[0]
        if is_halted and rounds <= min(self._rounds, default=rounds):
            return  # a lower bound, and not above what is known
        self._rounds.append(rounds)
        self._seconds.append(time.perf_counter() - self._start[1])

    @property
    def rounds(self) -> int:
        """The rounds per own step; 1 until three steps are known."""
        return min(self._rounds) if len(self._rounds) == _NUM_STEPS else 1

    @property
    def seconds(self) -> float:
        """The seconds per own step; 0 until a step is known."""
        return min(self._seconds, default=0.0)

    @property
    def is_slow(self) -> bool:
        """Whether the others take at least two steps for each of this rank's."""
        return self.rounds >= _SLOW

    def would_be_late_for(self, due: int, *, newest: int) -> bool:
        """Whether ranks at round `newest` will be at round `due` before this rank's next step ends."""
        # The pace in whole rounds is up to one too low, and the others need one more to come from the last to `due`.
        return self.is_slow and newest + self.rounds + 1 >= due

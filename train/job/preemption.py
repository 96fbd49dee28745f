"""Preemption: SIGTERM and SIGUSR1 ask the run to stop; how all ranks come to know is in stop.py."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the run was told to stop, it has a checkpoint, start it again with --resume auto."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def ignore_signals() -> None:
    """From here on no signal ends this process before it returns its exit code.

    At its very end Python puts default handlers back in place of ours, but not in place of an ignored signal, and
    torchrun sends SIGTERM to all others as soon as one process has left.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Whether this process was asked to stop the run, by a signal or by `request`.

    Handlers stay in place until `close`, so that torchrun, which sends SIGTERM to the others as soon as one process has
    left, ends nobody who still writes a checkpoint.

    Args:
        signals: those that ask; none in a thread that is not the main one, which may handle no signal.
    """

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.is_made = False
        """Whether anyone has asked."""
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in signals}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request()

    def request(self) -> None:
        """What a signal does: ask to stop."""
        self.is_made = True

    def close(self) -> None:
        """Put the previous handlers back; idempotent."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

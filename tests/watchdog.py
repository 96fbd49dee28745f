"""Watchdog: ends a process that hangs, after it has written where each thread is."""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable


def _exit() -> None:
    os._exit(1)


class Watchdog:
    """Writes the stack of each thread and ends the process, unless it is called off before a deadline.

    [Note: stacks of running threads] `faulthandler.dump_traceback_later` walks the stacks of all threads without the
    interpreter's lock. A thread that runs meanwhile frees the frames that it returns from, and then the process may die
    by a segmentation fault in the middle of the report (Python 3.11: in one of some 5 to 30 reports on threads that
    recurse). This one writes its report under the lock, so nothing runs meanwhile. faulthandler remains for a process
    in which no thread gets the lock any more: there no stack changes.

    Args:
        file: the descriptor that the report is written to.
        end: called after the report; ends the process by default.
    """

    def __init__(self, file: int, *, end: Callable[[], None] = _exit) -> None:
        self._file, self._end = file, end
        self._changed = threading.Condition()
        self._deadline = math.inf
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def start(self, seconds: float) -> None:
        """The deadline is in so many seconds; instead of the one before."""
        with self._changed:
            self._deadline = time.monotonic() + seconds
            self._changed.notify()

    def call_off(self) -> None:
        """There is no deadline until the next `start`."""
        with self._changed:
            self._deadline = math.inf

    def _watch(self) -> None:
        with self._changed:
            while (left := self._deadline - time.monotonic()) > 0:
                self._changed.wait(None if math.isinf(left) else left)
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._end()

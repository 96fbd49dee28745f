"""Processes that are forks of this one, which has imported everything: ready in milliseconds, none outlives its parent.

Not `multiprocessing`, whose processes end by os._exit: here a process ends as a script does, with what the interpreter
does at its exit, because whether that hangs is measured.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1


class End(NamedTuple):
    """How a process ended."""

    exit_code: int  # negative: the signal
    time: float  # of time.monotonic()


class Processes:
    """Forks by their names. A caller of `start` has no `finally` and no `with`: a fork runs through them at its end.

    Args:
        folder: of their logs.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.running: dict[str, int] = {}
        self.ends: dict[str, End] = {}

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Start a process, which calls `body` and ends; what it prints is appended to its log."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self.running[name] = pid
            return
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(1)
        with open(os.devnull) as nothing, (self._folder / f"{name}.log").open("ab") as out:
            os.dup2(nothing.fileno(), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        body()
        sys.exit()

    def signal(self, name: str, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if name in self.running:  # it is not reaped, so its id is its own
            os.kill(self.running[name], number)

    def reap(self, *, is_waiting: bool = False) -> list[str]:
        """The processes that have ended since the last call; the first one is waited for, if that is asked for."""
        found: list[str] = []
        while self.running:
            pid, status = os.waitpid(-1, 0 if is_waiting and not found else os.WNOHANG)
            if pid == 0:
                break
            name = next(name for name, own in self.running.items() if own == pid)
            del self.running[name]
            self.ends[name] = End(os.waitstatus_to_exitcode(status), time.monotonic())
            found.append(name)
        return found

"""Errors that nothing catches: what this rank holds leaves the others at once, before the error is printed."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from .forks import forget_in_children


class Leaver(Protocol):
    """An object for which other ranks may wait."""

    @property
    def thread(self) -> int:
        """The thread that trains (`threading.get_ident()`)."""
        ...

    def end_by(self, error: BaseException) -> None:
        """Tell the others that an error has ended this rank, and let them go on or fail at once."""


# [Note: errors that end a program] A process may take minutes to end after an error: a script cleans up, `atexit`
# functions run, threads that are no daemons are waited for. Until then its connections are open, and other ranks would
# wait for it. So everything that this rank holds leaves the others as soon as an error, or Ctrl-C, has left the
# program, in `sys.excepthook`, or the thread that trains, in `threading.excepthook`. The hooks that were there are
# called afterwards. If another hook has taken the place without calling this one, the end of the main thread does it.
# An error that is caught ends nothing. Nor does an error of the main thread of an interactive interpreter.
#
# `sys.exit()` calls no hook, and is the end of a program like another: messages may still be on their way.

_live: weakref.WeakKeyDictionary[Leaver, None] = weakref.WeakKeyDictionary()  # in the order of their making
forget_in_children(_live)


class _Hook:
    """A hook that tells first, and then calls the hook that was there before."""

    def __init__(self, before: Callable[..., object], tell: Callable[..., None]) -> None:
        self.before, self._tell = before, tell

    def __call__(self, *arguments: Any) -> None:
        try:
            self._tell(*arguments)
        finally:
            self.before(*arguments)


def leave_at_error(leaver: Leaver) -> None:
    """Have `leaver.end_by` called with an error that ends its thread or the program, until `stay` or its collection."""
    _live[leaver] = None
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook, _leave_in_main_thread)
    if not isinstance(threading.excepthook, _Hook):
        threading.excepthook = _Hook(threading.excepthook, _leave_in_thread)


def stay(leaver: Leaver) -> None:
    """Undo `leave_at_error`; with the last one the hooks are as before. Idempotent."""
    _live.pop(leaver, None)
    if not _live and isinstance(sys.excepthook, _Hook):
        sys.excepthook = sys.excepthook.before
    if not _live and isinstance(threading.excepthook, _Hook):
        threading.excepthook = threading.excepthook.before


def leave(error: BaseException, thread: int | None = None) -> None:
    """Leave because of an error, the newest object first: an engine tells its peers before its connections close.

    Args:
        error: which nothing has caught.
        thread: the thread that it has ended; None: the main thread, and so the process.
    """
    for leaver in reversed(list(_live)):
        if thread in (None, leaver.thread):
            leaver.end_by(error)


def _leave_in_main_thread(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    if not _is_interactive():
        leave(error)


def _leave_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None:
        leave(arguments.exc_value, threading.get_ident())


def _is_interactive() -> bool:
    """Whether the interpreter goes on after an error in its main thread."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _leave_at_end() -> None:
    """The main thread has ended, by an error if there is a last one."""
    error = getattr(sys, "last_value", None)
    if error is not None and not _is_interactive():
        leave(error)


threading._register_atexit(_leave_at_end)  # type: ignore[attr-defined]

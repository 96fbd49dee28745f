"""Turn: one thread at a time changes the weights of a model, and none in the middle of another change."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from .hooks import num_running

_POLL = 0.001  # seconds between two looks at the optimizer step of another thread


class Turn:
    """The lock around changes of the weights of a model, and the knowledge of the change under way.

    [Note: One thread at a time] The thread that runs rounds is the training thread. Others may evaluate the model, or
    save it, at any time; and a signal handler runs in the training thread between any two instructions of Python, also
    inside a round or an optimizer step. Both would change the form of the weights (see `Debias`), or apply corrections,
    where training computes with the weights. So

    - a round, a flush and the step of an optimizer on numerators are changes. A thread enters a change only while no
      other thread is in one, and waits for it; the lock is reentrant, since a change may have parts;
    - between the first forward of a step and its optimizer step, only the training thread applies corrections, and not
      in a signal handler: autograd may need the weights. Other calls leave corrections in flight;
    - inside a change of its own thread, a call comes from a signal handler. It changes nothing.

    `with turn:` takes the lock, and `with turn.change:` is a change.

    Attributes:
        change: the context of a change.
        limit: seconds for which a thread waits for another one.
        trainer: the thread of the last round.
        depth: the number of changes around this line, of the thread that has the lock.
    """

    def __init__(self) -> None:
        self.limit = 600.0
        self._lock = threading.RLock()
        self.trainer = 0
        self._changer = self.depth = 0  # the thread in a change
        self._stepper = 0  # the thread in the step of an optimizer on numerators
        self.change = _Change(self)

    def __reduce__(self) -> Any:
        return Turn, ()  # a copy of the model has changes of its own

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self.limit):
            raise self._late("a gossip round of another thread has not ended")
        if self._stepper and self._stepper != threading.get_ident():
            self._wait_for_step()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _wait_for_step(self) -> None:
        """Wait until the other thread is in no optimizer step; called and left with the lock."""
        end = time.monotonic() + self.limit
        while self._stepper and num_running(sys._current_frames().get(self._stepper)):
            self._lock.release()
            time.sleep(_POLL)
            if not self._lock.acquire(timeout=self.limit):
                raise self._late("a gossip round of another thread has not ended")
            if time.monotonic() > end:
                self._lock.release()
                raise self._late("the optimizer step of another thread has not ended")
        # A step that raises ends without a hook.

    def _late(self, what: str) -> TimeoutError:
        return TimeoutError(
            f"{what} after {self.limit:g} s, and this thread waits for it to use the same model; call the wrapper in "
            "one thread, or see which peer the other thread waits for"
        )

    def begin_step(self) -> None:
        """An optimizer is about to step numerators, in this thread."""
        with self:
            self._stepper = threading.get_ident()

    def end_step(self) -> None:
        """The step of the optimizer has ended, and storage holds the estimate again."""
        self._stepper = 0

    @property
    def is_in_change(self) -> bool:
        """Whether this thread is in a change: this call comes from a signal handler."""
        return self.depth > 0 and self._changer == threading.get_ident()

    @property
    def is_in_step(self) -> bool:
        """Whether this thread is in the step of an optimizer on numerators: a closure, or a signal handler."""
        return self._stepper == threading.get_ident() and num_running(sys._getframe()) > 0

    @property
    def is_of_other_thread(self) -> bool:
        """Whether another thread trains, which is alive."""
        trainer = self.trainer
        return trainer not in (0, threading.get_ident()) and any(t.ident == trainer for t in threading.enumerate())


class _Change:
    """The context of a change, with the lock; see `Turn`."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def __enter__(self) -> None:
        turn = self._turn
        turn.__enter__()
        turn._changer = threading.get_ident()
        turn.depth += 1

    def __exit__(self, *_: object) -> None:
        turn = self._turn
        turn.depth -= 1
        turn.__exit__()


def is_in_signal_handler() -> bool:
    """Whether a function that handles a signal is running in this thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(caller.f_code in handlers for caller in _callers(sys._getframe()))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _code_of(handler: Any) -> CodeType | None:
    """The code of a handler in Python, a function, a method, a partial or an object; None for other handlers."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = type(function).__call__ if callable(function) else None
    return getattr(function, "__code__", None)

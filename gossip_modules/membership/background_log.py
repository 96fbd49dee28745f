"""The logger of memberships: a thread of its own hands messages to the handlers, so that nobody waits for these."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from concurrent.futures import wait
from functools import partial

from ..transport.threads import CallThread

NAME = "gossip_modules.membership"
_MAX_WAITING = 1000  # messages
_FORMATTER = logging.Formatter()


class BackgroundLogger(logging.Logger):
    """A logger with a thread of its own, in which it handles messages in their order.

    [Note: handlers that block] A handler may wait without limit: for the reader of a pipe, a paused terminal, a file
    system. A thread in such a wait would send no heartbeats, or hold a lock needed by others. So a message is only put
    into a queue. It goes to the handlers of `logging.getLogger(name)` and its parents, with the time and the thread of
    the caller. More than 1,000 waiting messages are not kept; their number is logged when the handler goes on. At the
    exit of the interpreter one second is left for waiting messages, see [Note: threads at exit] of `start`.

    Args:
        name: the name of the logger; its level, filters and handlers count.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._target = logging.getLogger(name)
        self.begin()

    def begin(self) -> None:
        """Drop messages and thread, as in a forked child."""
        self._lock = threading.RLock()  # of all below; no message is handled while it is held
        self._num_waiting = self._num_dropped = 0
        self._thread: CallThread | None = None

    def isEnabledFor(self, level: int) -> bool:
        """As the logger of this name."""
        return self._target.isEnabledFor(level)

    def handle(self, record: logging.LogRecord) -> None:
        """Leave a message to the thread. It is formatted here: an error among its arguments would keep frames alive."""
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text, record.exc_info = _FORMATTER.formatException(record.exc_info), None
        with self._lock, contextlib.suppress(RuntimeError):  # at the exit of the interpreter the thread has ended
            if self._num_waiting >= _MAX_WAITING:
                self._num_dropped += 1
                return
            self._thread = self._thread or CallThread("membership-log")
            self._thread.submit(partial(self._pass_on, record))
            self._num_waiting += 1

    def flush(self, seconds: float) -> bool:
        """Wait until all messages so far are handled, for so long at most; returns whether they are."""
        thread = self._thread
        return thread is None or not wait([thread.submit(int)], seconds).not_done

    def _pass_on(self, record: logging.LogRecord) -> None:
        with self._lock:
            self._num_waiting -= 1
            num_dropped, self._num_dropped = self._num_dropped, 0
        self._target.handle(record)
        if num_dropped:
            self._target.warning("%d messages were dropped while a handler of the log did not go on", num_dropped)


log = BackgroundLogger(NAME)
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=log.begin)

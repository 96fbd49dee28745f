"""The logger of memberships: a thread of its own hands messages to the handlers, so that nobody waits for these."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading

NAME = "gossip_modules.membership"
_MAX_WAITING = 1000  # messages
_EXIT_SECONDS = 1.0
_FORMATTER = logging.Formatter()


class BackgroundLogger(logging.Logger):
    """A logger whose messages are handled in a thread of its own, in their order.

    [Note: handlers that block] A handler may wait without limit: for a pipe that nobody reads, a terminal that is
    paused, a file system that is away. A thread that waited there would send no heartbeats, or hold a lock that others
    need. So a message is only put into a queue. It goes to the handlers of `logging.getLogger(name)` and its parents,
    with the time and the thread of the caller. More than 1,000 waiting messages are not kept; their number is logged
    when the handler goes on. At the end of the process one second is left for messages that still wait.

    Args:
        name: of the logger whose level, filters and handlers count.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._target = logging.getLogger(name)
        self._begin()

    def _begin(self) -> None:
        """Without messages and thread, as in a child that was forked."""
        self._lock = threading.RLock()  # of `_thread` and `_num_dropped`; no message is handled while it is held
        self._waiting: queue.SimpleQueue[logging.LogRecord | threading.Event] = queue.SimpleQueue()
        self._num_dropped = 0
        self._thread: threading.Thread | None = None

    def isEnabledFor(self, level: int) -> bool:
        """As the logger of this name."""
        return self._target.isEnabledFor(level)

    def handle(self, record: logging.LogRecord) -> None:
        """Leave a message to the thread. It is formatted here: an error among its arguments would keep frames alive."""
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text, record.exc_info = _FORMATTER.formatException(record.exc_info), None
        if self._waiting.qsize() < _MAX_WAITING:
            self._put(record)
        else:
            with self._lock:
                self._num_dropped += 1

    def flush(self, seconds: float) -> bool:
        """Wait until all messages so far are handled, for so long at most; returns whether they are."""
        if self._thread is None:
            return True
        is_handled = threading.Event()
        self._put(is_handled)
        return is_handled.wait(seconds)

    def _put(self, item: logging.LogRecord | threading.Event) -> None:
        self._waiting.put(item)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a handler has raised an error
                self._thread = threading.Thread(target=self._run, name="membership-log", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            with self._lock:
                num_dropped, self._num_dropped = self._num_dropped, 0
            self._target.handle(item)
            if num_dropped:
                self._target.warning("%d messages were dropped while a handler of the log did not go on", num_dropped)


log = BackgroundLogger(NAME)
atexit.register(log.flush, _EXIT_SECONDS)
os.register_at_fork(after_in_child=log._begin)

"""The end of a program that has not closed its asynchronous engines."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref

from .engine import Engine

_SECONDS = 3.0  # for all engines together

_makers: weakref.WeakKeyDictionary[Engine, threading.Thread] = weakref.WeakKeyDictionary()
_closing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def close_at_program_end(engine: Engine) -> None:
    """At the end of the program the engine closes, if nobody has closed it by then.

    [Note: programs that end] A peer takes a connection that closes without a shutdown message for the death of a rank,
    and fails. So a program that ends without `close()` sends that message too, for a few seconds at most, before
    Python's `atexit` functions end the threads of the engine. A program that an exception ends sends nothing, since its
    rank has failed; nor does an engine whose thread goes on training when the main thread has ended.
    """
    _makers[engine] = threading.current_thread()


def close_in_thread(engine: Engine) -> None:
    """Close the engine in a thread of its own, for which the end of the program waits for a few seconds at most."""

    def close() -> None:
        with contextlib.suppress(Exception):  # of peers: there is nobody left to tell
            engine.close()

    thread = threading.Thread(target=close, name="gossip-closing", daemon=True)
    _closing.add(thread)
    thread.start()


def _close_all() -> None:
    if getattr(sys, "last_value", None) is None:
        for engine, maker in tuple(_makers.items()):
            if not engine.is_closed and (maker is threading.main_thread() or not maker.is_alive()):
                close_in_thread(engine)  # all at once: a peer that does not answer keeps each of them for two seconds
    deadline = time.monotonic() + _SECONDS
    for thread in tuple(_closing):
        thread.join(max(deadline - time.monotonic(), 0.0))


threading._register_atexit(_close_all)  # type: ignore[attr-defined]

"""Wrappers that nobody closed: their threads end when the garbage collector finds them."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref

from ..engine.engine import Engine


def close_when_collected(wrapper: object, engine: Engine) -> None:
    """Close `engine` when `wrapper` is collected, if nobody has closed it by then.

    [Note: Lost wrappers] The threads of an asynchronous engine outlive a wrapper that nobody closed, and would go on
    giving its model to peers.
    """
    weakref.finalize(wrapper, _close, engine, type(wrapper).__name__).atexit = False  # at exit they just end


def _close(engine: Engine, name: str) -> None:
    """Runs in whichever thread collects garbage, which must not wait for peers: so a thread of its own closes."""
    if engine.is_closed:
        return

    def close() -> None:
        with contextlib.suppress(Exception):  # of peers: there is nobody left to tell
            engine.close()

    threading.Thread(target=close, name="gossip-closing", daemon=True).start()
    warnings.warn(f"a {name} was lost without close(): it leaves its peers now", ResourceWarning, stacklevel=2)

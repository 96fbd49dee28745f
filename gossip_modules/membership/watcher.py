"""The threads of memberships that read the roster, and what ends a membership with its process or training loop."""

from __future__ import annotations

import atexit
import gc
import inspect
import opcode
import threading
import weakref
from types import FrameType, TracebackType
from typing import Any

from ..transport import threads
from ..transport.uncaught_errors import leave_at_error
from .background_log import log

_RAISES = {opcode.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in opcode.opmap}
_live: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(membership: Any) -> threading.Thread:
    """The thread that takes turns of the membership's worker until it is closed, or freed."""
    leave_at_error(membership)
    job = membership.job
    _live.add(membership)
    return threads.start(_watch, weakref.ref(membership), job.wake, job.closed, name="gossip-membership")


def _watch(reference: weakref.ref[Any], wake: threading.Event, closed: threading.Event) -> None:
    while not closed.is_set():
        membership = reference()
        if membership is None:
            return
        try:
            seconds = membership.worker.turn()
        except Exception:  # noqa: BLE001 (without it, changes of the membership would go unnoticed)
            log.exception("job %s: the watcher of the membership goes on after an error", membership.name)
            seconds = 1.0
        del membership
        wake.wait(seconds)
        wake.clear()


@atexit.register
def _close_all() -> None:
    """End all waits before the exit of the interpreter joins the threads: see [Note: threads at exit] of `start`."""
    for membership in list(_live):
        membership.job.closed.set()
        membership.job.wake.set()
        if membership.worker.liveness is not None:
            membership.worker.liveness.close()
        for transport in membership.worker.generations.transports():  # of waits that an interrupt leaves under way
            transport.end_waits()


def ends_by_error(loop: FrameType | None) -> bool:
    """Whether a `for` whose generator is being closed is left by an error, and not by `break` or `return`.

    [Note: loops that end by an error] Python closes the generator of a `for` as soon as the loop is left, with the same
    GeneratorExit whatever the reason. The error itself is nowhere to be read then, but its traceback exists, and the
    place in it that belongs to the loop is the instruction at which the loop stands. After `break` or `return` the loop
    stands at an instruction that raises nothing. This is looked up once for each loop that is left early.

    Args:
        loop: the frame that closes the generator; generators between it and the `for`, such as a progress bar, are
            passed over.
    """
    while loop is not None and loop.f_code.co_flags & inspect.CO_GENERATOR:
        loop = loop.f_back
    if loop is None or loop.f_lasti < 0:
        return False
    is_raised_again = loop.f_code.co_code[loop.f_lasti] in _RAISES
    places = (found for found in gc.get_referrers(loop) if isinstance(found, TracebackType))
    return any(place.tb_frame is loop and (is_raised_again or place.tb_lasti == loop.f_lasti) for place in places)

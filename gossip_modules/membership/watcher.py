"""The threads of memberships that read the roster, and what ends a membership with its process or training loop."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import TYPE_CHECKING

from ..transport import threads
from .background_log import log
from .loop_error import hear_of_uncaught_errors

if TYPE_CHECKING:
    from .membership import Membership

_live: weakref.WeakSet[Membership] = weakref.WeakSet()


def watch(membership: Membership) -> threading.Thread:
    """The thread that takes turns of the membership's worker until it is closed, or freed."""
    hear_of_uncaught_errors(_end_liveness_in)
    job = membership.job
    _live.add(membership)
    return threads.start(_watch, weakref.ref(membership), job.wake, job.closed, name="gossip-membership")


def _watch(reference: weakref.ref[Membership], wake: threading.Event, closed: threading.Event) -> None:
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


def _end_liveness_in(thread: int | None) -> None:
    """Let the others go on at once; thread: that an error has ended; None: the process ends.

    [Note: errors that end a loop] A process may take seconds to end after an error: a script cleans up, threads are
    joined, and a program that runs out of memory is slow. So the liveness of the worker ends as soon as the error
    leaves the loop over `steps`, or when nothing catches it. A script that catches the error and trains on joins again,
    as a new worker does. A worker that is alone holds no other up.
    """
    for membership in list(_live):
        if thread in (None, membership.thread):
            membership.end_liveness()


@atexit.register
def _close_all() -> None:
    """End all waits before the exit of the interpreter joins the threads: see [Note: threads at exit]."""
    for membership in list(_live):
        membership.job.closed.set()
        membership.job.wake.set()
        if membership.worker.liveness is not None:
            membership.worker.liveness.close()
        for transport in membership.worker.generations.transports():  # of waits that an interrupt leaves under way
            transport.end_waits()

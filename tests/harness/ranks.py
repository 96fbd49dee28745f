"""Ranks as threads: what our tests need besides `gossip_modules.testing`."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from weakref import WeakSet

import torch.distributed as dist

from gossip_modules.testing import CPU, TIMEOUT, HangUp, run_ranks, thread_group

__all__ = [
    "CPU",
    "TIMEOUT",
    "HangUp",
    "assert_no_gossip_threads",
    "at_the_end",
    "end_threads",
    "forget_threads",
    "gossip_threads",
    "run_ranks",
    "solo_group",
    "thread_group",
]


def solo_group() -> dist.ProcessGroup:
    """A world of one."""
    return thread_group(dist.HashStore(), 0, 1)


def assert_no_gossip_threads() -> None:
    """All of the library's threads end in time: a thread that connects waits for each worker that has gone."""
    deadline = time.monotonic() + 1.5 * TIMEOUT.total_seconds()
    for thread in gossip_threads():
        thread.join(max(deadline - time.monotonic(), 0.0))
    stay = gossip_threads()
    stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()] if stay else []
    assert not stay, "\n\n".join([f"{stay} stay; the stacks of all threads:", *stacks])


_endings: list[Callable[[], None]] = []


def at_the_end(end: Callable[[], None]) -> None:
    """Call `end` after this test, also where it fails: threads that trained on would disturb the tests that follow."""
    _endings.append(end)


def end_threads() -> None:
    """See `at_the_end`."""
    endings = _endings[:]
    _endings.clear()
    for end in endings:
        end()


_threads_of_others: WeakSet[threading.Thread] = WeakSet()


def forget_threads() -> None:
    """Leave those that are alive now out of `gossip_threads`: listeners whose peers sent no shutdown stay behind."""
    _threads_of_others.update(threading.enumerate())


def gossip_threads() -> list[threading.Thread]:
    """The library's threads that are alive, of this test."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("gossip-") and thread not in _threads_of_others
    ]

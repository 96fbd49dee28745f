"""Threads: calls in a thread of their own, and the exit of the interpreter, which waits for threads in C++ code."""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
import threading

import pytest

from gossip_modules.transport.threads import CallThread, result_of

LIMIT = 20.0


def test_calls_are_made_in_turn_and_give_their_result_or_error() -> None:
    caller = CallThread("calls")
    numbers = iter(range(5))
    replies = [caller.call(lambda: next(numbers)) for _ in range(5)]
    assert [result_of(reply) for reply in replies] == list(range(5))
    with pytest.raises(ZeroDivisionError):
        result_of(caller.call(lambda: 1 // 0))
    may_end = threading.Event()
    with pytest.raises(queue.Empty):
        result_of(caller.call(lambda: may_end.wait(LIMIT)), timeout=0.01)
    may_end.set()


def test_the_thread_goes_with_the_object() -> None:
    caller = CallThread("calls")
    thread = caller.thread
    assert thread.daemon
    del caller
    gc.collect()
    thread.join(LIMIT)
    assert not thread.is_alive()


EXIT = """
import atexit, time

times = []
atexit.register(lambda: print(f"{time.monotonic() - times[0]:.1f} s"))  # the last handler
from gossip_modules.transport import threads

idle = threads.CallThread("idle")
stuck = [threads.start(time.sleep, 60.0, name="stuck") for _ in range(5)]
busy = threads.CallThread("busy")
busy.call(lambda: (time.sleep(0.2), print("made", flush=True)))
atexit.register(lambda: times.append(time.monotonic()))  # the first one
"""


def test_all_threads_have_one_second_at_exit() -> None:
    result = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=55, check=True)
    made, seconds = result.stdout.splitlines()
    assert made == "made"
    assert 1.0 <= float(seconds.split()[0]) < 4.0, "a second, for all of them together"

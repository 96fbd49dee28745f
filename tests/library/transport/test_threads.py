"""Threads: calls in a thread of their own, and the exit of the interpreter, which waits for threads in C++ code."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import Future
from datetime import timedelta

import pytest

from gossip_modules.transport.threads import CallThread

LIMIT = 20.0


def test_calls_are_made_in_turn_and_give_their_result_or_error() -> None:
    caller = CallThread("calls")
    numbers = iter(range(5))
    results = [caller.submit(lambda: next(numbers)) for _ in range(5)]
    assert [future.result(LIMIT) for future in results] == list(range(5))
    with pytest.raises(ZeroDivisionError):
        caller.submit(lambda: 1 // 0).result(LIMIT)
    caller.close()
    assert not caller.thread.is_alive()


def test_the_thread_goes_with_the_object() -> None:
    caller = CallThread("calls")
    thread = caller.thread
    assert thread.daemon
    del caller
    gc.collect()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_a_job_after_close_is_refused_as_nothing_would_run_it() -> None:
    thread = CallThread("gossip-test")
    thread.close()
    with pytest.raises(RuntimeError, match=r"got a job for the thread gossip-test after its close\(\)"):
        thread.submit(lambda: 0.0)
    thread.thread.join(LIMIT)
    assert not thread.thread.is_alive()


def test_a_job_that_a_thread_has_lost_or_hangs_in_is_not_waited_for_without_limit() -> None:
    thread, go_on = CallThread("gossip-test"), threading.Event()
    stuck = thread.submit(lambda: float(go_on.wait(LIMIT)))
    with pytest.raises(TimeoutError, match=r"with ranks \[1\] has not ended after .* gossip-test still runs it"):
        thread.result(stuck, what=lambda: "round 3 with ranks [1]", timeout=timedelta(microseconds=1))
    go_on.set()
    assert thread.result(stuck, what=str, timeout=timedelta(seconds=LIMIT)) == 1.0
    thread.close()
    lost: Future[float] = Future()
    with pytest.raises(TimeoutError, match=r"round 4 has not ended .* gossip-test has ended without it"):
        thread.result(lost, what=lambda: "round 4", timeout=timedelta(seconds=LIMIT))
    thread.thread.join(LIMIT)
    assert not thread.thread.is_alive()


EXIT = """
import atexit, time

times = []
atexit.register(lambda: print(f"{time.monotonic() - times[0]:.1f} s"))  # the last handler
from gossip_modules.transport import threads

idle = threads.CallThread("idle")
stuck = [threads.start(time.sleep, 60.0, name="stuck") for _ in range(5)]
busy = threads.CallThread("busy")
busy.submit(lambda: (time.sleep(0.2), print("made", flush=True)))
atexit.register(lambda: times.append(time.monotonic()))  # the first one
"""


def test_all_threads_have_one_second_at_exit() -> None:
    result = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=55, check=True)
    made, seconds = result.stdout.splitlines()
    assert made == "made"
    assert 1.0 <= float(seconds.split()[0]) < 4.0, "a second, for all of them together"

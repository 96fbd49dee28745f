"""A virtual clock lets threads take turns, jumps in time, kills processes, and names threads that cannot go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from gossip_modules.lab.virtual_clock import VirtualClock, VirtualThread


def traced(clock: VirtualClock, num_threads: int = 3, num_sleeps: int = 3) -> list[tuple[int, float]]:
    """Run threads that sleep for whole seconds; returns the order in which they woke."""
    trace: list[tuple[int, float]] = []

    def body(i: int) -> Callable[[], None]:
        def sleep() -> None:
            for _ in range(num_sleeps):
                clock.sleep(1.0)
                trace.append((i, clock.now()))

        return sleep

    for i in range(num_threads):
        clock.start(body(i), f"thread {i}")
    assert clock.run()
    return trace


def test_time_jumps_to_the_next_wake_up_and_ties_are_in_the_order_of_waits() -> None:
    assert traced(VirtualClock()) == [(i, float(t)) for t in (1, 2, 3) for i in range(3)]


def test_a_seed_draws_the_order_of_ties_and_equal_seeds_are_equal() -> None:
    orders = {tuple(traced(VirtualClock(seed=seed))) for seed in (0, 0, 1, 2)}
    assert len(orders) == 3
    assert all(sorted(order) == sorted(traced(VirtualClock())) for order in orders)


def test_exactly_one_thread_runs() -> None:
    clock, inside = VirtualClock(), []
    num_most = [0]

    def body() -> None:
        for _ in range(20):
            inside.append(threading.get_ident())
            num_most[0] = max(num_most[0], len(inside))
            time.sleep(0)  # another thread of Python could run
            inside.pop()
            clock.sleep(0.0)

    for i in range(4):
        clock.start(body, f"thread {i}")
    assert clock.run()
    assert num_most == [1]


def test_join_ends_with_the_thread_or_with_the_timeout() -> None:
    clock, times = VirtualClock(), []

    def body() -> None:
        other = clock.start(lambda: clock.sleep(5.0), "other")
        other.join(2.0)
        times.append(clock.now())
        other.join()
        times.append(clock.now())
        other.join()
        times.append(clock.now())

    clock.start(body, "joining")
    assert clock.run()
    assert times == [2.0, 5.0, 5.0]


def test_a_run_stops_at_a_time_and_goes_on() -> None:
    clock = VirtualClock()
    clock.start(lambda: clock.sleep(3.0), "thread")
    assert not clock.run(until=2.0)
    assert clock.now() == 2.0
    assert clock.run()
    assert clock.now() == 3.0


def test_kill_ends_all_threads_of_a_process_and_passes_handlers_of_exceptions() -> None:
    clock, beats = VirtualClock(), dict[str, list[float]](a=[], b=[])

    def beat(name: str) -> None:
        while True:
            try:
                clock.sleep(1.0)
            except Exception:  # noqa: BLE001 (of a user)
                beats[name].append(-1.0)
            beats[name].append(clock.now())

    def process(name: str) -> None:
        clock.start(lambda: beat(name), "beats")
        clock.sleep(5.0)
        beats[name].append(100.0)

    first = clock.start(lambda: process("a"), "a")
    clock.start(lambda: process("b"), "b")
    clock.run(until=2.5)
    clock.kill(first)
    assert clock.run()
    assert beats == {"a": [1.0, 2.0], "b": [1.0, 2.0, 3.0, 4.0, 100.0]}
    clock.close()


def test_the_end_of_the_first_threads_is_the_end_of_the_run_and_close_ends_the_rest() -> None:
    clock, ends = VirtualClock(), []

    def body() -> None:
        def background() -> None:
            try:
                clock.sleep(10.0)
            finally:
                ends.append(clock.now())

        clock.start(background, "background")
        clock.sleep(1.0)

    clock.start(body, "process")
    assert clock.run()
    assert ends == []
    clock.close()
    clock.close()
    assert ends == [1.0]


def test_threads_that_wait_for_each_other_are_named() -> None:
    clock, threads = VirtualClock(), list[VirtualThread]()
    threads += [clock.start(lambda: threads[1].join(), "left"), clock.start(lambda: threads[0].join(), "right")]
    with pytest.raises(RuntimeError, match=r"left \(0\), right \(1\): got threads that all wait for each other at 0 s"):
        clock.run()
    clock.close()


def test_a_thread_that_does_not_wait_is_named_with_its_place() -> None:
    clock, opened = VirtualClock(patience=0.05), threading.Event()
    clock.start(lambda: opened.wait(10.0), "stuck")
    with pytest.raises(RuntimeError, match=r"(?s)stuck \(0\): got 0.05 s of real time.*opened.wait"):
        clock.run()
    opened.set()


def test_the_error_of_a_thread_is_raised() -> None:
    clock = VirtualClock()
    clock.start(lambda: 1 / 0, "thread")
    with pytest.raises(ZeroDivisionError):
        clock.run()
    clock.close()


def test_a_wait_outside_of_the_clock_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"got a wait of the thread .*expected one that start\(\)"):
        VirtualClock().sleep(1.0)

"""VirtualClock: real threads that take turns, with a time that jumps to the next wake-up."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
import threading
import traceback
from collections.abc import Callable

from ..mailbox.clock import Clock


class ProcessKilled(BaseException):
    """Ends the threads of a process that was killed; no code catches it, apart from the end of a thread."""


class VirtualThread:
    """A thread of a `VirtualClock`.

    Args:
        clock: its clock.
        target: the function that it calls.
        name: its name.
        process: the first thread of its process; None: this one.
        number: the number of threads that were started before it.

    Attributes:
        has_ended: whether the function has returned.
        is_killed: whether its next wait raises `ProcessKilled`.
    """

    def __init__(
        self, clock: VirtualClock, target: Callable[[], object], name: str, process: VirtualThread | None, number: int
    ) -> None:
        self.clock, self.target, self.name, self.number = clock, target, name, number
        self.process = process or self
        self.has_ended = self.is_killed = False
        self.error: BaseException | None = None
        self._turn = threading.Semaphore(0)
        self._ticket = -1  # the number of its present wait
        self._wake = 0.0  # the end of that wait
        self._joining: list[VirtualThread] = []  # threads that wait for its end
        self._ident: int | None = None

    def join(self, timeout: float | None = None) -> None:
        """See `Joinable`."""
        if not self.has_ended:
            self.clock._join(self, math.inf if timeout is None else timeout)

    def __str__(self) -> str:
        return f"{self.name} ({self.number})"


class VirtualClock(Clock):
    """A clock for tests and simulations of code whose waits and threads go through `Clock`.

    Threads are real threads. Exactly one runs at a time, so they need no locks. A thread runs until it sleeps,
    joins another one or ends. Then the thread with the earliest wake-up runs, and the time jumps there. Computing takes
    no time. Among equal wake-ups the thread with the longest wait is first, or with a seed a drawn one. So equal
    programs have equal runs.

    A thread that another one starts belongs to its process. `kill` ends all threads of a process, as kill -9 does: the
    next wait of each raises an error that passes all handlers of `Exception`.

    Args:
        seed: draws the order of equal wake-ups; None: the order in which the waits began.
        patience: seconds of real time after which a thread that does not wait is an error.

    Example:
        >>> clock = VirtualClock()
        >>> ends = []
        >>> for seconds in (2.0, 1.0):
        ...     thread = clock.start(lambda s=seconds: (clock.sleep(s), ends.append(clock.now())), "worker")
        >>> clock.run()
        True
        >>> ends
        [1.0, 2.0]
    """

    def __init__(self, *, seed: int | None = None, patience: float = 60.0) -> None:
        self._now = 0.0
        self._random = None if seed is None else random.Random(seed)
        self._patience = patience
        self._tickets = itertools.count()
        self._waiting: list[tuple[float, float, int, VirtualThread]] = []
        self._threads: list[VirtualThread] = []  # those that have not ended
        self._num_threads = self._num_turns = 0
        self._local = threading.local()
        self._running: VirtualThread | None = None
        self._last_look = -1  # the number of turns at the last look at a thread that does not wait
        self._until = 0.0
        self._back = threading.Semaphore(0)  # the turn of the thread that called `run`
        self._is_closed = False

    # The clock of the threads.

    def now(self) -> float:
        """See `Clock`; the first time is 0."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """See `Clock`. Other threads run meanwhile, also if `seconds` is 0."""
        self._wait(self._own(), self._now + seconds)

    def start(self, target: Callable[[], object], name: str) -> VirtualThread:
        """See `Clock`. A thread outside of the clock starts a new process."""
        own: VirtualThread | None = getattr(self._local, "thread", None)
        thread = VirtualThread(self, target, name, own and own.process, self._num_threads)
        self._num_threads += 1
        self._threads.append(thread)
        self._schedule(thread, self._now)
        super().start(lambda: self._run(thread), name)
        return thread

    # The outside.

    def run(self, until: float = math.inf) -> bool:
        """Let the threads run; returns whether the first threads of all processes have ended.

        Args:
            until: the time at which threads stop; a later call lets them go on.

        Raises:
            RuntimeError: all threads wait for each other; or one runs for too long.
            BaseException: the error of a thread.
        """
        if not self._has_processes:
            return True
        self._let_run(until)
        if self._has_processes and self._has_no_end:
            waits = ", ".join(map(str, self._threads))
            raise RuntimeError(f"{waits}: got threads that all wait for each other at {self._now:g} s, expected an end")
        if self._has_processes:
            self._now = max(self._now, until)
        return not self._has_processes

    def kill(self, thread: VirtualThread) -> None:
        """Kill the process of a thread now."""
        for own in [own for own in self._threads if own.process is thread.process and not own.is_killed]:
            own.is_killed = True
            if own is not self._running:
                self._schedule(own, self._now)

    def close(self) -> None:
        """Kill all processes. Idempotent."""
        self._is_closed = True
        for thread in list(self._threads):
            self.kill(thread)
        while self._threads:
            self._let_run(self._now)

    # Turns.

    @property
    def _has_processes(self) -> bool:
        return any(thread.process is thread for thread in self._threads)

    @property
    def _has_no_end(self) -> bool:
        """Whether no wait has an end."""
        return not self._waiting or self._waiting[0][0] == math.inf

    def _let_run(self, until: float) -> None:
        self._until = until
        self._hand_over()
        while not self._back.acquire(timeout=self._patience):
            self._check_turns()
        if failed := [thread for thread in self._threads if thread.error is not None]:
            self._threads.remove(failed[0])
            assert failed[0].error is not None, "it has just been looked at"
            raise failed[0].error

    def _own(self) -> VirtualThread:
        own: VirtualThread | None = getattr(self._local, "thread", None)
        if own is None:
            name = threading.current_thread().name
            raise RuntimeError(f"got a wait of the thread {name}, expected one that start() of this clock has started")
        return own

    def _schedule(self, thread: VirtualThread, wake: float) -> None:
        thread._ticket, thread._wake = next(self._tickets), wake
        tie = 0.0 if self._random is None else self._random.random()
        heapq.heappush(self._waiting, (wake, tie, thread._ticket, thread))

    def _wait(self, own: VirtualThread, wake: float) -> None:
        if not own.is_killed:
            self._schedule(own, wake)
            self._hand_over()
            own._turn.acquire()
        if own.is_killed:
            raise ProcessKilled

    def _join(self, thread: VirtualThread, seconds: float) -> None:
        own = self._own()
        thread._joining.append(own)
        try:
            self._wait(own, self._now + seconds)
        finally:
            thread._joining.remove(own)

    def _hand_over(self) -> None:
        """Let the next thread run, or the thread that called `run`; the thread of this call waits afterwards."""
        while self._waiting and self._waiting[0][2] != self._waiting[0][3]._ticket:
            heapq.heappop(self._waiting)  # a wait that has ended before
        can_go_on = self._is_closed or self._has_processes
        if not can_go_on or self._has_no_end or self._waiting[0][0] > self._until:
            self._running = None
            self._back.release()
            return
        wake, *_, thread = heapq.heappop(self._waiting)
        self._now, self._running = max(self._now, wake), thread
        self._num_turns += 1
        thread._turn.release()

    def _run(self, thread: VirtualThread) -> None:
        self._local.thread, thread._ident = thread, threading.get_ident()
        thread._turn.acquire()
        try:
            if not thread.is_killed:
                thread.target()
        except ProcessKilled:
            pass
        except BaseException as error:  # noqa: BLE001 (raised by `run`)
            thread.error = error
        thread.has_ended = True
        for other in thread._joining:
            self._schedule(other, self._now)
        if thread.error is None:
            self._threads.remove(thread)
            self._hand_over()
        else:
            self._running = None
            self._back.release()

    def _check_turns(self) -> None:
        """Raise RuntimeError if one thread has run since the last call."""
        num_turns, self._last_look = self._last_look, self._num_turns
        thread = self._running
        if thread is None or num_turns != self._num_turns:
            return
        frame = sys._current_frames().get(thread._ident or 0)
        place = "".join(traceback.format_stack(frame, 3)) if frame else ""
        raise RuntimeError(
            f"{thread}: got {self._patience:g} s of real time without a wait, expected sleep() or join() of the clock; "
            f"a lock that a sleeping thread holds never opens:\n{place}"
        )

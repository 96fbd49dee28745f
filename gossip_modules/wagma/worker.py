"""WaitAvoidingWorker: the thread that runs the group average of each round once some rank has arrived there."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
from collections.abc import Callable

import torch
from torch.profiler import record_function

from ..engine.background import Background
from ..engine.engine import EngineStats
from ..flat.nonfinite import check_policy, is_finite, refuse
from ..flat.vector import FlatVector
from ..transport.process_group import ProcessGroupTransport
from .control import ControlChannel, ControlKind, ControlMessage
from .failure_detector import FailureDetector
from .group_average import GroupAverage
from .group_result import GroupResult
from .peer_status import Activity
from .published_model import PublishedModel

_CLOSE_SECONDS = 2.0
_FOR_DETECTOR = (ControlKind.STATUS_REQUEST, ControlKind.STATUS, ControlKind.FAILED)


class WaitAvoidingWorker:
    """The threads of a rank, and what they share with training behind one lock, `state`.

    The worker thread of a rank runs:

        for round t = 0, 1, 2, ...:
            wait until training has arrived at t, or a neighbour says that some rank has
            send ARRIVED(t) to the out-neighbours, which wakes their workers
            if t is averaged globally: wait until training has done that; continue
            y <- what training has published last         (under `state`)
            average <- mean of y over the group           (without any lock)
            result <- average; num_done <- t + 1          (under `state`)

    so each round runs once and in order, whichever rank arrived there first.

    [Note: locks of WAGMA] `state` is a condition over the lock of `published`, so one lock guards y, the result and all
    counters. It is reentrant, and nobody holds it while waiting for a peer: the worker averages without it, training
    waits in `Condition.wait`, which releases it, and `ControlChannel.send` is called without it. A thread that holds it
    may take the channel's `_posting`, which in turn is never held while waiting or while taking another lock. So
    neither two threads of a rank nor two ranks can wait for each other's locks.

    [Note: daemons at exit] A daemon thread that wakes inside C++ code while the interpreter ends would abort the
    process. So at exit this rank closes its connections, which ends every wait of its threads, and joins them.

    Attributes and methods are for threads that hold `state`, except where the docstring says otherwise.

    Args:
        average: the group average, over Gloo, with messages in CPU memory; `average.transport` carries nothing else.
        x: the parameters; published as those of round -1.
        sync_period: the number of rounds from one global average to the next; 0 = never.
        stats: mutated: one round per group average, with the number of rounds since y was published.
        on_nonfinite: "raise" an error on the rank whose y is not finite, before other ranks get it; "skip": take y
            itself in the place of an average that is not finite; "spread": do not check.

    Attributes:
        num_started, num_done: the number of rounds whose average has begun, and is complete.
        newest_arrival: the newest round at which some rank has arrived.
        published: y, the model that this rank contributes.
        is_held: whether no round may start, until `release`.
        barrier_messages: what neighbours have sent to the barriers of this rank, by (kind, barrier_id, stage).
    """

    def __init__(
        self,
        average: GroupAverage,
        x: FlatVector,
        *,
        sync_period: int,
        stats: EngineStats,
        on_nonfinite: str = "raise",
    ) -> None:
        transport = average.transport
        assert isinstance(transport, ProcessGroupTransport), "control messages need a process group"
        self.transport = transport
        self.on_nonfinite = check_policy(on_nonfinite)
        self.channel = ControlChannel(transport)
        self.published = PublishedModel(x)
        self.state = threading.Condition(self.published.shared.lock)
        self.result = GroupResult(self.published.shared, x)  # after round num_done - 1
        self.barrier_messages: dict[tuple[ControlKind, int, int], ControlMessage] = {}
        self.num_beginnings = 0
        self._average, self._sync_period, self._stats = average, sync_period, stats
        self._background = Background()
        self.detector = self._make_detector()
        self.detector.partner = lambda: average.partner
        self._is_closing = False
        self._worker_ended = threading.Event()
        self.set_round(0)
        atexit.register(self._exit)
        for peer in self.channel.neighbours:
            self._start(f"gossip-listener-{transport.rank}-{peer}", functools.partial(self._listen, peer))
        self._start(f"gossip-worker-{transport.rank}", self._work)
        self._start(f"gossip-watch-{transport.rank}", self._watch)

    def _make_detector(self) -> FailureDetector:
        return FailureDetector(self.channel, self.state, self._background, timeout=self.transport.timeout)

    def _watch(self) -> None:
        """The body of the detector's thread."""
        self.detector.run()

    def set_round(self, t: int) -> None:
        """Put training at round t while no round runs; none starts before `release()`."""
        self._next = self.num_started = self.num_done = t
        self.newest_arrival = self.published.t = t - 1
        self.is_held = True

    def begin(self) -> int:
        """Count a beginning: ARRIVED messages of earlier ones are ignored from now on. Returns its number."""
        self.num_beginnings += 1
        self.newest_arrival = self.num_done - 1
        return self.num_beginnings

    def release(self) -> None:
        """Let rounds start: all ranks are in one round, and the published model is the one that peers should get."""
        self.is_held = False
        self.state.notify_all()

    def next_global(self, t: int) -> int | None:
        """The first round from t on that is averaged globally; None = none is."""
        return (t // self._sync_period + 1) * self._sync_period - 1 if self._sync_period else None

    def arrive_at(self, t: int) -> None:
        """Note that some rank has arrived at round t, which starts the rounds up to there."""
        self.newest_arrival = max(self.newest_arrival, t)
        self.state.notify_all()

    def finish_global(self, t: int) -> None:
        """Note that training has averaged round t over all ranks."""
        self.num_started = self.num_done = t + 1
        self.state.notify_all()

    def wait_for(self, is_over: Callable[[], bool], what: str, *, t: int) -> None:
        """Release the lock until `is_over()`. Called by the training thread.

        Args:
            is_over: called with the lock.
            what: what is waited for, for errors.
            t: the round of training, for errors.

        Raises:
            TimeoutError, ConnectionError: a peer is late or gone; names it, see `FailureDetector`.
        """
        detector = self.detector
        detector.round, detector.activity = t, Activity.GROUP
        try:
            with detector.waiting(what, detector.partner):
                self.wait(is_over)
        finally:
            detector.activity = Activity.TRAINING

    def wait(self, is_over: Callable[[], bool], *, seconds: float | None = None) -> bool:
        """Release the lock until `is_over()`, at most for `seconds`; returns whether it is over."""

        def is_over_or_failed() -> bool:
            if is_over():
                return True
            self.raise_if_failed()
            return False

        start = time.perf_counter()
        with record_function("gossip.wait"):
            is_in_time = self.state.wait_for(is_over_or_failed, seconds)
        self._stats.wait_seconds += time.perf_counter() - start
        return is_in_time

    def raise_if_failed(self) -> None:
        """Raise the error that ended a thread, if any did. With or without the lock."""
        self._background.raise_if_failed()

    def close(self, *, error: BaseException | None = None) -> None:
        """End the threads once rounds at which some rank has arrived are done; within seconds, whatever peers do.

        Call it without the lock, from the training thread or at exit. Idempotent. Raises the error that ended a thread,
        if it has not been raised before. The listening thread of a neighbour that is stopped stays behind, as a daemon.

        Args:
            error: an error of this rank's own code, because of which it leaves at once: the others fail, and name it.
        """
        if self._is_closing:
            return
        if error is not None:
            self.detector.leave(error)
        with self.state:
            self._is_closing = True
            self.state.notify_all()
        if self._worker_ended.wait(_CLOSE_SECONDS):
            self.channel.wait_until_last_sent()
        else:
            self.channel.post_last(ControlMessage(ControlKind.SHUTDOWN))
        self.detector.end()
        if not self._background.close() and self.detector.has_failed:
            self.channel.close_connections()
            self._background.close()
        atexit.unregister(self._exit)
        self.channel.transport.close()
        if error is None:
            self._background.raise_if_unseen()

    def _exit(self) -> None:
        """[Note: daemons at exit]"""
        with contextlib.suppress(Exception):
            self.close(error=SystemExit("the program ended"))
        if not self.channel.transport.is_closed:
            self.channel.close_connections()
        self._background.close()

    def _start(self, name: str, body: Callable[[], None]) -> None:
        def run() -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001 (raised in the training thread, which is woken for it)
                self.detector.leave(error)

        self._background.start(name, run)

    def _listen(self, peer: int) -> None:
        """The body of a listening thread. Takes `state` without waiting for anything inside."""
        try:
            self.channel.listen(peer, self._handle)
        except ConnectionError as error:
            if not self._is_closing:
                self.detector.lose(peer, error)

    def _handle(self, sender: int, message: ControlMessage) -> None:
        """Handle a control message. Called by the listening thread of that neighbour."""
        if message.kind in _FOR_DETECTOR:
            self.detector.handle(sender, message)
            return
        with self.state:
            if message.kind is ControlKind.ARRIVED:
                if message.barrier_id == self.num_beginnings:  # else it is from before something was loaded
                    self.arrive_at(message.round)
                return
            if message.kind is not ControlKind.SHUTDOWN:
                self.barrier_messages[message.kind, message.barrier_id, message.stage] = message
            self.state.notify_all()

    def _work(self) -> None:
        """The body of the worker thread."""
        try:
            while (message := self._next_message()) is not None:
                with self.detector.waiting(f"telling others of round {message.round}", self.detector.partner):
                    self.channel.send(message)
                t = message.round
                if t != self.next_global(t):
                    self._run(t)
        except (ConnectionError, TimeoutError):
            assert self.detector.has_failed, "waiting() makes it the failure"
        finally:
            if not self.detector.has_failed:
                self.channel.post_last(ControlMessage(ControlKind.SHUTDOWN))
            self._worker_ended.set()

    def _next_message(self) -> ControlMessage | None:
        """Wait for the next round to run; its ARRIVED message. None = this rank closes, and no round is left to run."""

        def is_runnable() -> bool:
            return not self.is_held and self.newest_arrival >= self._next <= self.num_done

        with self.state:
            self.state.wait_for(lambda: self._is_closing or self.detector.has_failed or is_runnable())
            if self.detector.has_failed or not is_runnable():
                return None
            self._next += 1
            return ControlMessage(ControlKind.ARRIVED, self._next - 1, self.num_beginnings)

    def _run(self, t: int) -> None:
        """Average round t over the group. Called by the worker thread; holds no lock while peers are waited for."""
        with self.state:
            self.result.take_snapshot()
            self.num_started = t + 1
            self._stats.record(t - self.published.t)
        average = self.result.accumulator  # only this thread exchanges it with the result
        if self.on_nonfinite == "raise" and not is_finite(average):
            refuse(self.transport.names[self.transport.rank], f"round {t}")
        waiting = self.detector.waiting(f"the group average in round {t}", self.detector.partner)
        with waiting, torch.no_grad(), record_function("gossip.round", f"t={t}"):
            self._average.mix(average, t)
        is_skipped = self.on_nonfinite == "skip" and not is_finite(average)
        with self.state:
            self.result.finish(is_skipped=is_skipped)
            self._stats.num_skipped += is_skipped
            self.num_done = t + 1
            self.state.notify_all()

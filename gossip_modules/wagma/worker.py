"""WaitAvoidingWorker: the thread for group averages. It runs each round once some rank has arrived there."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import torch

from ..engine.engine import EngineStats
from ..engine.liveness import Activity, ControlMessage, Liveness
from ..engine.snapshots import SnapshotPool
from ..flat.nonfinite import check_policy
from ..flat.vector import FlatVector
from ..profiling import span
from ..transport import threads
from ..transport.process_group import ProcessGroupTransport
from .group_average import GroupAverage
from .group_result import GroupResult, LentModel

_CLOSE_SECONDS = 2.0
ARRIVED, SETTLING = 0, 1  # the kinds of control messages


def control_peers(rank: int, world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the receivers and the senders of a rank's control messages.

    They are at distances 1, 2, 4, ... modulo the world size. If every rank forwards a message once to all its
    out-peers, it reaches all ranks in ceil(log2 n) hops, from any rank and for any world size. All members of a rank's
    groups are among its peers.
    """
    distances = [1 << i for i in range((world_size - 1).bit_length())]
    out_peers = tuple((rank + distance) % world_size for distance in distances)
    return out_peers, tuple((rank - distance) % world_size for distance in distances)


class WaitAvoidingWorker:
    """The threads of a rank, and their state, shared with training behind one lock, `state`.

    The worker thread of a rank runs:

        for round t = 0, 1, 2, ...:
            wait until training has arrived at t, or a peer says that some rank has
            send ARRIVED(t) to the out-peers, which wakes their workers
            if t is averaged globally: wait until training has done that; continue
            y <- the model that training published last   (under `state`; y is not written until the round has ended)
            average <- mean of y over the group           (without any lock but for a chunk)
            result <- average; num_done <- t + 1          (under `state`)

    so each round runs once and in order, whichever rank arrived there first.

    [Note: averages in place] Training on time waits for the average. So it lends its model x to the round: chunk by
    chunk the worker copies x to y, checks it and sends it, and writes the average over x. If the round fails, x gets
    its chunks back from y. The worker writes a chunk under `state` and looks for a failure before, so x does not change
    after a failure of this rank.

    [Note: locks of WAGMA] `state` is a condition over the lock of `published`, so one lock guards y, the result and all
    counters. It is reentrant, and no thread holds it during a wait for a peer: the worker averages without it,
    training waits in `Condition.wait`, and `Liveness` is called without it. So neither two threads of a rank nor two
    ranks can wait for each other's locks.

    [Note: vectors of WAGMA] Beside the model a rank needs y, and if late the average, as long as training is less than
    a round late. If a training step arrives during its round, it waits for the end of the round before it publishes, so
    that y needs no second vector; it waits for the average anyway. From there until it has merged the average, no later
    round starts, so that the average needs none either. A later rank, or a late one with `overlap`, does not wait for
    the running round. It takes up to two more vectors, and returns them in its next round on time.

    Hold `state` to use attributes and methods, unless the docstring says otherwise.

    Args:
        average: the group average, over Gloo, with messages in CPU memory; `average.transport` carries nothing else.
        x: the parameters; published as the model of round -1.
        sync_period: the number of rounds from one global average to the next; 0 = never.
        stats: mutated: one round per group average, with the number of rounds since y was published.
        on_nonfinite: "raise" an error on the rank with an infinite or NaN y, before other ranks get it; "spread": do
            not check.

    Attributes:
        published: the latest is y, the contribution of this rank, with the round of its publication.
        control: the transport of control messages.
        liveness: the control messages and the failures of this rank.
        out_peers, in_peers: see `control_peers`.
        num_started, num_done: the number of rounds with a started, and with a complete, average.
        newest_arrival: the newest round with an arrival of some rank.
        is_held: whether no round may start, until `release`.
        is_idle: whether no rank waits for this one: failures of others are raised by the next `engage`, not by `close`.
        num_settled: the number of barriers that this rank has entered, in this generation.
        settling: the newest round known to a peer, by (number of the barrier, stage).
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
        self.control = copy.deepcopy(transport)  # control messages have a channel of their own
        self.on_nonfinite = check_policy(on_nonfinite)
        self.published = SnapshotPool(x)
        self.publish(x, t=-1)
        self.state = threading.Condition(self.published.lock)
        self.result = GroupResult(self.published)  # after round num_done - 1
        self.settling: dict[tuple[int, int], int] = {}
        self.num_beginnings = self.num_settled = 0
        self.is_idle = True
        self.average, self._sync_period, self._stats = average, sync_period, stats
        self._lent: LentModel | None = None
        self._is_closing = False
        self._last = math.inf  # no round after this one starts
        self.set_round(0)
        self.out_peers, self.in_peers = control_peers(transport.rank, transport.world_size)
        self.liveness = Liveness(self.control, {*self.out_peers, *self.in_peers})
        average.writing, average.is_checked = partial(_writing, self.state, self.liveness), on_nonfinite == "raise"
        self.liveness.failed.add_done_callback(partial(_wake, self.state))
        self.liveness.listen(self._handle)
        self._rounds_ended = threading.Event()
        self.liveness.background.start(f"gossip-worker-{transport.rank}", self._run_rounds)

    def set_round(self, t: int) -> None:
        """Put training at round t while no round runs; none starts before `release()`."""
        self._next = self.num_started = self.num_done = t
        self.newest_arrival = self.published.latest.standing = t - 1
        self.is_held = True

    def begin(self) -> None:
        """Count a beginning: ARRIVED messages of earlier ones are ignored from now on."""
        self.num_beginnings += 1
        self.newest_arrival = self.num_done - 1

    def release(self) -> None:
        """Let rounds start: all ranks are in one round, and the published model is ready for peers."""
        self.is_held = False
        self.state.notify_all()

    def publish(self, x: FlatVector, *, t: int) -> None:
        """y <- x, the model of round t."""
        self.published.publish(x, t)

    def lend(self, x: FlatVector, *, t: int) -> LentModel:
        """As `publish`, but round t copies x, and then writes its average to x: see [Note: averages in place]."""
        self.published.check(x)
        y = self.published.latest
        y.standing, self._lent = t, LentModel(x, y.vector)
        return self._lent

    @contextlib.contextmanager
    def holding_back(self, t: int) -> Iterator[None]:
        """A context without starts of rounds after t: see [Note: vectors of WAGMA]."""
        self._last = t
        try:
            yield
        finally:
            self._last = math.inf
            self.state.notify_all()

    def next_global(self, t: int) -> int | None:
        """The first round from t on that is averaged globally; None = none is."""
        return (t // self._sync_period + 1) * self._sync_period - 1 if self._sync_period else None

    def arrive_at(self, t: int) -> None:
        """Note that some rank has arrived at round t; rounds up to there may start."""
        self.newest_arrival = max(self.newest_arrival, t)
        self.state.notify_all()

    def finish_global(self, t: int) -> None:
        """Note that training has averaged round t over all ranks."""
        self.num_started = self.num_done = t + 1
        self.state.notify_all()

    def engage(self) -> None:
        """Let failures of other ranks count from here on; raise the first one, if there is one. Without the lock."""
        self.is_idle = False
        self.liveness.raise_if_failed()

    def wait_for(self, is_over: Callable[[], bool], what: str) -> None:
        """Release the lock until `is_over()`, a group average. Called by the training thread.

        Raises:
            TimeoutError, ConnectionError: a peer is late or gone; names it, see `Liveness`.
        """
        with self.liveness.waiting(what, lambda: self.average.partner, activity=Activity.EXCHANGING):
            self.wait(is_over)

    def wait(self, is_over: Callable[[], bool], *, seconds: float | None = None) -> bool:
        """Release the lock until `is_over()`, at most for `seconds`; returns whether it is over."""

        def is_over_or_failed() -> bool:
            if is_over():
                return True
            self.liveness.raise_if_failed()
            return False

        start = time.perf_counter()
        with span("gossip.wait"):
            is_in_time = self.state.wait_for(is_over_or_failed, seconds)
        self._stats.wait_seconds += time.perf_counter() - start
        return is_in_time

    def close(self, *, error: BaseException | None = None) -> None:
        """End the threads after the rounds with an arrival of some rank; takes seconds at most, whatever peers do.

        Call it without the lock, from the training thread. Idempotent. Raises the failure of this rank, if it has not
        been raised before and the rank is not idle. If a peer is stopped, its listening thread stays behind, as a
        daemon.

        Args:
            error: an error in the code of this rank. The rank then leaves at once; the others fail and name it.
        """
        if self._is_closing:
            return
        liveness = self.liveness
        if error is not None:
            liveness.leave(error)
        with self.state:
            self._is_closing = True
            self.state.notify_all()
        self._rounds_ended.wait(_CLOSE_SECONDS)
        liveness.shut_down()
        liveness.wait_until_received()
        if liveness.background.close():
            liveness.drop_messages()
        self.control.close()
        if error is None and not self.is_idle:
            liveness.background.raise_if_unseen()

    def _handle(self, sender: int, message: ControlMessage) -> None:
        """Handle a control message, in the listening thread of its sender. Takes `state` and waits for nothing."""
        with self.state:
            if message.kind == ARRIVED and message.second == self.num_beginnings:  # of no earlier beginning
                self.arrive_at(message.first)
            elif message.kind == SETTLING:
                self.settling[message.second, message.third] = message.first
            self.state.notify_all()

    def _run_rounds(self) -> None:
        """The body of the worker thread."""
        threads.join_at_exit(threading.current_thread())
        try:
            while (t := self._next_round()) is not None:
                with self.liveness.waiting(f"telling others of round {t}", lambda: self.average.partner):
                    for peer in self.out_peers:
                        self.liveness.post(peer, ControlMessage(ARRIVED, t, self.num_beginnings))
                if t != self.next_global(t):
                    self._run(t)
        except BaseException as error:  # noqa: BLE001 (raised in the training thread, which is woken for it)
            self.liveness.leave(error)
        finally:
            self._rounds_ended.set()

    def _next_round(self) -> int | None:
        """Wait for the next round to run. None = this rank closes, and no round is left to run."""

        def is_runnable() -> bool:
            is_due = self.newest_arrival >= self._next <= min(self.num_done, self._last)
            return is_due and not self.is_held

        with self.state:
            self.state.wait_for(lambda: self._is_closing or self.liveness.has_failed or is_runnable())
            if self.liveness.has_failed or not is_runnable():
                return None
            self._next += 1
            return self._next - 1

    def _run(self, t: int) -> None:
        """Average round t over the group. Called by the worker thread; holds no lock while peers are waited for."""
        with self.state:
            y, lent, self._lent = self.published.acquire(), self._lent, None
            assert y is not None, "a model is published from the beginning"
            average = self.result.take() if lent is None else lent.x
            self.num_started = t + 1
            staleness = t - y.standing
            self._stats.record(staleness)
        y.wait()
        waiting = self.liveness.waiting(f"the group average in round {t}", lambda: self.average.partner)
        with waiting, torch.no_grad(), span("gossip.round", f"t={t}"):
            self.average.start(y.vector, t, None if lent is None else lent.fill)
            self.average.finish_to(average)
        self.transport.traffic.mixed(staleness)
        with self.state:
            self.published.release(y)
            self.result.put(average if lent is None else None)
            self.num_done = t + 1
            self.state.notify_all()


@contextlib.contextmanager
def _writing(state: threading.Condition, liveness: Liveness) -> Iterator[None]:
    """A context for a round's write of a chunk, with the lock; raises the failure of this rank."""
    with state:
        liveness.raise_if_failed()
        yield


def _wake(state: threading.Condition, _: Future[None]) -> None:
    with state:
        state.notify_all()

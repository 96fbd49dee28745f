"""DisseminationBarrier: returns on a rank when all ranks have come, with the rounds that they are in."""

from __future__ import annotations

import time
from collections.abc import Callable

from .control import ControlKind, ControlMessage
from .failure_detector import FailureDetector
from .peer_status import Activity
from .worker import WaitAvoidingWorker


class DisseminationBarrier:
    """A barrier of control messages in ceil(log2 n) stages (Hensgen, Finkel and Manber 1988):

        for stage k = 0, 1, ..., while 2^k < n:
            send (the newest round that I know of) to rank i + 2^k
            wait for the message of rank i - 2^k; newest <- max(newest, theirs)

    After the last stage each rank has heard, directly or through others, from all ranks. All methods belong to the
    training thread, which holds no lock while it waits for messages other than `state`, and waits with that only in
    `Condition.wait`, which releases it: listening threads can always deliver what it waits for.

    Args:
        worker: the worker of this rank, to whose listening threads the messages come.
    """

    def __init__(self, worker: WaitAvoidingWorker) -> None:
        self._worker, self._channel, self._detector = worker, worker.channel, worker.detector
        self._names = worker.transport.names
        self._num_settled = 0
        self._stages = list(enumerate(zip(worker.channel.out_peers, worker.channel.in_peers, strict=True)))

    def begin(self, t: int) -> None:
        """Wait for all ranks before their first step.

        Args:
            t: the round of this rank.

        Raises:
            ValueError: ranks are in different rounds.
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        with self._worker.state:
            barrier_id = self._worker.begin()
        oldest = newest = t
        patience = Patience(self._detector, is_patient=False)
        for stage, (out_peer, in_peer) in self._stages:
            self._send(ControlMessage(ControlKind.BEGINNING, newest, barrier_id, stage, oldest), out_peer)
            message = self._receive(ControlKind.BEGINNING, barrier_id, stage, in_peer, patience, t=t)
            assert message is not None, "only a wait with `due` ends without a message"
            oldest, newest = min(oldest, message.oldest), max(newest, message.round)
        if oldest != newest:
            raise ValueError(
                f"got a model of round {t} among models of rounds {oldest} to {newest} on other ranks, expected one "
                "round on all; load checkpoints of one moment on all ranks: call settle() before the checkpoint"
            )

    def settle(self, t: int, patience: Patience, *, average_globally: Callable[[int], int] | None = None) -> int:
        """Wait until all ranks settle.

        Args:
            t: the round of this rank.
            patience: how long to wait.
            average_globally: takes part in the average over all ranks in the round that it is given, and returns the
                next round; called whenever a rank that still trains has come there. None = do not take part in any.

        Returns:
            The newest round that any rank has been in.
        """
        barrier_id, self._num_settled = self._num_settled, self._num_settled + 1
        newest = t
        for stage, (out_peer, in_peer) in self._stages:
            self._send(ControlMessage(ControlKind.SETTLING, newest, barrier_id, stage), out_peer)
            while True:
                due = None if average_globally is None else self._worker.next_global(t)
                message = self._receive(ControlKind.SETTLING, barrier_id, stage, in_peer, patience, t=t, due=due)
                if message is not None:
                    break
                assert average_globally is not None, "only a wait with `due` ends without a message"
                assert due is not None, "as above"
                t = average_globally(due)
            newest = max(newest, message.round, t)
        return newest

    def _send(self, message: ControlMessage, peer: int) -> None:
        with self._detector.waiting(f"telling rank {self._names[peer]} of {message.kind.name}", lambda: peer):
            self._channel.send(message, peers=[peer])

    def _receive(
        self,
        kind: ControlKind,
        barrier_id: int,
        stage: int,
        peer: int,
        patience: Patience,
        *,
        t: int,
        due: int | None = None,
    ) -> ControlMessage | None:
        """The message of `peer` in this stage; None when some rank has come to round `due` before it.

        Raises:
            TimeoutError, ConnectionError: the peer sends nothing or has closed; names it.
        """
        worker, detector, closed = self._worker, self._detector, self._channel.closed_peers
        key = (kind, barrier_id, stage)

        def is_over() -> bool:
            return key in worker.barrier_messages or (due is not None and worker.newest_arrival >= due)

        is_settling = kind is ControlKind.SETTLING
        what = f"waiting for rank {self._names[peer]} to {'settle' if is_settling else 'begin'} after round {t}"
        activity = Activity.SETTLING if is_settling else Activity.BEGINNING
        with detector.waiting(what, lambda: peer, has_deadline=False):
            detector.round, detector.activity, detector.peer = t, activity, peer
            try:
                while True:
                    with worker.state:
                        worker.wait(lambda: is_over() or peer in closed, seconds=patience.interval)
                        if is_over():
                            return worker.barrier_messages.pop(key, None)
                    if peer in closed:
                        detector.check_present()
                    patience.check(peer, what)
            finally:
                detector.activity, detector.peer = Activity.TRAINING, -1


class Patience:
    """How long a rank waits in a barrier for the ranks that are missing.

    Args:
        detector: the failure detector of this rank.
        is_patient: whether to go on waiting as long as a missing rank takes a step, or waits for others itself, within
            the timeout.
    """

    def __init__(self, detector: FailureDetector, *, is_patient: bool) -> None:
        self._detector, self._is_patient = detector, is_patient
        self._start = self._progress = time.monotonic()
        self._status: ControlMessage | None = None
        self.interval = min(0.25, detector.timeout / 20)  # seconds between two requests

    def check(self, peer: int, what: str) -> None:
        """Ask the neighbours what they do. Raises TimeoutError that names who is missing when the time is over."""
        detector, now = self._detector, time.monotonic()
        detector.peers.request()
        status = detector.peers.statuses.get(peer)
        if self._is_patient and status is not None and not detector.peers.is_silent(peer):
            is_in_barrier = Activity(status.stage) is detector.activity
            last, self._status = self._status, status
            if is_in_barrier or last is None or (last.round, last.stage) != (status.round, status.stage):
                self._progress = now
        if now - self._progress > detector.timeout:
            detector.give_up(what, now - self._start, peer=peer)

"""Liveness: short messages between ranks that train at their own pace, and the first failure of any of them."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ..transport.base import Pending
from ..transport.deadline import Deadline
from ..transport.exchange import SHUTDOWN, LinkClosedError, PointToPoint
from ..transport.listener import SHUTDOWN_TIMEOUT, Listener, Message
from ..transport.uncaught_errors import leave_at_error, stay
from ..worlds.all_or_none import LOST
from .background import Background

_INTERVAL = 0.25  # seconds between two checks of the waits; less with a short timeout
_PAUSE = 1.0  # seconds by which a check may be late; a longer pause is one of the whole process
_ASK_AFTER, _GIVE_UP_AFTER, _SILENT_AFTER = 0.5, 0.9, 0.2  # parts of the timeout
_KNOWN_WITHIN = 3.0  # seconds until a rank whose message failed has received the FAILED message that explains it
_CLOSED_AFTER = 0.5  # seconds, at least, until messages that a rank sent before its shutdown have arrived too
_TELLING = timedelta(seconds=2)  # for the FAILED messages of this rank, and their answers


class ControlKind(IntEnum):
    """The kind of a control message. Algorithms have kinds of their own, from 0 on."""

    SHUTDOWN = -1  # the sender has closed and sends nothing after this
    FAILED = -2  # the sender has failed because of a rank, and sends nothing after this
    ASK = -3  # the sender asks for the status of the receiver
    STATUS = -4  # the answer to ASK


class ControlMessage(NamedTuple):
    """Four integers: a kind and three numbers.

    FAILED has the rank at fault and a `FailureReason`; STATUS has the round of the sender, its `Activity`, and the rank
    that it waits for, or -1.
    """

    kind: int
    first: int = 0
    second: int = 0
    third: int = 0

    def tensor(self) -> Tensor:
        """The message as it is sent, int64."""
        return torch.tensor(self, device="cpu")


class FailureReason(IntEnum):
    """The conduct of the rank at fault."""

    DIED = 0
    SILENT = 1
    ABSENT = 2
    CLOSED = 3
    LEFT = 4

    def sentence(self, rank: object) -> str:
        """The reason in words, for errors."""
        return (
            f"rank {rank} died: its connection closed before it shut down",
            f"rank {rank} does not answer: it is stopped or cut off",
            f"rank {rank} did not come; all ranks must take equal steps and call settle(), averaged(), close() alike",
            f"ranks {rank} have closed; call settle() on all ranks before close(), after equal steps on all of them",
            f"rank {rank} left after an error of its own, which it raises",
        )[self]


class Activity(IntEnum):
    """The activity of the training thread of a rank."""

    TRAINING = 0
    EXCHANGING = 1
    COLLECTIVE = 2
    SETTLING = 3

    @property
    def phrase(self) -> str:
        """The predicate for errors."""
        return ("trains", "waits for its peers", "waits for all ranks", "settles")[self]


@dataclass
class _BoundedWait:
    """A wait of one thread of this rank.

    Attributes:
        what: the operation that waits, for errors.
        partner: returns the rank that the thread waits for now; -1: not known.
        activity: the activity of the training thread during the wait; TRAINING where another thread waits.
        is_patient: whether the wait goes on as long as the partner makes progress.
        start: when it began (`time.monotonic()`).
        seconds: its length so far, added to earlier waits of the operation, without pauses of the whole process.
        progress: the last status of the partner.
    """

    what: str
    partner: Callable[[], int]
    activity: Activity
    is_patient: bool
    start: float
    seconds: float
    progress: ControlMessage | None = None


def _is_last(integers: Sequence[int]) -> bool:
    return integers[0] in (ControlKind.SHUTDOWN, ControlKind.FAILED)


class Liveness:
    """Control messages between a rank and its peers, the limits of all waits, and the first failure of any rank.

    [Note: one failure] The first failure that a rank learns of is its failure: the connection of a peer closes, a wait
    takes too long, or a peer's FAILED message names the rank at fault. The rank sends FAILED to its peers, waits for
    their last messages, which answer it, and then closes its connections, which ends the waits of its other threads. A
    message that has left this rank is not enough: a peer that writes to a connection that has closed drops all messages
    that it has not read. So the message that names the cause is read before the connection of a rank that only passes
    it on closes. The graph of all peers is connected, so all ranks name the rank that failed first. Over an elastic
    transport nothing is passed on, since the membership knows which ranks have failed.

    [Note: deadlines] A wait that Gloo ends by its timeout closes the connections of this rank, and its peers would take
    it for dead. So a thread ends all waits at nine tenths of the timeout. From half of the timeout on it asks the peers
    for their status; their listening threads answer, whatever their training threads do. A peer that does not answer is
    stopped or cut off. A peer that waits itself names the rank that it waits for. An elastic transport ends its waits
    alone, and without closing other connections. All waits of one operation of the training thread, such as a round,
    share one timeout: see `operation`.

    [Note: shutdown] The last message to a peer is SHUTDOWN or FAILED. A rank that receives one answers with its own
    SHUTDOWN, so the listening threads of both ranks end within milliseconds. A connection that closes before is one of
    a rank that has died.

    `round` belongs to the training thread; any thread may call the methods.
    `_lock` guards all state below it in `__init__`, and is never held during a wait. `fail` waits, so the caller holds
    no lock that the listening threads need.

    Args:
        transport: a transport over Gloo.
        peers: the ranks from which messages come.
        tag: the tag of control messages, which nothing else on the transport has.

    Attributes:
        background: the threads of this rank; it keeps the failure for the training thread.
        failed: done once this rank has failed, with the error.
        has_failed: whether this rank has failed, or is about to.
        closed: peers that have shut down or failed, with the time at which this rank learned it (`time.monotonic()`).
        round: the round of the training thread, for errors.
        on_late: called with the number of a rank that this one has given up, the error and the timeout in seconds.
    """

    def __init__(self, transport: PointToPoint, peers: Collection[int], *, tag: int = 0) -> None:
        self.transport, self.peers = transport, tuple(sorted(peers))
        self.background = Background()
        self.background.on_error = weakref.WeakMethod(self.fail)  # so that an error of a thread ends all waits
        self.failed: Future[None] = Future()
        self.has_failed = False
        self.closed: dict[int, float] = {}
        self.round = 0
        self.on_late: Callable[[int, RuntimeError, float], object] = lambda rank, error, seconds: None
        self._tag, self._timeout = tag, transport.timeout.total_seconds()
        self._me = f"rank {transport.names[transport.rank]}"
        num_integers = len(ControlMessage._fields)
        self._listener = Listener(transport, self.peers, num_integers=num_integers, tag=tag, is_last=_is_last)
        self._ended = threading.Event()
        self._waits: dict[int, _BoundedWait] = {}  # by thread
        self._waited: dict[int, float] = {}  # seconds of the waits of an operation that have ended, by thread
        self._lock = threading.Lock()
        self._posted: dict[tuple[int, int], Pending] = {}  # the last message of each kind to each peer
        self._last: dict[int, Pending | None] = {}  # the last message to each peer; None: its connection was closed
        self._asked: dict[int, float] = {}  # peers that owe a status: since when
        self._statuses: dict[int, ControlMessage] = {}
        if self.peers and not transport.is_elastic:
            self.background.start(f"gossip-watch-{transport.rank}", self._watch)
            leave_at_error(self)

    # Messages.

    def listen(self, handle: Callable[[int, ControlMessage], None]) -> None:
        """Start the threads that listen.

        Args:
            handle: called with (sender, message) of each message as it comes, in the listening thread of the sender.
        """

        def receive(sender: int, message: Message) -> None:
            if isinstance(message, list):
                control = ControlMessage(*message)
                self._handle(sender, control)
                handle(sender, control)
            else:
                self.closed.setdefault(sender, time.monotonic())
                why = f"in round {self.round}, {FailureReason.DIED.sentence(self.transport.names[sender])}: {message}"
                self.fail(ConnectionError(f"{self._me}: {why}"), sender, FailureReason.DIED)

        self._listener.listen(receive, self.background.start)

    def post(self, peer: int, message: ControlMessage) -> None:
        """Send to a peer, unless its last message was sent. Waits until the last message of the same kind has gone."""
        with contextlib.suppress(*LOST, LinkClosedError):  # the listening thread reports it
            if (last := self._posted.get((peer, message.kind))) is not None:
                last.wait()
            with self._lock:
                if peer not in self._last:
                    what = f"sending a control message of kind {message.kind}"
                    pending = self.transport.exchange({peer: [message.tensor()]}, {}, tag=self._tag, what=what)
                    self._posted[peer, message.kind] = pending

    def request(self, peer: int, message: ControlMessage, *, reply: Tensor, what: str) -> Pending | None:
        """Post a message and a receive of its reply; None if the last message to that peer was sent.

        Raises:
            ConnectionError: the connection of the peer is closed.
        """
        with self._lock:
            if peer in self._last:
                return None
            return self.transport.exchange({peer: [message.tensor()]}, {peer: [reply]}, tag=self._tag, what=what)

    def shut_down(self) -> None:
        """Post SHUTDOWN to all peers whose last message was not sent, and end the checks of waits. Does not wait."""
        self._post_last(self.peers, ControlMessage(ControlKind.SHUTDOWN))
        self._ended.set()
        stay(self)

    def wait_until_received(self, limit: timedelta = SHUTDOWN_TIMEOUT) -> None:
        """Wait until the last messages have been received, at most for so long."""
        deadline = Deadline(limit)
        for pending in [pending for pending in self._last.values() if pending is not None]:
            with contextlib.suppress(*LOST):  # the peer has ended, or will notice by itself
                pending.wait(deadline.left_for_gloo)

    def drop_messages(self) -> None:
        """Drop the messages once all threads have ended: none is under way then.

        A message keeps the connections of its group, and they would stay until the next garbage collection.
        """
        with self._lock:
            self._last = dict.fromkeys(self._last)
            self._posted.clear()

    def _post_last(self, peers: Iterable[int], message: ControlMessage) -> None:
        for peer in peers:
            with self._lock, contextlib.suppress(ConnectionError, LinkClosedError):  # the peer has ended
                if peer not in self._last:
                    self._last[peer] = None
                    sending = {peer: [message.tensor()]}
                    self._last[peer] = self.transport.exchange(sending, {}, tag=self._tag, what=SHUTDOWN)

    def _handle(self, sender: int, message: ControlMessage) -> None:
        """Handle the messages that belong to this object."""
        if _is_last(message):
            self._post_last([sender], ControlMessage(ControlKind.SHUTDOWN))
            if message.kind == ControlKind.FAILED:  # the cause is known before the rank counts as closed
                self._learn(sender, message.first, FailureReason(message.second))
            self.closed[sender] = time.monotonic()
        elif message.kind == ControlKind.ASK:
            self.post(sender, self._status())
        elif message.kind == ControlKind.STATUS:
            with self._lock:
                self._asked.pop(sender, None)
                self._statuses[sender] = message

    def _status(self) -> ControlMessage:
        waits = list(self._waits.values())
        activity = max((wait.activity for wait in waits), default=Activity.TRAINING)
        partner = max((wait.partner() for wait in waits), default=-1)
        return ControlMessage(ControlKind.STATUS, self.round, activity, partner)

    # Failures.

    def raise_if_failed(self) -> None:
        """Raise the failure of this rank, if there is one."""
        self.background.raise_if_failed()

    def fail(self, error: BaseException, rank: int | None = None, reason: FailureReason = FailureReason.LEFT) -> None:
        """Make `error` the failure of this rank, unless it has one. Returns when there is an error to raise.

        Args:
            error: the error for the training thread.
            rank: the rank at fault; None: no peer is told, and connections stay open.
            reason: the conduct of that rank.
        """
        with self._lock:
            is_first, self.has_failed = not self.has_failed, True
        if not is_first:
            wait([self.failed], _KNOWN_WITHIN)
            return
        if rank is not None and not self.transport.is_elastic:
            self._post_last(self.peers, ControlMessage(ControlKind.FAILED, rank, reason))
            answering = [peer for peer in self.peers if peer != rank or reason is not FailureReason.SILENT]
            self._listener.wait_for_last(answering, Deadline(_TELLING))
        self.background.fail(error)
        self.failed.set_exception(error)
        if rank is not None and not self.transport.is_elastic:
            self.transport.close_connections()

    def leave(self, error: BaseException) -> None:
        """Fail because of an error in this rank's own code."""
        self.fail(error, self.transport.rank)

    @property
    def thread(self) -> int:
        """See `Leaver`."""
        return self.transport.thread

    def end_by(self, error: BaseException) -> None:
        """See `Leaver`: the peers are told, and the notes of the job have the reason."""
        if self.transport.notes is not None and not self.has_failed:
            self.transport.notes.leave_for(error)
        self.leave(error)

    def give_up(self, what: str, seconds: float, partner: int, activity: Activity = Activity.EXCHANGING) -> NoReturn:
        """Raise TimeoutError that names the rank which keeps this one waiting.

        Args:
            what: the operation that waits.
            seconds: its length.
            partner: the rank that was waited for; -1 = unknown.
            activity: the activity of this rank.
        """
        rank, reason, note = self._culprit(partner, activity)
        because = "" if rank is None else f": {reason.sentence(self.transport.names[rank])}{note}"
        limit = f"(timeout {self._timeout:g} s)"
        error = TimeoutError(f"{self._me}: {what} failed after {seconds:.1f} s {limit}{because}")
        if rank is not None and not self.has_failed:
            self.on_late(rank, RuntimeError(str(error)), self._timeout)
        self.fail(error, self.transport.rank if rank is None else rank, reason)
        self.raise_if_failed()
        raise error

    def check_present(self) -> None:
        """Raise ConnectionError if peers have closed while this rank goes on."""
        if closed := tuple(self.closed):  # which the listening thread extends
            names = sorted(self.transport.names[peer] for peer in closed)
            error = ConnectionError(f"{self._me}: in round {self.round}, {FailureReason.CLOSED.sentence(names)}")
            self.fail(error, min(closed), FailureReason.CLOSED)
            self.raise_if_failed()

    def _learn(self, sender: int, rank: int, reason: FailureReason) -> None:
        """Fail because of a peer's FAILED message."""
        names = self.transport.names
        if rank == self.transport.rank:
            why = f"rank {names[sender]} has given this rank up, which it waited for (timeout {self._timeout:g} s)"
        elif reason is FailureReason.CLOSED:
            why = reason.sentence([names[rank]])
        else:
            why = reason.sentence(names[rank])
        by = "" if sender == rank else f" (as rank {names[sender]} says)"
        is_late = reason in (FailureReason.SILENT, FailureReason.ABSENT)
        kind = TimeoutError if is_late else ConnectionError
        self.fail(kind(f"{self._me}: in round {self.round}, {why}{by}"), rank, reason)

    # Waits.

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """A context in which the waits of this thread share one timeout; a patient wait does not count."""
        thread = threading.get_ident()
        is_outermost = thread not in self._waited
        self._waited.setdefault(thread, 0.0)
        try:
            yield
        finally:
            if is_outermost:
                del self._waited[thread]

    @contextlib.contextmanager
    def waiting(
        self,
        what: str,
        partner: Callable[[], int] = lambda: -1,
        *,
        activity: Activity = Activity.TRAINING,
        is_patient: bool = False,
    ) -> Iterator[None]:
        """A context in which this thread waits; see `_BoundedWait` for the arguments.

        After a network error in it this rank has failed. The training thread gets the failure that caused the error.
        """
        thread = threading.get_ident()
        outer, before = self._waits.get(thread), self._waited.get(thread, 0.0)
        waiting = _BoundedWait(what, partner, activity, is_patient, time.monotonic(), seconds=before)
        self._waits[thread] = waiting
        try:
            yield
        except LOST as error:
            wait([self.failed], _KNOWN_WITHIN)  # for a FAILED message that names the cause
            self.leave(error)
            if activity is not Activity.TRAINING:
                self.raise_if_failed()
            raise
        finally:
            del self._waits[thread]
            if thread in self._waited and not is_patient:
                self._waited[thread] = waiting.seconds
            if outer is not None:
                self._waits[thread] = outer

    def _watch(self) -> None:
        """Check the waits of all threads until this rank shuts down or fails: [Note: deadlines]."""
        interval = min(_INTERVAL, self._timeout / 20)
        before = time.monotonic()
        while not self._ended.wait(interval) and not self.has_failed:
            now = time.monotonic()
            passed, before = min(now - before, interval + _PAUSE), now
            for waiting in list(self._waits.values()):
                waiting.seconds += passed
                with contextlib.suppress(*LOST):  # kept for the threads that wait
                    self._check(waiting)

    def _check(self, waiting: _BoundedWait) -> None:
        """End a wait whose partner has closed, or that has taken too long."""
        partner = waiting.partner()
        if waiting.seconds > _ASK_AFTER * self._timeout:
            self._ask()
            if waiting.is_patient and self._makes_progress(partner, waiting):
                waiting.seconds = 0.0
        closed_at = self.closed.get(partner) if partner >= 0 else min(self.closed.values(), default=None)
        grace = max(_CLOSED_AFTER, self._timeout / 20)
        is_left = closed_at is not None and time.monotonic() - max(closed_at, waiting.start) > grace
        if is_left and waiting.activity is not Activity.TRAINING:
            self.check_present()
        # A little longer where other ranks know better which rank is late.
        is_known = partner >= 0 or waiting.activity is Activity.COLLECTIVE or bool(self._silent())
        if waiting.seconds > (_GIVE_UP_AFTER if is_known else 1.0) * self._timeout:
            self.give_up(waiting.what, waiting.seconds, partner, waiting.activity)

    def _ask(self) -> None:
        """Ask every peer that owes no answer for its status."""
        with self._lock:
            peers = [peer for peer in self.peers if peer not in self._asked and peer not in self.closed]
            self._asked.update(dict.fromkeys(peers, time.monotonic()))
        for peer in peers:
            self.post(peer, ControlMessage(ControlKind.ASK))

    def _makes_progress(self, partner: int, waiting: _BoundedWait) -> bool:
        """Whether the partner has come to the same place, or to another round, since the last status."""
        status = self._statuses.get(partner)
        if status is None or partner in self._silent():
            return False
        last, waiting.progress = waiting.progress, status
        return status.second == waiting.activity or last is None or last[:3] != status[:3]

    def _silent(self) -> Sequence[int]:
        """The peers that have owed an answer for a fifth of the timeout."""
        latest = time.monotonic() - _SILENT_AFTER * self._timeout
        with self._lock:
            return [peer for peer, since in self._asked.items() if since < latest and peer not in self.closed]

    def _culprit(self, partner: int, activity: Activity) -> tuple[int | None, FailureReason, str]:
        """The rank that keeps this one waiting, its conduct, and more about it for the error."""
        silent = self._silent()
        if silent:
            return (partner if partner in silent else silent[0]), FailureReason.SILENT, ""
        suspects = [partner] if partner >= 0 else []
        if partner < 0 and activity is Activity.COLLECTIVE:
            suspects = [peer for peer in self.peers if self._is_behind(peer)]
        for suspect in suspects:
            if (status := self._statuses.get(suspect)) is not None:
                if status.third not in (-1, self.transport.rank):
                    note = f" (rank {self.transport.names[suspect]} waits for it too)"
                    return status.third, FailureReason.ABSENT, note
                note = f"; it {Activity(status.second).phrase}, in round {status.first}"
                return suspect, FailureReason.ABSENT, note
        return (partner if partner >= 0 else None), FailureReason.ABSENT, ""

    def _is_behind(self, peer: int) -> bool:
        """Whether that peer is not in the collective of this round."""
        status = self._statuses.get(peer)
        return status is not None and not (status.second == Activity.COLLECTIVE and status.first >= self.round)

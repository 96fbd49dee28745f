"""FailureDetector: ends the waits of a rank when a rank is at fault, with an error that names that rank."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

from ..engine.background import Background
from .control import ControlChannel, ControlKind, ControlMessage
from .failure_reason import FailureReason
from .peer_status import Activity, PeerStatus

_INTERVAL = 0.25  # seconds between two checks of the waits; less where the timeout is short
_ASK_AFTER, _GIVE_UP_AFTER = 0.5, 0.9  # parts of the timeout
_KNOWN_WITHIN = 1.0  # seconds until a rank whose exchange failed has received the FAILED message that explains it
_PAUSE = 1.0  # seconds by which a check may be late before it counts as a pause of the whole process
_CLOSED_AFTER = 0.5  # seconds until what a rank sent before its shutdown has arrived too


@dataclass
class Wait:
    """Something that a thread of this rank waits for.

    Attributes:
        what: what is waited for, for errors.
        start: when the wait began (`time.monotonic()`).
        partner: returns the rank that is waited for now, -1 where that is not known.
        has_deadline: whether the detector ends the wait; False = the waiting thread does.
    """

    what: str
    start: float
    partner: Callable[[], int]
    has_deadline: bool


class FailureDetector:
    """Ends all waits of a rank when one of the ranks is at fault, with an error that names that rank.

    [Note: one cause] The first failure that a rank learns of is its failure: the connection of a neighbour closed, a
    wait has taken too long, or a neighbour's FAILED message names the rank at fault. The rank sends FAILED to its
    neighbours, waits until they have received it, and then closes its connections, which ends the waits of its other
    threads. So the message that names the cause arrives before the connection of a rank that only passes it on closes.
    An exchange that fails waits for such a message for one second before it raises its own error.

    [Note: deadlines] A wait that Gloo ends closes the connections of this rank, and its neighbours would take it for
    dead. So `run`, the body of a thread, ends waits at nine tenths of the timeout. From half of the timeout on it sends
    status requests to the neighbours; their listening threads answer, whatever their training threads do. A neighbour
    that does not answer is stopped or cut off. A neighbour that waits itself names the rank that it waits for.

    Which thread may call what: `engage`, `together`, `check_present` the training thread; `handle`, `lose` listening
    threads; `waiting`, `explain`, `fail`, `leave` any thread; `run` the detector's own. `fail` waits until neighbours
    have received what it sends, so nobody calls it with `state` held: their answers could not be handled. Only the
    first caller sends; others wait a second at most for the error.

    Args:
        channel: the control channel of this rank.
        state: the condition that guards all attributes; notified when one of them changes.
        background: keeps the error for the training thread.
        timeout: the timeout of every wait.

    Attributes:
        round, activity, peer: where the training thread is, and the rank that it waits for, or -1.
        is_idle: whether nothing is waited for until the next `engage`: failures of other ranks are kept until then.
        has_failed: whether `fail` has been called.
        partner: returns the rank that the worker thread exchanges with, -1 = none.
    """

    def __init__(
        self, channel: ControlChannel, state: threading.Condition, background: Background, *, timeout: timedelta
    ) -> None:
        self.channel, self.state, self._background = channel, state, background
        self._names, self._rank = channel.transport.names, channel.transport.rank
        self.round, self.activity, self.peer = 0, Activity.TRAINING, -1
        self.is_idle, self.has_failed = True, False
        self.timeout = timeout.total_seconds()
        self.peers = PeerStatus(channel, state, timeout=self.timeout)
        self.partner: Callable[[], int] = lambda: -1
        self._deferred: tuple[BaseException, int, FailureReason] | None = None  # a failure while `is_idle`
        self._waits: dict[int, Wait] = {}  # by thread
        self._ended = threading.Event()
        self._checked, self._paused = time.monotonic(), 0.0  # the last check of `run`, and the last long gap before one

    def engage(self) -> None:
        """Let failures of other ranks count from here on; raise the first one, if there is one."""
        with self.state:
            self.is_idle = False
            deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self.fail(*deferred)
        self._background.raise_if_failed()

    @contextlib.contextmanager
    def waiting(self, what: str, partner: Callable[[], int], *, has_deadline: bool = True) -> Iterator[None]:
        """A context in which this thread waits. A network error that ends it becomes one that names who is at fault."""
        thread = threading.get_ident()
        outer = self._waits.get(thread)
        self._waits[thread] = Wait(what, time.monotonic(), partner, has_deadline)
        try:
            yield
        except (ConnectionError, TimeoutError) as error:
            self.explain(error)
        finally:
            del self._waits[thread]
            if outer is not None:
                self._waits[thread] = outer

    @contextlib.contextmanager
    def together(self, what: str, *, t: int) -> Iterator[None]:
        """A context in which all ranks do something together in round t, also one that is idle otherwise."""
        was_idle, self.round, self.activity = self.is_idle, t, Activity.GLOBAL
        self.engage()
        try:
            with self.waiting(what, lambda: -1):
                yield
        finally:
            self.activity, self.is_idle = Activity.TRAINING, was_idle

    def explain(self, error: BaseException) -> NoReturn:
        """Raise the failure that caused `error`; `error` itself where no rank names a cause within a second."""
        with self.state:
            self._background.raise_if_failed()
            self.state.wait_for(lambda: self.has_failed or self._deferred is not None, _KNOWN_WITHIN)
        self.engage()
        self.fail(error)
        self._background.raise_if_failed()
        raise error

    def fail(self, error: BaseException, rank: int = -1, reason: FailureReason = FailureReason.UNKNOWN) -> None:
        """Make `error` the failure of this rank, unless it has one. Returns when there is an error to raise.

        See [Note: one cause]. Never call it with `state` held.

        Args:
            error: what the training thread raises.
            rank: the rank at fault; -1 = unknown.
            reason: what that rank did.
        """
        with self.state:
            is_first, self.has_failed = not self.has_failed, True
        if not is_first:
            self._background.wait_for_error(_KNOWN_WITHIN)
            return
        self._announce(rank, reason)
        self._background.fail(error)
        with self.state:
            self.state.notify_all()
        self.channel.close_connections()

    def _announce(self, rank: int, reason: FailureReason) -> None:
        """Tell the neighbours who is at fault, before connections close."""
        culprit = rank if rank >= 0 else self._rank
        self.channel.post_last(ControlMessage(ControlKind.FAILED, culprit, stage=reason))
        self.channel.wait_until_last_sent(is_failed=True)

    def leave(self, error: BaseException) -> None:
        """Fail because of an error in this rank's own code."""
        self.fail(error, self._rank, FailureReason.LEFT)

    def give_up(self, what: str, seconds: float, *, peer: int = -1) -> NoReturn:
        """Raise TimeoutError that names who did not come; `peer`: the rank that was waited for, -1 = unknown."""
        rank, reason, note = self.peers.culprit(peer, activity=self.activity, t=self.round)
        because = f": {reason.sentence(self._names[rank])}{note}" if rank >= 0 else ""
        me = self._names[self._rank]
        limit = f"(timeout {self.timeout:g} s)"
        self.fail(TimeoutError(f"rank {me}: {what} failed after {seconds:.1f} s {limit}{because}"), rank, reason)
        self._background.raise_if_failed()
        raise AssertionError("fail() leaves an error")

    def check_present(self) -> None:
        """Raise ConnectionError if neighbours have closed while this rank goes on."""
        if self.channel.closed_peers:
            rank = min(self.channel.closed_peers)
            names = sorted(self._names[i] for i in self.channel.closed_peers)
            sentence = FailureReason.CLOSED.sentence(self._names[rank]).replace(f"[{self._names[rank]}]", str(names))
            me = self._names[self._rank]
            self.fail(ConnectionError(f"rank {me}: in round {self.round}, {sentence}"), rank, FailureReason.CLOSED)
            self._background.raise_if_failed()

    def handle(self, sender: int, message: ControlMessage) -> None:
        """Handle STATUS_REQUEST, STATUS or FAILED of a neighbour. Called by its listening thread."""
        if message.kind is ControlKind.STATUS_REQUEST:
            with self.state:
                peer = self.peer if self.peer >= 0 else self.partner()
                status = ControlMessage(ControlKind.STATUS, self.round, stage=self.activity, oldest=peer)
            self.channel.post(status, sender)
        elif message.kind is ControlKind.STATUS:
            self.peers.record(sender, message)
        elif message.kind is ControlKind.FAILED:
            rank, reason = message.round, FailureReason(message.stage)
            if rank == self._rank:
                self._fail_or_defer(self._stopped(), rank, FailureReason.SILENT)
                return
            me, by = self._names[self._rank], self._names[sender]
            told = "" if rank == sender else f" (as rank {by} says)"
            text = f"rank {me}: in round {self.round}, {reason.sentence(self._names[rank])}{told}"
            is_late = reason in (FailureReason.SILENT, FailureReason.ABSENT)
            self._fail_or_defer(TimeoutError(text) if is_late else ConnectionError(text), rank, reason)

    def lose(self, peer: int, error: BaseException) -> None:
        """Handle a connection that closed although the neighbour had not shut down. Called by its listening thread."""
        with self.state:
            if self.has_failed:  # this rank has closed the connection itself
                return
            self.channel.closed_peers.setdefault(peer, time.monotonic())
        if max(self._paused, time.monotonic() - self._checked) > self.timeout / 2:
            self._fail_or_defer(self._stopped(), self._rank, FailureReason.SILENT)
            return
        me = self._names[self._rank]
        text = f"rank {me}: in round {self.round}, {FailureReason.DIED.sentence(self._names[peer])}: {error}"
        self._fail_or_defer(ConnectionError(text), peer, FailureReason.DIED)

    def run(self) -> None:
        """Check the waits of all threads until `end()`; the body of a thread. See [Note: deadlines]."""
        interval = min(_INTERVAL, self.timeout / 20)
        while not self._ended.wait(interval):
            now = time.monotonic()
            pause, self._checked = now - self._checked, now
            is_paused = pause > interval + _PAUSE  # this process was stopped: for the waits this time did not pass
            if is_paused:
                self._paused = pause
            for wait in list(self._waits.values()):
                if is_paused:
                    wait.start += pause
                if self.has_failed:
                    break
                with contextlib.suppress(ConnectionError, TimeoutError):  # kept for the threads that wait
                    self._check(wait, now)

    def end(self) -> None:
        """Let `run` return."""
        self._ended.set()

    def _check(self, wait: Wait, now: float) -> None:
        """End a wait whose partner has closed or that has taken too long."""
        seconds = now - wait.start
        if seconds > _ASK_AFTER * self.timeout:
            self.peers.request()
        partner, closed = wait.partner(), self.channel.closed_peers
        closed_at = closed.get(partner) if partner >= 0 else min(closed.values(), default=None)
        is_left = closed_at is not None and now - max(closed_at, wait.start) > _CLOSED_AFTER
        if wait.has_deadline and is_left:
            self.check_present()
        if wait.has_deadline and seconds > self._limit(partner):
            self.give_up(wait.what, seconds, peer=partner)

    def _limit(self, partner: int) -> float:
        """The seconds that a wait may last: a little longer where other ranks know better who is late."""
        is_known = partner >= 0 or self.activity is Activity.GLOBAL or self.peers.has_silent_peer
        return _GIVE_UP_AFTER * self.timeout if is_known else self.timeout + _CLOSED_AFTER

    def _stopped(self) -> TimeoutError:
        pause = max(self._paused, time.monotonic() - self._checked)
        me = self._names[self._rank]
        return TimeoutError(
            f"rank {me}: in round {self.round}, the others have gone on without rank {me}, which they waited for in "
            f"vain (timeout {self.timeout:g} s); its threads did not run for {pause:.1f} s"
        )

    def _fail_or_defer(self, error: BaseException, rank: int, reason: FailureReason) -> None:
        with self.state:
            if self.is_idle:
                self._deferred = self._deferred or (error, rank, reason)
                self.state.notify_all()
                return
        self.fail(error, rank, reason)

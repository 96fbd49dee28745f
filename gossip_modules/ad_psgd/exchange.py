"""Pairwise averaging at any time: an active rank asks, a passive rank answers, both get opposite corrections."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch

from ..engine.shared_model import Mailbox
from ..flat.nonfinite import check_policy, is_finite, refuse
from ..transport.listener import GOODBYE_TIMEOUT
from ..transport.process_group import Pending, ProcessGroupTransport
from .presence import Presence

_HERE, _GONE, _LATER = 0, 1, 2  # what a passive rank replies
_CONTROL_TAG, _MODEL_TAG = 0, 1
_GRACE = timedelta(seconds=1)


class _UnderWay(NamedTuple):
    """An exchange: with whom, what it is for errors, and when it began."""

    peer: int
    what: str
    start: float


class BilateralAverage:
    """y_i <- y_i + w (y_j - y_i) and y_j <- y_j + w (y_i - y_j) between two ranks, while both of them train.

    [Note: bilateral exchange] The active rank sends a header; the passive one, whose listener waits for headers from
    anybody, replies, and then both send a snapshot of y and receive that of the other. Corrections are
    w (received - sent), exact opposites in floating point, and are added to whatever y and the parameters have become
    meanwhile: the sum over ranks is kept although nobody holds a lock across the network. Since active ranks only
    ask and passive ranks only answer, no ring of ranks can wait for each other. A passive rank whose y is not what it
    trains, before its first step or since it has loaded or saved a checkpoint, replies that it has nothing to say yet.

    [Note: late peers] A whole exchange has the transport's timeout. The training thread looks at the clock
    (`check_time`), tells the other ranks who is late, and raises. Only one second later Gloo's own wait ends, which
    closes all connections of this rank; so who loses them for that knows the reason by then.

    Args:
        mailbox: of this rank.
        transport: a Gloo transport that carries nothing else but collectives of the same ranks.
        clock: the step of training, for `delivered`.
        on_nonfinite: about a correction that is not finite: "raise" at both ends, "skip" at both ends, or "spread".

    Attributes:
        num_skipped: exchanges without a correction for that.
        delivered: of each exchange in the mail, the step at which y was read; the engine takes them out.
        is_serving: whether an exchange that a peer asked for is under way.
        presence: who is still there, and the first failure.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        transport: ProcessGroupTransport,
        *,
        clock: Callable[[], int],
        on_nonfinite: str = "raise",
    ) -> None:
        self.mailbox = mailbox
        self.on_nonfinite = check_policy(on_nonfinite)
        self.num_skipped = 0
        self.transport = transport
        self.clock = clock
        self.delivered: deque[int] = deque()
        self.presence = Presence(transport, tag=_CONTROL_TAG)
        self.is_serving = False
        self._sent, self._received = mailbox.host_vector(), mailbox.host_vector()
        self._under_way: _UnderWay | None = None  # written by the thread that exchanges, of which a rank has one
        self._serving = threading.Condition()  # of the three below
        self._is_occupied = False
        self._num_served = 0
        self._is_closing = False
        self.presence.failed.add_done_callback(lambda _: self._wake())

    def ask(self, peer: int, t: int, weight: float) -> bool:
        """One exchange with a passive rank, unless it has nothing to say yet; False when it answers no more.

        Args:
            peer: a passive rank.
            t: the round of this rank, for error messages.
            weight: w, the same at both ends: it travels.

        Raises:
            TimeoutError, ConnectionError: naming the peer and the round, or the rank that has died before.
        """
        reply = torch.empty(1, dtype=torch.int64)
        what = f"asking in round {t}"
        with self._exchanging(peer, what):
            pending = self.presence.request(peer, t, _bits(weight), reply=reply, what=what)
            if pending is None:
                return False
            self._wait(pending)
            if reply.item() == _HERE:
                self._exchange(peer, weight, f"averaging in round {t}")
        return reply.item() != _GONE

    def answer(self, active_ranks: Collection[int]) -> None:
        """Answer each of these ranks until it has said goodbye or died; the body of a thread.

        An active rank has the same thread, for passive ranks, who ask nothing: it hears who leaves or dies. A failure
        is in `presence.failed` at once. From then on this rank replies that it is gone.

        Raises:
            TimeoutError, ConnectionError: (at the end) that failure; names who is late or dead.
        """
        for source, t, bits in self.presence.requests(active_ranks):
            try:
                self._answer(source, t, _weight(bits))
            except Exception as error:  # noqa: BLE001 (raised below, and in the training thread before)
                self.presence.fail(error)
        if self.presence.failed.done():
            self.presence.failed.result()

    def check_time(self) -> None:
        """Fail if the exchange that is under way has taken longer than the timeout; see [Note: late peers]."""
        if (under_way := self._under_way) is not None and self._seconds_left(under_way) <= 0:
            self._fail_late(under_way)

    @property
    def seconds_left(self) -> float:
        """Of the exchange that is under way, until it is late; the timeout if there is none."""
        under_way = self._under_way
        return self.transport.timeout.total_seconds() if under_way is None else self._seconds_left(under_way)

    def wait_until_served(self) -> None:
        """Return when the exchange that is under way is delivered, or this rank has failed.

        Raises:
            TimeoutError: naming the peer.
        """
        with self._serving:
            num_served = self._num_served

            def is_over() -> bool:
                return not self._is_occupied or self._num_served > num_served or self.presence.failed.done()

            while not self._serving.wait_for(is_over, self.seconds_left):
                if (under_way := self._under_way) is not None and self._seconds_left(under_way) <= 0:
                    break
            else:
                return
        raise self._fail_late(under_way)

    def say_goodbye(self, passive_ranks: Iterable[int]) -> None:
        """Tell these ranks that this one asks and answers no more; waits for nobody."""
        self.presence.say_goodbye(passive_ranks)

    def stop_answering(self, seconds: float = GOODBYE_TIMEOUT.total_seconds()) -> bool:
        """Reply to those who ask from now on that this rank is gone, once the exchange under way is delivered.

        Returns:
            Whether it is delivered; False = it has taken longer than that, and is left to end by itself.
        """
        with self._serving:
            self._serving.wait_for(lambda: not self._is_occupied or self.presence.failed.done(), seconds)
            self._is_closing = True
            return not self._is_occupied

    def _answer(self, source: int, t: int, weight: float) -> None:
        what = f"answering round {t} of rank {self.transport.names[source]}"
        with self._exchanging(source, what), self._occupied():
            with self.mailbox.lock:  # before or after a withdrawal, not across it
                is_gone = self._is_closing or self.presence.failed.done()
                status = _GONE if is_gone else _HERE if self.mailbox.is_open else _LATER
                self.is_serving = status == _HERE
            reply = torch.tensor([status])
            self._wait(self.transport.exchange({source: [reply]}, {}, tag=_CONTROL_TAG, what=what))
            if status == _HERE:
                with torch.profiler.record_function("gossip.round", f"t={t}"):
                    self._exchange(source, weight, what)

    @contextlib.contextmanager
    def _occupied(self) -> Iterator[None]:
        """Others may wait for the end of this exchange."""
        with self._serving:
            self._is_occupied = True
        try:
            yield
        finally:
            with self._serving:
                self.is_serving = self._is_occupied = False
                self._num_served += 1
                self._serving.notify_all()

    @contextlib.contextmanager
    def _exchanging(self, peer: int, what: str) -> Iterator[None]:
        """Errors of the network are raised as what is behind them."""
        under_way = self._under_way = _UnderWay(peer, what, time.monotonic())
        try:
            yield
        except ConnectionError as error:
            cause = self.presence.cause_of(error)
            if cause is error:
                raise
            raise cause from error
        except TimeoutError as error:
            raise self._fail_late(under_way) from error
        finally:
            self._under_way = None

    def _wait(self, pending: Pending) -> None:
        """[Note: late peers]"""
        pending.wait(timedelta(seconds=max(self.seconds_left, 0.0)) + _GRACE)

    def _seconds_left(self, under_way: _UnderWay) -> float:
        return under_way.start + self.transport.timeout.total_seconds() - time.monotonic()

    def _fail_late(self, under_way: _UnderWay) -> BaseException:
        error = self.presence.fail_late(under_way.peer, under_way.what, time.monotonic() - under_way.start)
        return self.presence.failed.exception() or error

    def _wake(self) -> None:
        with self._serving:
            self._serving.notify_all()

    def _exchange(self, peer: int, weight: float, what: str) -> None:
        step = self.clock()
        self.mailbox.snapshot(self._sent)
        sends, recvs = {peer: [self._sent.raw]}, {peer: [self._received.raw]}
        self._wait(self.transport.exchange(sends, recvs, tag=_MODEL_TAG, what=what))
        for buffers in self.mailbox.buffers_of(self._sent):
            buffers.zero_()  # the mailbox takes those received as they are
        self._received.add_segments_(self._sent, alpha=-1.0)
        if self.on_nonfinite != "spread" and not is_finite(self._received):
            if self.on_nonfinite == "raise":
                names = self.transport.names
                senders = [names[peer]] if is_finite(self._sent) else ()
                refuse(names[self.transport.rank], what, senders=senders)
            self.num_skipped += 1  # by both of us: their difference is what is not finite
            return
        with self.mailbox.lock:
            self.mailbox.deliver(self._received, alpha=weight)
            self.delivered.append(step)


def _bits(weight: float) -> int:
    return int(torch.tensor([weight], dtype=torch.float64).view(torch.int64).item())


def _weight(bits: int) -> float:
    return torch.tensor([bits]).view(torch.float64).item()

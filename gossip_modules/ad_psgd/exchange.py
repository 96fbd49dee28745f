"""BilateralAverage: the pairwise averaging of AD-PSGD; an active rank asks, a passive rank answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple, cast

import torch

from ..engine.shared_model import SharedModel
from ..flat.nonfinite import check_policy, is_finite, refuse
from ..transport.base import ElasticPending, Pending
from ..transport.exchange import LinkClosedError, PointToPoint
from ..transport.listener import SHUTDOWN_TIMEOUT
from .presence import Presence

_READY, _CLOSED, _NOT_YET = 0, 1, 2  # the replies of a passive rank
_CONTROL_TAG, _MODEL_TAG = 0, 1
_GRACE = timedelta(seconds=1)
_MOMENT = 0.01  # seconds


class _UnderWay(NamedTuple):
    """An exchange with `peer`: what this rank does, for errors, and when it began (`time.monotonic()`)."""

    peer: int
    what: str
    start: float


class _PeerLostError(Exception):
    """[Note: lost peers of an exchange]"""


class BilateralAverage:
    """One exchange between an active rank i and a passive rank j, while both of them train:

        i -> j: a request with the round t and the weight w        j -> i: "ready"
        both:   s <- y                                             # a snapshot, under the lock
                send s, receive r                                  # without the lock
                y <- y + w (r - s)                                 # under the lock; training adds the same to x later

    so that y_i <- y_i + w (y_j - y_i) and y_j <- y_j + w (y_i - y_j).

    [Note: bilateral exchange] The two corrections w (r - s) are exact opposites in floating point, and each is added to
    what y and the parameters have become meanwhile. So the sum over ranks is kept although no rank holds a lock while
    it waits for the network. Active ranks only ask and passive ranks only answer, so no ring of ranks can wait for each
    other. A passive rank replies "not yet" while y is not the model that it trains: before its first step, and after it
    has loaded or saved a checkpoint.

    [Note: late peers] A whole exchange has the transport's timeout. The training thread checks it (`check_time`), tells
    the other ranks who is late, and raises. Only one second later Gloo ends its own wait, which closes all connections
    of this rank. So ranks that lose their connection because of this have received the reason before.

    [Note: lost peers of an exchange] Over a transport whose rounds go on without peers that fail, an exchange that
    fails is withdrawn: y changes only where both models have gone and come whole. The other end may have come as far;
    but then one of the two has ended, or is left out of the job and joins again with another model, so the sum over
    those who stay is kept. The transport says who was lost, at the latest when the timeout has passed; none raises.

    [Note: threads of an exchange] A rank has one thread that exchanges: on an active rank the one that calls `ask`, on
    a passive rank its listening thread, which runs `answer`. That thread alone uses `_sent`, `_received` and writes
    `_under_way`. The lock of `shared` is for y and the pending correction; the condition `_serving` for the three
    attributes behind it, so that the training thread can wait for the end of an exchange. A thread that holds
    `_serving` takes no other lock. `shared.lock` is held only while vectors are copied or added.

    Args:
        shared: y of this rank, and the correction that training has not applied yet.
        transport: a Gloo transport that carries nothing else but collectives of the same ranks.
        clock: returns the step of training, for `delivered`.
        on_nonfinite: what happens with a correction that is not finite: "raise" an error at both ranks, "skip" it at
            both ranks, or "spread": do not check.

    Attributes:
        num_skipped: the number of exchanges whose correction was skipped.
        delivered: the step at which y was read, for each exchange in the pending correction; the engine takes them out.
        is_serving: whether an exchange that a peer asked for is under way.
        presence: which peers are still there, and the first failure.
    """

    def __init__(
        self,
        shared: SharedModel,
        transport: PointToPoint,
        *,
        clock: Callable[[], int],
        on_nonfinite: str = "raise",
    ) -> None:
        self.shared = shared
        self.on_nonfinite = check_policy(on_nonfinite)
        self.num_skipped = 0
        self.transport = transport
        self.clock = clock
        self.delivered: deque[int] = deque()
        self.presence = Presence(transport, tag=_CONTROL_TAG)
        self.is_serving = False
        self._is_elastic = transport.is_elastic
        self._sent, self._received = shared.host_vector(), shared.host_vector()
        self._under_way: _UnderWay | None = None  # [Note: threads of an exchange]
        self._serving = threading.Condition()  # guards the next three
        self._is_occupied = False
        self._num_served = 0
        self._is_closing = False
        self.presence.wake_at_failure(self._serving)

    def over(self, transport: PointToPoint, shared: SharedModel) -> BilateralAverage:
        """One over other links that counts on from this one, which has nothing under way any more."""
        other = BilateralAverage(shared, transport, clock=self.clock, on_nonfinite=self.on_nonfinite)
        other.num_skipped, other.delivered = self.num_skipped, self.delivered
        return other

    def ask(self, peer: int, t: int, weight: float) -> bool:
        """Exchange with a passive rank, unless it replies "not yet". Returns False when it has closed, or was lost.

        Args:
            peer: a passive rank.
            t: the round of this rank, for error messages.
            weight: w, which is sent with the request, so that both ranks use the same.

        Raises:
            TimeoutError, ConnectionError: the exchange failed; names the peer and the round, or the rank that died.
        """
        reply = torch.empty(1, dtype=torch.int64, device="cpu")
        status, what = _CLOSED, f"asking in round {t}"
        with self._exchanging(peer, what):
            pending = self.presence.request(peer, t, _bits(weight), reply=reply, what=what)
            if pending is None:
                return False
            self._wait(pending)
            status = int(reply)
            if status == _READY:
                self._exchange(peer, weight, f"averaging in round {t}")
        return status != _CLOSED

    def answer(self, active_ranks: Collection[int]) -> None:
        """Answer each of these ranks until it has shut down or died; the body of the listening thread.

        An active rank runs the same thread for passive ranks, which ask nothing: it learns which of them shut down or
        die. A failure is in `presence.failed` immediately; from then on this rank replies that it has closed.

        Raises:
            TimeoutError, ConnectionError: (at the end) that failure; names the rank that is late or dead.
        """
        for source, t, bits in self.presence.requests(active_ranks):
            try:
                self._answer(source, t, _weight(bits))
            except Exception as error:  # noqa: BLE001 (raised below, and in the training thread before)
                self.presence.fail(error)
        if self.presence.failed.done():
            self.presence.failed.result()

    def check_time(self) -> None:
        """Fail if the exchange under way has taken longer than the timeout. Called by the training thread."""
        if (under_way := self._late) is not None:
            self._fail_late(under_way)

    @property
    def seconds_left(self) -> float:
        """The seconds until the exchange under way is late, or a moment; the timeout if there is none."""
        if (under_way := self._under_way) is None:
            return self.transport.timeout.total_seconds()
        return max(self._seconds_left(under_way), _MOMENT)

    def wait_until_served(self) -> None:
        """Wait until the exchange under way is delivered, or this rank has failed. Called by the training thread.

        Never call it with the lock of `shared`: the listening thread needs it to deliver.

        Raises:
            TimeoutError: the exchange has taken longer than the timeout; names the peer.
        """
        with self._serving:
            num_served = self._num_served

            def is_over() -> bool:
                return not self._is_occupied or self._num_served > num_served or self.presence.failed.done()

            while not self._serving.wait_for(is_over, self.seconds_left):
                if (under_way := self._late) is not None:
                    break
            else:
                return
        raise self._fail_late(under_way)

    def shut_down(self, peers: Iterable[int]) -> None:
        """Tell these ranks that this one neither asks nor answers any more. Does not wait."""
        self.presence.shut_down(peers)

    def stop_answering(self, seconds: float = SHUTDOWN_TIMEOUT.total_seconds()) -> bool:
        """Wait for the exchange under way, at most for so long, and from then on reply that this rank has closed.

        Returns whether that exchange is over; False: it ends by itself.
        """
        with self._serving:
            self._serving.wait_for(lambda: not self._is_occupied or self.presence.failed.done(), seconds)
            self._is_closing = True
            return not self._is_occupied

    def _answer(self, source: int, t: int, weight: float) -> None:
        what = f"answering round {t} of rank {self.transport.names[source]}"
        with self._exchanging(source, what), self._occupied():
            with self.shared.lock:  # so that `withdraw` comes before the reply, or waits until `is_serving` is set
                is_closed = self._is_closing or self.presence.failed.done()
                status = _CLOSED if is_closed else _READY if self.shared.is_open else _NOT_YET
                self.is_serving = status == _READY
            reply = torch.tensor([status], device="cpu")
            self._wait(self.transport.exchange({source: [reply]}, {}, tag=_CONTROL_TAG, what=what))
            if status == _READY:
                with torch.profiler.record_function("gossip.round", f"t={t}"):
                    self._exchange(source, weight, what)

    @contextlib.contextmanager
    def _occupied(self) -> Iterator[None]:
        """A context in which the training thread can wait for the end of this exchange."""
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
        """A context for an exchange. An error of the network becomes the failure that caused it.

        Where the peer is lost, the context ends with the exchange: [Note: lost peers of an exchange].
        """
        under_way = self._under_way = _UnderWay(peer, what, time.monotonic())
        try:
            yield
        except (_PeerLostError, LinkClosedError):
            return
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
        """[Note: late peers] and [Note: lost peers of an exchange]"""
        grace = timedelta(0) if self._is_elastic else _GRACE
        pending.wait(timedelta(seconds=self.seconds_left) + grace)
        if self._is_elastic and cast("ElasticPending", pending).lost:
            raise _PeerLostError

    @property
    def _late(self) -> _UnderWay | None:
        """The exchange under way, if it is late and does not end by itself."""
        under_way = None if self._is_elastic else self._under_way
        return None if under_way is None or self._seconds_left(under_way) > 0 else under_way

    def _seconds_left(self, under_way: _UnderWay) -> float:
        return under_way.start + self.transport.timeout.total_seconds() - time.monotonic()

    def _fail_late(self, under_way: _UnderWay) -> BaseException:
        error = self.presence.fail_late(under_way.peer, under_way.what, time.monotonic() - under_way.start)
        return self.presence.failed.exception() or error

    def _exchange(self, peer: int, weight: float, what: str) -> None:
        """y_i <- y_i + w (y_j - y_i), and training does the same to x. In the thread that exchanges, without a lock."""
        step = self.clock()
        self.shared.snapshot(self._sent)
        sends, recvs = {peer: [self._sent.raw]}, {peer: [self._received.raw]}
        self._wait(self.transport.exchange(sends, recvs, tag=_MODEL_TAG, what=what))
        for buffers in self.shared.buffers_of(self._sent):
            buffers.zero_()  # those received are averaged: [Note: buffers of a pending correction]
        self._received.add_segments_(self._sent, alpha=-1.0)  # y_j - y_i
        if self.on_nonfinite != "spread" and not is_finite(self._received):
            if self.on_nonfinite == "raise":
                names = self.transport.names
                senders = [names[peer]] if is_finite(self._sent) else ()
                refuse(names[self.transport.rank], what, senders=senders)
            self.num_skipped += 1  # at both ranks: the difference that is not finite is the same at both
            return
        with self.shared.lock:
            self.shared.deliver(self._received, alpha=weight)  # y_i <- y_i + w (y_j - y_i)
            self.delivered.append(step)


def _bits(weight: float) -> int:
    return int(torch.tensor([weight], dtype=torch.float64, device="cpu").view(torch.int64).item())


def _weight(bits: int) -> float:
    return torch.tensor([bits], device="cpu").view(torch.float64).item()

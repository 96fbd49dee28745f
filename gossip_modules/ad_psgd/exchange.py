"""BilateralAverage: the pairwise averaging of AD-PSGD; an active rank asks, a passive rank answers."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any

import torch

from ..engine.engine import EngineStats
from ..engine.liveness import ControlMessage, Liveness
from ..engine.snapshots import Snapshot
from ..flat.distance import DistanceBound, norm
from ..flat.nonfinite import check_policy, is_finite, log_left_out, refuse
from ..flat.vector import FlatVector, add_
from ..profiling import span
from ..transport.base import Pending
from ..transport.deadline import Deadline
from ..transport.exchange import LinkClosedError, PointToPoint
from ..transport.threads import CallThread
from .shared_model import SharedModel

_REQUEST = 0  # the kind of a control message
_CONTROL_TAG, _MODEL_TAG = 0, 1
_READY, _CLOSED, _NOT_YET = 0, 1, 2  # the replies of a passive rank


class _PeerLostError(Exception):
    """A peer is lost: see [Note: lost peers of an exchange]."""


class BilateralAverage:
    """Exchanges between an active rank i and a passive rank j, while both of them train:

        i -> j: a request with the round t and the weight w        j -> i: "ready"
        both:   s <- y                                             # a snapshot that is not written meanwhile
                send s, receive r                                  # without the lock
                y <- y + w (r - s)                                 # under the lock; training adds the same to x later

    so that y_i <- y_i + w (y_j - y_i) and y_j <- y_j + w (y_i - y_j).

    [Note: bilateral exchange] The two corrections w (r - s) are exact opposites in floating point, and each is added to
    the present y and parameters. So the sum over ranks is kept although no rank holds a lock while it waits for the
    network. Active ranks only ask and passive ranks only answer, so no ring of ranks can wait for each other. A passive
    rank replies "not yet" while y is not the model that it trains: before its first step, and after it has loaded or
    saved a checkpoint.

    [Note: lost peers of an exchange] Over an elastic transport an exchange that fails is withdrawn: y changes only
    where both models have gone and come whole. The other end may have completed it; but then one of the two has ended,
    or is left out of the job and joins again with another model, so the sum over the remaining ranks is kept. The
    transport notices the loss, at the latest when the timeout has passed; none raises.

    One thread of each rank runs its exchanges, in order; another one listens. The lock of `shared` is for y and the
    pending correction; it is held only while vectors are copied or added. Public methods are for the training thread.

    Args:
        shared: y of this rank, and the correction that training has not applied yet.
        transport: a Gloo transport that carries nothing else but collectives of the same ranks.
        peers: the ranks with which this one exchanges in some round.
        stats: mutated: the number of exchanges whose correction was skipped.
        on_nonfinite: the reaction to a correction that is not finite: "raise" an error at both ranks, or "spread": do
            not check. Over an elastic transport only the rank with such a model raises.
        max_relative_distance: the largest |r - s| that is added, in units of |s|, over the parameters; where it is
            larger, this rank skips its half of the exchange. None: all are added.

    Attributes:
        liveness: the control messages and the failures of this rank.
        closed_peers: passive ranks that have replied that they have closed, or were lost.
        is_serving: whether an exchange that a peer asked for is under way.
        is_closing: whether requests get the reply that this rank has closed.
    """

    def __init__(
        self,
        shared: SharedModel,
        transport: PointToPoint,
        peers: Collection[int],
        *,
        stats: EngineStats,
        on_nonfinite: str = "raise",
        max_relative_distance: float | None = None,
    ) -> None:
        self.shared, self.transport = shared, transport
        self.on_nonfinite = check_policy(on_nonfinite)
        self._bound = None if max_relative_distance is None else DistanceBound(max_relative_distance)
        self._stats = stats
        self.closed_peers: set[int] = set()
        self.is_serving = self.is_closing = False
        self._received = shared.snapshots.vector()
        self._y: Snapshot | None = None  # of the exchange under way
        self._exchanges: deque[Future[float]] = deque()  # which have not ended, in their order
        self._thread: CallThread | None = None  # made with the first exchange
        self.liveness = Liveness(transport, peers, tag=_CONTROL_TAG)
        self.liveness.listen(self._handle)

    @property
    def under_way(self) -> Future[float] | None:
        """The exchange under way, if there is one."""
        while self._exchanges and self._exchanges[0].done():
            self._exchanges.popleft()
        return self._exchanges[0] if self._exchanges else None

    def ask(self, peer: int, t: int, weight: float) -> None:
        """Start an exchange with a passive rank. Nothing is exchanged where it replies "not yet", or has closed.

        Args:
            peer: a passive rank.
            t: the round of this rank, for error messages.
            weight: w, which is sent with the request, so that both ranks use the same.
        """
        y = self.shared.snapshots.acquire()
        assert y is not None, "publish() comes first"
        self._submit(partial(self._ask, peer, t, weight, y))

    def wait(self, seconds: float) -> bool:
        """Wait for the exchange under way, or for a failure of this rank; returns whether the exchange is over."""
        exchange = self.under_way
        if exchange is None:
            return True
        either: list[Future[Any]] = [exchange, self.liveness.failed]
        wait(either, seconds, FIRST_COMPLETED)
        return exchange.done()

    def shut_down(self) -> None:
        """Tell the peers that this rank neither asks nor answers any more. Does not wait."""
        self.is_closing = True
        self.liveness.shut_down()

    def close(self, seconds: float) -> None:
        """End the threads, after `shut_down`; peers may ask until they have shut down too, at most for so long.

        On a busy machine a peer may have sent its last message and not listen yet for the last message of this rank.
        Gloo sends the message when the peer listens, unless it was dropped before.
        """
        deadline = Deadline(seconds)
        if self.liveness.background.close(seconds):
            if seconds:
                self.liveness.wait_until_received(deadline.left_for_gloo)
            self.liveness.drop_messages()
        if self._thread is not None:
            self._thread.close()

    def _handle(self, sender: int, message: ControlMessage) -> None:
        """Handle a control message, in the listening thread of its sender."""
        if message.kind == _REQUEST:
            self._submit(partial(self._answer, sender, message.first, _weight(message.second)))

    def _submit(self, exchange: Callable[[], None]) -> None:
        def run() -> float:
            try:
                with torch.no_grad():
                    exchange()
            except Exception as error:  # noqa: BLE001 (raised in the training thread)
                self.liveness.fail(error)
            return 0.0

        with self.shared.lock:  # the threads that listen submit too
            if self._thread is None:
                self._thread = CallThread(f"gossip-{self.transport.rank}")
            self._exchanges.append(self._thread.submit(run))

    def _ask(self, peer: int, t: int, weight: float, y: Snapshot) -> None:
        """The exchange of an active rank."""
        reply = torch.empty(1, dtype=torch.int64, device="cpu")
        status, deadline = _CLOSED, Deadline(self.transport.timeout)
        with self._exchanging(peer, f"asking in round {t}", t, y):
            message = ControlMessage(_REQUEST, t, _bits(weight))
            pending = self.liveness.request(peer, message, reply=reply, what=f"asking in round {t}")
            if pending is not None:
                self._wait(pending, deadline)
                status = int(reply)
            if status == _READY:
                self._exchange(peer, weight, y, f"averaging in round {t}", deadline)
        if status == _CLOSED:
            self.closed_peers.add(peer)

    def _answer(self, source: int, t: int, weight: float) -> None:
        """The exchange of a passive rank."""
        what, deadline = f"answering round {t} of rank {self.transport.names[source]}", Deadline(self.transport.timeout)
        with self.shared.lock:  # so that `withdraw` comes before the reply, or waits until `is_serving` is set
            is_closed = self.is_closing or self.liveness.has_failed
            y = None if is_closed else self.shared.snapshots.acquire()
            self.is_serving = y is not None
        with self._exchanging(source, what, t, y):
            reply = torch.tensor([_CLOSED if is_closed else _NOT_YET if y is None else _READY], device="cpu")
            self._wait(self.transport.exchange({source: [reply]}, {}, tag=_CONTROL_TAG, what=what), deadline)
            if y is not None:
                self._exchange(source, weight, y, what, deadline)

    @contextlib.contextmanager
    def _exchanging(self, peer: int, what: str, t: int, y: Snapshot | None) -> Iterator[None]:
        """A context for an exchange, which lets go of y. An error of the network becomes the failure that caused it.

        Where the peer is lost, the context ends with the exchange: [Note: lost peers of an exchange].
        """
        waiting = self.liveness.waiting(what, lambda: peer)
        profiled = span("gossip.round", f"t={t}")
        self._y = y
        try:
            with contextlib.suppress(_PeerLostError, LinkClosedError), waiting, profiled:
                yield
        finally:
            self._release_y()
            self.is_serving = False

    def _release_y(self) -> None:
        y, self._y = self._y, None
        self.shared.snapshots.release(y)

    def _wait(self, pending: Pending, deadline: Deadline) -> None:
        """Wait for a message, at most until the deadline of the exchange."""
        pending.wait(deadline.left_for_gloo)
        if pending.lost:
            raise _PeerLostError

    def _exchange(self, peer: int, weight: float, y: Snapshot, what: str, deadline: Deadline) -> None:
        """y_i <- y_i + w (y_j - y_i), and training does the same to x. In the thread that exchanges, without a lock.

        The received buffers stay as they are: [Note: buffers of a pending correction] of `SharedModel`.
        """
        y.wait()
        received, sent, step, start = self._received, y.vector, y.standing, time.monotonic()
        self._wait(
            self.transport.exchange({peer: [sent.raw]}, {peer: [received.raw]}, tag=_MODEL_TAG, what=what), deadline
        )
        self.transport.traffic.arrived({}, {peer: time.monotonic() - start})
        for theirs, own in zip(received.parameters, sent.parameters, strict=True):
            add_(theirs, own, alpha=-1.0)  # y_j - y_i
        if self._bound is not None and not self._is_near(self._bound, received, sent, peer, what):
            self.transport.traffic.refused([peer])
            self._stats.num_skipped += 1
            return
        if self.on_nonfinite != "spread" and not is_finite(received):
            names, is_own = self.transport.names, not is_finite(sent)
            if is_own or not self.transport.is_elastic:
                refuse(names[self.transport.rank], what, senders=() if is_own else [names[peer]])
            log_left_out(names[self.transport.rank], what, [names[peer]])
            self._stats.num_skipped += 1
            return
        self._release_y()  # [Note: three vectors] of `SharedModel`
        self.shared.deliver(received, alpha=weight, step=step)  # y_i <- y_i + w (y_j - y_i)
        self.transport.traffic.mixed(max(self.liveness.round - step, 0), [peer])

    def _is_near(self, bound: DistanceBound, received: FlatVector, sent: FlatVector, peer: int, what: str) -> bool:
        """Whether the received y_j - y_i is within the bound; a model y_i that is not finite has no bound."""
        names, own = self.transport.names, norm(sent.parameters)
        if not math.isfinite(own):
            return True
        is_near = norm(received.parameters) <= bound.limit * own
        is_near = is_near and bound.accepts_buffers(received.buffers, sent.buffers)
        bound.note(rank=names[self.transport.rank], sender=names[peer], what=what, is_accepted=is_near)
        return is_near


def _bits(weight: float) -> int:
    return int(torch.tensor([weight], dtype=torch.float64, device="cpu").view(torch.int64).item())


def _weight(bits: int) -> float:
    return torch.tensor([bits], device="cpu").view(torch.float64).item()

"""Control messages of WAGMA-SGD: a few integers that ranks send each other beside their models."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch

from ..transport.base import Pending
from ..transport.exchange import FOREVER
from ..transport.process_group import ProcessGroupTransport

CLOSE_TIMEOUT = timedelta(seconds=2)
_CLOSE_TIMEOUT_AFTER_FAILURE = timedelta(seconds=0.5)
_GRACE = timedelta(seconds=5)
_AT_ONCE = timedelta(milliseconds=1)
_TAG = 0  # control messages have a channel of their own


class ControlKind(IntEnum):
    """The kind of a control message; the number is what is sent."""

    ARRIVED = 0  # some rank has arrived at a round
    SETTLING = 1  # the sender is in `settle()`
    BEGINNING = 2  # the sender waits for all ranks before its first step
    SHUTDOWN = 3  # the sender has closed and sends nothing after this
    STATUS_REQUEST = 4  # the sender asks what the receiver is doing
    STATUS = 5  # what the sender is doing; the answer to STATUS_REQUEST
    FAILED = 6  # the sender has failed because of a rank, and sends nothing after this


class ControlMessage(NamedTuple):
    """One control message: five integers on the wire.

    Attributes:
        kind: what the message is about.
        round: (ARRIVED) the round at which some rank has arrived; (SETTLING, BEGINNING) the newest round that the
            sender knows of; (STATUS) the round of the sender; (FAILED) the rank at fault, or -1.
        barrier_id: (SETTLING, BEGINNING) the number of barriers of this kind that the sender has passed before;
            (ARRIVED) the number of times that the sender has begun.
        stage: (SETTLING, BEGINNING) the stage of the barrier; (STATUS) an `Activity`; (FAILED) a `FailureReason`.
        oldest: (BEGINNING) the oldest round that the sender knows of; (STATUS) the rank that the sender waits for, or
            -1.
    """

    kind: ControlKind
    round: int = 0
    barrier_id: int = 0
    stage: int = 0
    oldest: int = 0


_LAST = (ControlKind.SHUTDOWN, ControlKind.FAILED)


def control_peers(rank: int, world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that control messages of this one go to, and those that it gets some from; see `ControlChannel`."""
    distances = [1 << i for i in range((world_size - 1).bit_length())]
    out_peers = tuple((rank + distance) % world_size for distance in distances)
    return out_peers, tuple((rank - distance) % world_size for distance in distances)


class ControlChannel:
    """Control messages between a rank and its neighbours: the ranks at distances 1, 2, 4, ... modulo the world size.

    A message that every rank forwards once to all its out-neighbours reaches all ranks in ceil(log2 n) hops, from any
    rank and for any world size. This also holds when several ranks start one at the same time.

    [Note: one listening thread per neighbour] `listen` is the body of a thread that receives from one neighbour,
    whether that is an in- or an out-neighbour. A Gloo receive from a given rank fails at once when the connection to
    that rank closes; a receive from any rank does not. So the neighbours of a rank that died learn of it immediately.
    They include all ranks with which it shares a group. A listening thread posts its answers and never waits for a
    send: a thread that waited here could wait for a rank which itself waits for this one, and both would be stuck.

    [Note: shutdown] The last message to a neighbour is SHUTDOWN or FAILED. A rank that receives one answers with its
    own SHUTDOWN, from the listening thread. So both listening threads end within milliseconds although only one of the
    two ranks has closed.

    Two locks. `_sending` belongs to `send`, which waits while it holds it: listening threads never take it. `_posting`
    guards everything below it in `__init__` and is never held while waiting, so any thread may take it, also a thread
    that holds `WaitAvoidingWorker.state`.

    Args:
        transport: a transport over Gloo; the channel makes its own connections from it. Construction is collective: all
            ranks must construct this object at the same point.

    Attributes:
        neighbours: the ranks from which a thread of this rank listens.
        closed_peers: neighbours that have shut down, with the time at which this rank learnt it (`time.monotonic()`).
    """

    def __init__(self, transport: ProcessGroupTransport) -> None:
        self.transport = copy.deepcopy(transport)
        # The failure detector ends waits before this: a wait that Gloo ends closes all connections of this rank.
        self.transport.timeout = transport.timeout + _GRACE
        self.out_peers, self.in_peers = control_peers(transport.rank, transport.world_size)
        self.neighbours = tuple(sorted({*self.out_peers, *self.in_peers}))
        self.closed_peers: dict[int, float] = {}
        self._sending = threading.Lock()
        self._sent: list[Pending] = []  # under `_sending`
        self._posting = threading.Lock()
        self._posted: dict[tuple[int, ControlKind], Pending] = {}  # the last request and the last answer to each peer
        self._last_messages: list[Pending] = []
        self._has_last_message: set[int] = set()  # neighbours to which the last message has been posted

    def send(self, message: ControlMessage, *, peers: Sequence[int] | None = None) -> None:
        """Send to `peers`, or to all out-neighbours. Returns when the previous messages of `send` have been received.

        Raises:
            TimeoutError, ConnectionError: a previous message was not received; names the rank.
        """
        with self._sending:
            sent, self._sent = self._sent, []
            for pending in sent:
                pending.wait()
            with self._posting:
                receivers = self.out_peers if peers is None else peers
                self._sent.append(self._post(message, [i for i in receivers if i not in self._has_last_message]))

    def post(self, message: ControlMessage, peer: int) -> None:
        """Send to one neighbour without waiting; from any thread. Does nothing after the last message to it.

        At most one message of each kind is in transfer: the next request follows the answer to the one before, and an
        answer follows a request.
        """
        with self._posting, contextlib.suppress(ConnectionError):  # the listening thread reports that it is gone
            if peer not in self._has_last_message:
                self._posted[peer, message.kind] = self._post(message, [peer])

    def post_last(self, message: ControlMessage, peers: Iterable[int] | None = None) -> None:
        """Post the last message to `peers`, or to all neighbours; skips those that have it. From any thread."""
        with self._posting:
            for peer in self.neighbours if peers is None else peers:
                if peer not in self._has_last_message:
                    self._has_last_message.add(peer)
                    with contextlib.suppress(ConnectionError):  # it is gone
                        self._last_messages.append(self._post(message, [peer]))

    def wait_until_last_sent(self, *, is_failed: bool = False) -> None:
        """Wait until the last messages have been received; at most two seconds, half a second after a failure."""
        with self._posting:
            last_messages, self._last_messages = self._last_messages, []
        deadline = time.monotonic() + (_CLOSE_TIMEOUT_AFTER_FAILURE if is_failed else CLOSE_TIMEOUT).total_seconds()
        for pending in last_messages:
            left = max(timedelta(seconds=deadline - time.monotonic()), _AT_ONCE)
            with contextlib.suppress(ConnectionError, TimeoutError):  # it is gone, or will find out by itself
                pending.wait(left)

    def listen(self, peer: int, handle: Callable[[int, ControlMessage], None]) -> None:
        """Call `handle(peer, message)` for every message of that neighbour, up to and including its last one.

        Raises:
            ConnectionError: the connection closed before the last message.
        """
        buffer = torch.empty(len(ControlMessage._fields), dtype=torch.int64, device="cpu")
        is_over = False
        while not is_over:
            receiving = self.transport.exchange({}, {peer: (buffer,)}, tag=_TAG, what="listening")
            receiving.wait(FOREVER)
            kind, *numbers = buffer.tolist()
            message = ControlMessage(ControlKind(kind), *numbers)
            if is_over := message.kind in _LAST:
                self.post_last(ControlMessage(ControlKind.SHUTDOWN), [peer])  # [Note: shutdown]
            # The training thread blames who has closed: it must know before why a rank that has failed did.
            has_failed = message.kind is ControlKind.FAILED
            if has_failed:
                handle(peer, message)
            if is_over:
                self.closed_peers[peer] = time.monotonic()
            if not has_failed:
                handle(peer, message)

    def close_connections(self) -> None:
        """Close all connections of this rank over the group, which ends every wait on them."""
        self.transport.close_connections()

    def _post(self, message: ControlMessage, peers: Sequence[int]) -> Pending:
        tensor = torch.tensor(message, device="cpu")
        what = f"sending {message.kind.name} of round {message.round}"
        return self.transport.exchange(dict.fromkeys(peers, (tensor,)), {}, tag=_TAG, what=what)

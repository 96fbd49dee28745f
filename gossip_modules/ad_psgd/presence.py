"""Presence: which peers of a rank are still there, and which rank failed first, as all ranks learn it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial

import torch
from torch import Tensor

from ..transport.base import Pending
from ..transport.exchange import SHUTDOWN, LinkClosedError, PointToPoint
from ..transport.listener import ConnectionLost, Listener

_REQUEST, _SHUTDOWN, _DIED, _LATE = range(4)  # the kinds of messages
_SECONDS_OF_GRACE = 1.0  # until the message that says why a connection is closed has been handled


class Presence:
    """Requests from peers, shutdown messages between them, and the first failure, which is passed on to all ranks.

    [Note: shutdown messages] Each rank sends SHUTDOWN to each peer once, after its last request, and listens until the
    peer has sent it too. A rank that receives it sends it in return. So the threads of both ranks end when one of them
    closes, however long the other goes on training. A connection that closes before SHUTDOWN is that of a dead rank.

    [Note: who died] The rank that has lost a peer tells its other peers which one before it raises an error itself;
    they pass it on. The graph of all peers is connected, so all ranks name the rank that died first, and not one that
    ended because of it. A peer that does not answer in time is reported in the same way, before Gloo closes this rank's
    connections because of it. Over a transport whose rounds go on without peers that fail, the membership knows who has
    died: nobody passes it on, and such a peer is as if it had shut down.

    [Note: locks of presence] `_sending` orders requests and shutdown messages; it is held while a message is posted,
    never while one is waited for. `_failing` makes the first failure the only one; the thread that holds it takes
    `_sending`, and the callbacks of `failed` run with it held, never the other way round. So any thread may call any
    method, except `requests`, which belongs to the listening thread.

    Args:
        transport: a transport over Gloo.
        tag: the tag of all messages of this object, which nothing else uses.

    Attributes:
        failed: done, with the error, once this rank has met the first failure or received the news of it.
    """

    def __init__(self, transport: PointToPoint, *, tag: int) -> None:
        self.transport = transport
        self.failed: Future[None] = Future()
        self._tag = tag
        self._sending = threading.Lock()  # [Note: locks of presence]
        self._shut_down: set[int] = set()  # peers to which SHUTDOWN has been posted
        self._posted: list[Pending] = []  # not waited for, but not to be freed before they are sent
        self._failing = threading.Lock()
        self._listener: Listener | None = None

    def wake_at_failure(self, waiting: threading.Condition) -> None:
        """Wake who waits on this condition as soon as `failed` is done."""
        self.failed.add_done_callback(partial(_wake, waiting))  # holds nothing else: this object is freed without a GC

    def requests(self, peers: Collection[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (sender, first, second) of each request, until all peers have shut down or died.

        Belongs to the listening thread. After a failure, which is in `failed`, it goes on until then.
        """
        listener = self._listener = Listener(
            self.transport, peers, num_integers=3, tag=self._tag, is_last=lambda message: message[0] == _SHUTDOWN
        )
        while listener.present:
            try:
                for sender, (kind, first, second) in listener.messages():
                    if kind == _REQUEST:
                        yield sender, first, second
                    elif kind == _SHUTDOWN:
                        self.shut_down([sender])
                    else:
                        self._handle_news(kind, first, second, sender)
                return
            except ConnectionLost as lost:
                self.fail(ConnectionError(str(lost)), news=None if lost.is_closed_here else (_DIED, lost.peer, 0))

    def request(self, peer: int, first: int, second: int, *, reply: Tensor, what: str) -> Pending | None:
        """Post a request and a receive of its reply; None if this rank has shut down towards that peer.

        Raises:
            ConnectionError: the peer is gone.
        """
        message = torch.tensor([_REQUEST, first, second], device="cpu")
        with self._sending:
            if peer in self._shut_down:
                return None
            return self.transport.exchange({peer: [message]}, {peer: [reply]}, tag=self._tag, what=what)

    def shut_down(self, peers: Iterable[int]) -> None:
        """Send SHUTDOWN to these peers, except where it has been sent before: no request follows. Does not wait."""
        for peer in peers:
            with self._sending:
                if peer not in self._shut_down:
                    self._shut_down.add(peer)
                    self._post(peer, _SHUTDOWN, 0, 0)

    def fail(self, error: BaseException, *, news: tuple[int, int, int] | None = None) -> None:
        """Make the error the failure of this rank and send the news to its peers, unless it has failed before."""
        with self._failing:
            if self.failed.done():
                return
            if news is not None:
                for peer in sorted(self._listener.present if self._listener is not None else ()):
                    with self._sending:
                        if peer not in self._shut_down:
                            self._post(peer, *news)
            self.failed.set_exception(error)

    def fail_late(self, peer: int, what: str, seconds: float) -> TimeoutError:
        """Fail because that peer has not answered in time; returns the error that says so."""
        limit = self.transport.timeout.total_seconds()
        ended = f"the exchange with rank {self.transport.names[peer]} has not ended after {seconds:.1f} s"
        error = TimeoutError(f"{self._me}: {what}: {ended} (timeout {limit:g} s)")
        self.fail(error, news=(_LATE, peer, round(1000 * seconds)))
        return error

    def cause_of(self, error: ConnectionError) -> BaseException:
        """The failure that closed a connection: its other end may have ended because of another rank."""
        if self._listener is not None:
            self._wait_for_cause()
        self.fail(error)
        cause = self.failed.exception()
        assert cause is not None
        return cause

    def _wait_for_cause(self) -> None:
        wait([self.failed], _SECONDS_OF_GRACE)

    def _handle_news(self, kind: int, about: int, milliseconds: int, sender: int) -> None:
        """Fail because of what a peer has reported about a rank: [Note: who died]."""
        names = self.transport.names
        source, rank = f"rank {names[sender]}", f"rank {names[about]}"
        error: ConnectionError | TimeoutError
        if about == self.transport.rank:
            after = f"{milliseconds / 1000:.1f} s without an answer" if kind == _LATE else "a closed connection"
            error = ConnectionError(f"{self._me}: {source} has given this rank up after {after}")
        elif kind == _DIED:
            error = ConnectionError(f"{self._me}: {rank} has died: {source} says so")
        else:
            error = TimeoutError(
                f"{self._me}: {rank} has not answered for {milliseconds / 1000:.1f} s: {source} says so"
            )
        self.fail(error, news=(kind, about, milliseconds))

    def _post(self, peer: int, kind: int, first: int, second: int) -> None:
        """Post without waiting, with `_sending`. A peer whose connection is closed needs no message."""
        message = torch.tensor([kind, first, second], device="cpu")
        try:
            self._posted.append(self.transport.exchange({peer: [message]}, {}, tag=self._tag, what=SHUTDOWN))
        except (ConnectionError, LinkClosedError):
            return

    @property
    def _me(self) -> str:
        return f"rank {self.transport.names[self.transport.rank]}"


def _wake(waiting: threading.Condition, _: Future[None]) -> None:
    with waiting:
        waiting.notify_all()

"""Presence: which peers of a rank are still there, who has died, and how all ranks come to know."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, wait

import torch
from torch import Tensor

from ..transport.listener import ConnectionLost, Listener
from ..transport.process_group import Pending, ProcessGroupTransport

_REQUEST, _GOODBYE, _DIED, _LATE = range(4)  # what a message says
_SECONDS_OF_GRACE = 1.0  # for the thread that knows why a connection is closed


class Presence:
    """Requests from peers, goodbyes between them, and the first failure, which all ranks hear of.

    [Note: goodbyes] Each rank says goodbye to each peer once, after its last request, and listens until the peer has
    said so too. Who hears a goodbye says it in return. So all threads end when one of the two ranks closes, however
    long the other trains on. A connection that closes without a goodbye is that of a rank that has died.

    [Note: who died] The rank that has lost a peer tells its other peers who that is before it raises an error itself;
    they pass it on. The peers of all ranks are a connected graph, so all name the rank that died first, and not one
    that ended because of it. A peer that does not answer in time is reported in the same way, and before Gloo closes
    this rank's connections for it.

    Args:
        transport: over Gloo; `tag` is for the messages of this object alone.
        tag: of all of its messages.

    Attributes:
        failed: done, with the error, when this rank has met or heard of the first failure.
    """

    def __init__(self, transport: ProcessGroupTransport, *, tag: int) -> None:
        self.transport = transport
        self.failed: Future[None] = Future()
        self._tag = tag
        self._sending = threading.Lock()  # so that no request follows a goodbye; nobody waits with it
        self._told: set[int] = set()  # who has had our goodbye
        self._posted: list[Pending] = []  # goodbyes and news; nobody waits for them, but they must not be freed
        self._failing = threading.Lock()
        self._listener: Listener | None = None

    def requests(self, peers: Collection[int]) -> Iterator[tuple[int, int, int]]:
        """(sender, first, second) of each request, until all peers have said goodbye or died; for one thread.

        It goes on after a failure, which is in `failed`, until then.
        """
        listener = self._listener = Listener(self.transport, peers, num_integers=3, tag=self._tag)
        while listener.present:
            try:
                for sender, (kind, first, second) in listener.messages():
                    if kind == _REQUEST:
                        yield sender, first, second
                    elif kind == _GOODBYE:
                        listener.dismiss(sender)
                        self.say_goodbye([sender])
                    else:
                        self._hear(kind, first, second, sender)
                return
            except ConnectionLost as lost:
                self.fail(ConnectionError(str(lost)), news=None if lost.is_closed_here else (_DIED, lost.peer, 0))

    def request(self, peer: int, first: int, second: int, *, reply: Tensor, what: str) -> Pending | None:
        """Post a request and a receive of its reply; None after a goodbye.

        Raises:
            ConnectionError: the peer is gone.
        """
        message = torch.tensor([_REQUEST, first, second])
        with self._sending:
            if peer in self._told:
                return None
            return self.transport.exchange({peer: [message]}, {peer: [reply]}, tag=self._tag, what=what)

    def say_goodbye(self, peers: Iterable[int]) -> None:
        """This rank asks these peers no more; returns at once, and does nothing where it has said so."""
        for peer in peers:
            with self._sending:
                if peer not in self._told:
                    self._told.add(peer)
                    self._post(peer, _GOODBYE, 0, 0)

    def fail(self, error: BaseException, *, news: tuple[int, int, int] | None = None) -> None:
        """Keep the error, and tell peers the news if there are any, unless there was a failure before."""
        with self._failing:
            if self.failed.done():
                return
            if news is not None:
                for peer in sorted(self._listener.present if self._listener is not None else ()):
                    with self._sending:
                        if peer not in self._told:
                            self._post(peer, *news)
            self.failed.set_exception(error)

    def fail_late(self, peer: int, what: str, seconds: float) -> TimeoutError:
        """This rank has waited for that peer in vain; returns the error that says so."""
        limit = self.transport.timeout.total_seconds()
        ended = f"the exchange with rank {self.transport.names[peer]} has not ended after {seconds:.1f} s"
        error = TimeoutError(f"{self._me}: {what}: {ended} (timeout {limit:g} s)")
        self.fail(error, news=(_LATE, peer, round(1000 * seconds)))
        return error

    def cause_of(self, error: ConnectionError) -> BaseException:
        """The failure behind a connection that is closed: its other end may have ended because of another rank."""
        if self._listener is not None:
            self._wait_for_cause()
        self.fail(error)
        cause = self.failed.exception()
        assert cause is not None
        return cause

    def _wait_for_cause(self) -> None:
        wait([self.failed], _SECONDS_OF_GRACE)

    def _hear(self, kind: int, about: int, milliseconds: int, sender: int) -> None:
        """[Note: who died]"""
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
        """With `_sending`. To a peer who is gone there is nothing to say."""
        message = torch.tensor([kind, first, second])
        try:
            self._posted.append(self.transport.exchange({peer: [message]}, {}, tag=self._tag, what="goodbye"))
        except ConnectionError:
            return

    @property
    def _me(self) -> str:
        return f"rank {self.transport.names[self.transport.rank]}"

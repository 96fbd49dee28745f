"""Listener: messages of a few integers from a rank's peers, until all of them have announced their shutdown."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import torch

from . import threads
from .deadline import Deadline
from .exchange import FOREVER, LinkClosedError, PointToPoint

SHUTDOWN_TIMEOUT = timedelta(seconds=2)


class ConnectionLost(ConnectionError):
    """The connection to a peer is closed, and the peer had not announced its shutdown."""


Message: TypeAlias = "list[int] | ConnectionLost"


class Listener:
    """Hands over the messages of all peers, and the ends of their connections, each in the thread of its peer.

    [Note: a reader for each peer] Over Gloo a receive from a given rank fails at once when that rank's process ends; a
    receive from any rank does not. A receive can be neither polled nor aborted, and there is no wait for several. So
    each peer has a thread for its messages, idle in a condition variable: as many threads as a rank has peers, O(log n)
    on an exponential graph and n / 2 on a complete bipartite one, beside as many connections. A reader handles its
    messages itself. One thread for the messages of all peers would be another one to wake, and to wait for the
    interpreter's lock, on the way of each message.

    [Note: readers at exit] A reader ends with the last message of its peer, or with its connection. Without an
    announced shutdown the reader of a peer goes on waiting. At the exit of the interpreter it must not: a message would
    wake the thread inside C++ code and abort the process. So the connections are closed at exit.

    Args:
        transport: a transport over Gloo. If its rounds go on without failed peers, the link of such a peer is closed.
        peers: the senders.
        num_integers: the number of integers in a message.
        tag: the tag of the messages.
        is_last: whether a message announces the shutdown of its sender.
    """

    def __init__(
        self,
        transport: PointToPoint,
        peers: Collection[int],
        *,
        num_integers: int,
        tag: int,
        is_last: Callable[[list[int]], bool],
    ) -> None:
        self.transport = transport
        self._num_integers, self._tag, self._is_last = num_integers, tag, is_last
        self._ended = {peer: threading.Event() for peer in sorted(peers)}  # after the last message

    def listen(self, handle: Callable[[int, Message], None], start: Callable[[str, Callable[[], None]], None]) -> None:
        """Start the threads.

        Args:
            handle: called with (sender, integers) of each message as it comes, and with (peer, error) where a peer has
                ended without announcing it; in the thread of that peer.
            start: starts a thread, given its name and its body.
        """
        self.transport.has_listener = True
        _listeners.add(self)
        for peer in self._ended:
            start(f"gossip-listener-{self.transport.rank}-from-{peer}", partial(self._read, peer, handle))

    def wait_for_last(self, peers: Collection[int], deadline: Deadline) -> None:
        """Wait until each of these peers has sent its last message or ended, or until the deadline. For any thread."""
        for peer in peers:
            self._ended[peer].wait(deadline.left)

    def _read(self, peer: int, handle: Callable[[int, Message], None]) -> None:
        """The body of the reader of a peer."""
        threads.join_at_exit(threading.current_thread())
        integers = torch.empty(self._num_integers, dtype=torch.int64, device="cpu")
        tag, ended, start = self.transport.wire_tag(self._tag, integers.nbytes), self._ended[peer], time.monotonic()
        while not ended.is_set():
            message: Message | None = None  # rounds go on without the peer
            try:
                group, rank = self.transport.route(peer)
                group.recv([integers], rank, tag).wait(FOREVER)
                message = integers.tolist()
            except LinkClosedError:
                ended.set()
            except RuntimeError as error:  # of Gloo
                if not (ended.is_set() or self.transport.loses(peer, error, 0.0)):  # it was not late, after all
                    message = self._lost(peer, error, time.monotonic() - start)
                ended.set()
            if message is not None:
                if isinstance(message, list) and self._is_last(message):
                    ended.set()
                handle(peer, message)

    def _lost(self, peer: int, error: RuntimeError, seconds: float) -> ConnectionLost:
        name = self.transport.names[peer]
        return ConnectionLost(f"the connection to rank {name} failed after {seconds:.1f} s: {error}")

    def exit(self) -> None:
        """See [Note: readers at exit]."""
        if waiting := [ended for ended in self._ended.values() if not ended.is_set()]:
            for ended in waiting:
                ended.set()
            self.transport.close_connections()


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for listener in list(_listeners):
        listener.exit()

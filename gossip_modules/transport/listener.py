"""Listener: messages of a few integers from a rank's peers, until all of them have announced their shutdown."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import TypeAlias

import torch

from . import threads
from .deadline import Deadline
from .exchange import FOREVER, LinkClosedError, PointToPoint

SHUTDOWN_TIMEOUT = timedelta(seconds=2)


class ConnectionLost(ConnectionError):
    """The connection to a peer that had not announced its shutdown is closed.

    Attributes:
        peer: its rank in the group.
    """

    def __init__(self, message: str, *, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


_Arrival: TypeAlias = "tuple[int, list[int] | ConnectionLost | None]"  # None: rounds go on without the peer


class Listener:
    """Hands over the messages of all peers, in the thread that calls `messages`, and the ends of their connections.

    [Note: a reader for each peer] Over Gloo a receive from a given rank fails at once when that rank's process ends; a
    receive from any rank does not. A receive can be neither polled nor aborted, and there is no wait for several. So
    each peer has a thread that waits for its messages, idle in a condition variable: as many threads as a rank has
    peers, O(log n) on an exponential graph and n / 2 on a complete bipartite one, beside as many connections.

    [Note: readers at exit] A reader ends with the last message of its peer, or with its connection. The reader of a
    peer that never announces its shutdown goes on waiting. At the exit of the interpreter it must not: a message that
    arrives then would wake the thread inside C++ code and abort the process. So the connections are closed at exit.

    Args:
        transport: a transport over Gloo. Where its rounds go on without peers that fail, such a peer is closed.
        peers: the ranks that may send.
        num_integers: the number of integers in a message.
        tag: the tag of the messages.
        is_last: whether a message announces the shutdown of its sender.

    Attributes:
        present: the peers that may still send.
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
        self.present = set(peers)
        self._num_integers, self._tag, self._is_last = num_integers, tag, is_last
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._readers: dict[int, threading.Thread] = {}  # by peer
        self._exiting = threading.Event()

    def messages(self) -> Iterator[tuple[int, list[int]]]:
        """(sender, integers) of each message as it comes, until no peer is present; waits without limit.

        For one thread. After an error it may be called again, and goes on with the next message.

        Raises:
            ConnectionLost: a peer has ended without announcing it; names the peer, which is closed.
        """
        self._start()
        while self.present:
            sender, message = self._arrivals.get()
            if self._exiting.is_set():
                return
            if message is None or isinstance(message, ConnectionLost) or self._is_last(message):
                self.present.discard(sender)
            if isinstance(message, ConnectionLost):
                raise message
            if message is not None:
                yield sender, message

    def _start(self) -> None:
        if self._readers or not self.present:
            return
        threads.join_at_exit(threading.current_thread())
        name = threading.current_thread().name
        prefix = name if name.startswith("gossip-") else f"gossip-listener-{self.transport.rank}"
        self.transport.has_listener = True
        _listeners.add(self)
        for peer in sorted(self.present):
            self._readers[peer] = threads.start(self._read, peer, name=f"{prefix}-from-{peer}")

    def wait_for_last(self, peers: Collection[int], deadline: Deadline) -> None:
        """Wait until each of these peers has sent its last message or ended, or until the deadline. For any thread."""
        for peer, reader in tuple(self._readers.items()):
            if peer in peers:
                reader.join(deadline.left)

    def _read(self, peer: int) -> None:
        """The body of the reader of a peer."""
        message = torch.empty(self._num_integers, dtype=torch.int64, device="cpu")
        tag = self.transport.wire_tag(self._tag, message.nbytes)
        start = time.monotonic()
        is_over = False
        try:
            group, rank = self.transport.route(peer)
            while not is_over and not self._exiting.is_set():
                group.recv([message], rank, tag).wait(FOREVER)
                integers = message.tolist()
                is_over = self._is_last(integers)
                self._arrivals.put((peer, integers))
        except LinkClosedError:
            self._arrivals.put((peer, None))
        except RuntimeError as error:  # of Gloo
            goes_on = self.transport.loses(peer, error, 0.0)  # it was not late, however long this took
            self._arrivals.put((peer, None if goes_on else self._lost(peer, error, time.monotonic() - start)))

    def _lost(self, peer: int, error: RuntimeError, seconds: float) -> ConnectionLost:
        name = self.transport.names[peer]
        return ConnectionLost(f"the connection to rank {name} failed after {seconds:.1f} s: {error}", peer=peer)

    def exit(self) -> None:
        """[Note: readers at exit]"""
        if any(reader.is_alive() for reader in self._readers.values()):
            self._exiting.set()
            self.transport.close_connections()
            self._arrivals.put((-1, None))


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for listener in list(_listeners):
        listener.exit()

"""Listener: messages of a few integers from a rank's peers, until all of them have announced their shutdown."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from datetime import timedelta
from typing import TypeAlias

import torch
from torch import Tensor

from .deadlines.deadline import join_at_exit
from .exchange import SHUTDOWN, LinkClosedError, PointToPoint
from .process_group import FOREVER, ProcessGroupTransport

SHUTDOWN_TIMEOUT = timedelta(seconds=2)
_AT_EXIT = timedelta(milliseconds=1)
_SECONDS_OF_GRACE = 1.0
_CLOSED_HERE = "Application timeout"  # in what Gloo says of connections that a wait of this process has closed


def announce_shutdown(transport: ProcessGroupTransport, peers: Iterable[int], message: Tensor, *, tag: int) -> None:
    """Tell the listeners of `peers` that this rank sends no more; waits two seconds at most, for none that ended.

    Args:
        transport: the transport over which they listen.
        peers: the ranks of the group that listen.
        message: the message that announces it, int64.
        tag: the tag of the messages.
    """
    pending = []
    for peer in peers:
        with contextlib.suppress(ConnectionError):  # it has ended
            pending.append(transport.exchange({peer: [message]}, {}, tag=tag, what=SHUTDOWN))
    for sending in pending:  # each counts from when it was posted
        with contextlib.suppress(ConnectionError, TimeoutError):  # it has ended, or will see the closed connection
            sending.wait(SHUTDOWN_TIMEOUT)


class ConnectionLost(ConnectionError):
    """The connection to a peer that had not announced its shutdown is closed.

    Attributes:
        peer: its rank in the group.
        is_closed_here: whether a wait of this process has closed it, by timing out, and not the end of the peer.
    """

    def __init__(self, message: str, *, peer: int, is_closed_here: bool) -> None:
        super().__init__(message)
        self.peer = peer
        self.is_closed_here = is_closed_here


_Arrival: TypeAlias = "tuple[int, list[int] | ConnectionLost | None]"  # None: rounds go on without the peer


class Listener:
    """Waits, in a thread of its own, for the next message from any of `peers`, or for the end of one of them.

    [Note: a reader for each peer] Over Gloo a receive from a given rank fails at once when that rank's process ends; a
    receive from any rank does not. A receive can be neither polled nor aborted, and there is no wait for several. So
    each peer has a thread that waits for its messages, idle in a condition variable: as many threads as a rank has
    peers, O(log n) on an exponential graph and n / 2 on a complete bipartite one, beside as many connections. The
    messages of one peer are taken one by one: its reader waits for the next when the last has been dealt with.

    [Note: readers at exit] A reader ends when its peer was closed (`close_peer`) or has ended. The reader of a peer
    that never announces its shutdown goes on waiting. At the exit of the interpreter it must not: a message that
    arrives then would wake the thread inside C++ code and abort the process. A wait that times out closes all
    connections of its group, which ends every receive. So at exit one is made to time out, and the threads are joined.

    Args:
        transport: a transport over Gloo. Where its rounds go on without peers that fail, such a peer is closed.
        peers: the ranks that may send.
        num_integers: the number of integers in a message.
        tag: the tag of the messages.
    """

    def __init__(self, transport: PointToPoint, peers: Collection[int], *, num_integers: int, tag: int) -> None:
        self.transport = transport
        self.tag = tag
        self._num_integers = num_integers
        self._present = set(peers)
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._may_read = {peer: threading.Semaphore(0) for peer in self._present}
        self._threads: list[threading.Thread] = []  # readers, and who takes the messages
        self._lock = threading.Lock()  # of the count, which readers keep
        self._num_reading = 0
        self._exiting = threading.Event()
        self._has_waited = False

    @property
    def present(self) -> frozenset[int]:
        """The peers that may still send."""
        return frozenset(self._present)

    def messages(self) -> Iterator[tuple[int, list[int]]]:
        """(sender, integers) of each message as it comes, until all peers are closed; waits without limit.

        For one thread. After an error it may be called again, and goes on with the next message.

        Raises:
            ConnectionLost: a peer has ended without announcing it; names the peer, which is closed.
        """
        self._start()
        while self._present:
            sender, message = self._arrivals.get()
            if self._exiting.is_set():
                return
            if isinstance(message, ConnectionLost):
                if sender in self._present:
                    self.close_peer(sender)
                    self._let_others_say_why(message)
                    raise message
                continue
            if message is None:
                self.close_peer(sender)
                continue
            try:
                yield sender, message
            except GeneratorExit:  # whoever takes the messages has met an error of its own
                self._present.clear()
                raise
            finally:
                self._may_read[sender].release()

    def close_peer(self, peer: int) -> None:
        """Expect no more from this peer. For the thread that takes the messages, between two of them."""
        self._present.discard(peer)

    def _let_others_say_why(self, lost: ConnectionLost) -> None:
        """Who has waited in vain, and has closed all connections by that, names whom it has waited for."""
        if lost.is_closed_here and not self._has_waited:
            self._has_waited = True
            self._exiting.wait(_SECONDS_OF_GRACE)

    def _start(self) -> None:
        if self._threads or not self._present:
            return
        self._threads.append(threading.current_thread())
        name = threading.current_thread().name
        prefix = name if name.startswith("gossip-") else f"gossip-listener-{self.transport.rank}"
        atexit.register(self._exit)
        self.transport.has_listener = True
        self._num_reading = len(self._present)
        for peer in sorted(self._present):
            reader = threading.Thread(target=self._read, args=(peer,), name=f"{prefix}-from-{peer}", daemon=True)
            self._threads.append(reader)
            reader.start()

    def _read(self, peer: int) -> None:
        """The body of the reader of a peer; `_present` is changed by who takes the messages, which comes first."""
        message = torch.empty(self._num_integers, dtype=torch.int64, device="cpu")
        tag = self.transport.wire_tag(self.tag, message.numel() * message.element_size())
        start = time.monotonic()
        try:
            group, rank = self.transport.route(peer)
            while peer in self._present and not self._exiting.is_set():
                group.recv([message], rank, tag).wait(FOREVER)
                self._arrivals.put((peer, message.tolist()))
                self._may_read[peer].acquire()
        except LinkClosedError:
            self._arrivals.put((peer, None))
        except RuntimeError as error:  # of Gloo
            goes_on = self.transport.loses(peer, error, 0.0)  # it was not late, however long this took
            self._arrivals.put((peer, None if goes_on else self._lost(peer, error, time.monotonic() - start)))
        finally:
            with self._lock:
                self._num_reading -= 1
                is_last = self._num_reading == 0
            if is_last and not self._exiting.is_set():
                atexit.unregister(self._exit)

    def _lost(self, peer: int, error: RuntimeError, seconds: float) -> ConnectionLost:
        me, name = (self.transport.names[rank] for rank in (self.transport.rank, peer))
        is_closed_here = _CLOSED_HERE in str(error)
        why = "a wait of this rank has timed out" if is_closed_here else f"rank {name} has died"
        message = f"rank {me}: {why}: the connection to rank {name} failed after {seconds:.1f} s: {error}"
        return ConnectionLost(message, peer=peer, is_closed_here=is_closed_here)

    def _exit(self) -> None:
        """[Note: readers at exit]"""
        self._exiting.set()
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for peer in self._may_read:
            # Of Gloo; the first to time out closes the connections of its group.
            with contextlib.suppress(RuntimeError, LinkClosedError):
                group, rank = self.transport.route(peer)
                group.recv([nothing], rank, self.transport.wire_tag(self.tag, 1)).wait(_AT_EXIT)
        for may_read in self._may_read.values():
            may_read.release()  # for those whose last message nobody has taken
        self._arrivals.put((-1, []))  # for who takes them
        join_at_exit(self._threads)

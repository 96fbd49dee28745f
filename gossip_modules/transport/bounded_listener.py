"""BoundedListener: accepts connections at a public port, in bounds; strangers cannot use the bounds up."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Generic, Protocol, TypeVar

BACKLOG = 128  # connections that the kernel has accepted and this process has not
MIN_CONNECTIONS = 64  # at once, of clients that have not shown who they are
HANDSHAKE_SECONDS = 10.0  # from a connection to the end of its handshake
TICK_SECONDS = 1.0  # between two checks of connections whose time is over
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection(Protocol):
    """What the bounds depend on.

    Attributes:
        host: the address of the other end.
        has_asked: whether the other end has made a valid request.
        since: when it connected or was last heard (`time.monotonic()`).
    """

    host: str
    has_asked: bool
    since: float


C = TypeVar("C", bound=Connection)


class BoundedListener(Generic[C]):
    """Accepts connections within bounds; everything belongs to the thread of the selector.

    One connection above the bound closes another one: of the address with the most connections, one that has never
    asked, or else the one that was silent longest. Where the process has no descriptor left, one connection is closed
    in the same way, and none is accepted for TICK_SECONDS, so that the thread does not spin.

    Args:
        listener: the listening socket; it does not block.
        selector: the selector of the thread of `accept`; the listener is registered there.
        data: the data of the listener's key in the selector.
        connections: the connections to close in favour of others; `admit` and `close` change it. Where other threads do
            too, its iterator must be of a copy.
        max_connections: how many there may be at once.
        admit: called with the socket of a new connection, without blocking, and the address of the other end.
        close: called with a connection to close in favour of another one.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        *,
        data: Any,
        connections: Collection[C],
        max_connections: Callable[[], int],
        admit: Callable[[socket.socket, str], None],
        close: Callable[[C], None],
    ) -> None:
        self.socket, self._selector, self._data = listener, selector, data
        self._connections, self._max_connections = connections, max_connections
        self._admit, self._close = admit, close
        self.is_accepting = False
        self._next_check = 0.0
        self._resume()

    def accept(self) -> None:
        """Accept all waiting connections."""
        for num_accepted in range(BACKLOG):
            try:
                connection, (host, *_) = self.socket.accept()
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS and num_accepted == 0:  # else perhaps none is left to accept
                    self._make_room()
                    self._pause()
                return  # else no more have connected, or this one has gone
            if len(self._connections) >= self._max_connections():
                self._make_room()
            connection.setblocking(False)
            self._admit(connection, host)

    def is_due(self) -> bool:
        """Whether to check for connections whose time is over, once per TICK_SECONDS; accepts again after a pause."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + TICK_SECONDS
        self._resume()
        return True

    def _make_room(self) -> None:
        connections = tuple(self._connections)
        counts = Counter(connection.host for connection in connections)
        if counts:
            ((host, _),) = counts.most_common(1)
            candidates = [connection for connection in connections if connection.host == host]
            self._close(min(candidates, key=lambda connection: (connection.has_asked, connection.since)))

    def _pause(self) -> None:
        self._selector.unregister(self.socket)
        self.is_accepting = False
        self._next_check = time.monotonic() + TICK_SECONDS

    def _resume(self) -> None:
        if not self.is_accepting:
            self._selector.register(self.socket, selectors.EVENT_READ, self._data)
            self.is_accepting = True

"""ClientConnection: one connection to the server without keys, and the reply that is being sent over it."""

from __future__ import annotations

import socket
import time
from typing import NamedTuple

from .server import Published
from .snapshot_pool import Reading
from .zmtp import GREETING, FrameReader, ready


class Reply(NamedTuple):
    """A model that is being sent.

    published: the model.
    reading: protects its snapshot from being written until the last byte has left.
    start: when the reply began (`time.monotonic()`).
    """

    published: Published
    reading: Reading
    start: float


class ClientConnection:
    """One connection. Belongs to the serving thread.

    Args:
        connection: the socket, which does not block.
        host: the address of the other end.

    Attributes:
        reader: the frames that the client has sent.
        unsent: the bytes still to be sent, in order.
        reply: the model among them; None = there is none.
        is_ready: whether the handshake is complete.
        has_asked: whether the client has sent a request.
        since: when the client connected, sent a request or took bytes of a reply, whichever was last.
        waits_to_send: whether the connection waits for room to send, rather than for something to read.
    """

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.socket = connection
        self.host = host
        self.reader = FrameReader()
        self.unsent = [memoryview(GREETING + ready(b"ROUTER"))]
        self.reply: Reply | None = None
        self.is_ready = False
        self.has_asked = False
        self.since = time.monotonic()
        self.waits_to_send = False

    def send(self) -> bool:
        """Send as much as there is room for; returns whether that was all.

        Raises:
            OSError: the client has gone.
        """
        while self.unsent:
            try:
                num_sent = self.socket.sendmsg(self.unsent)
            except BlockingIOError:
                return False
            if self.reply is not None:  # only then: probes must not keep a connection open that asks for no model
                self.since = time.monotonic()
            while self.unsent and num_sent >= len(self.unsent[0]):
                num_sent -= len(self.unsent.pop(0))
            if self.unsent:
                self.unsent[0] = self.unsent[0][num_sent:]
        self.end_reply()
        return True

    def end_reply(self) -> bool:
        """Let the snapshot of the reply be written again; returns whether there was a reply."""
        if self.reply is None:
            return False
        self.reply.reading.end()
        self.reply = None
        return True

    def close(self) -> bool:
        """Close the socket and drop what is unsent; returns whether a reply was broken off."""
        self.socket.close()
        self.unsent = []
        return self.end_reply()

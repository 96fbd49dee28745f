"""PlainServer: serves everybody who reaches the port, without keys; connections, frames and time are bounded."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time

from ...flat.layout import FlatLayout
from ...transport.ports.bounded_listener import HANDSHAKE_SECONDS, MIN_CONNECTIONS, TICK_SECONDS, BoundedListener
from .client_connection import ClientConnection, Reply
from .listening_socket import address_of, open_listener
from .message import HEADER_BYTES, Message, MessageError, MessageKind, ModelShape
from .server import MAX_REPLIES, ModelServer, Published
from .zmtp import Frame, ZmtpError, command, header_of

CONNECTIONS_PER_PEER = 2  # above MIN_CONNECTIONS, for each peer that is known: one to fetch and one to probe
STALLED_SECONDS = 10.0  # in which no byte of a reply was taken
IDLE_SECONDS = 60.0  # without a request
READ_BYTES = 2048
MAX_PING_BYTES = 16  # of the context of a PING (ZeroMQ RFC 37)
_PING, _READY = b"\x04PING", b"\x05READY"


class PlainServer(ModelServer):
    """Serves everybody, over ZeroMQ's protocol without security, implemented here instead of by libzmq.

    libzmq accepts any number of connections, collects any number of frames of a message, and cannot close the
    connection of one client of a socket that has many. Here:

    - At most MIN_CONNECTIONS plus CONNECTIONS_PER_PEER for each peer are open: see `BoundedListener`.
    - A frame has at most 1 KiB and a message one frame. A client that sends anything else is disconnected. A client is
      read only after its answer has been sent, so at most READ_BYTES and one frame of what it sends are kept.
    - A handshake may take HANDSHAKE_SECONDS, a reply goes on while some of it is taken in every STALLED_SECONDS, and a
      silent connection is closed after IDLE_SECONDS. A ping is answered and does not extend any of these.
    - At most MAX_REPLIES snapshots are being sent, each to any number of clients. A client that asks beyond that gets
      the newest of those, and replies that have taken longer than a round are broken off for a newer one. So clients
      that do not read make the models of others older, by a round at most, and never keep a peer without one.

    [Note: Serving never blocks training] holds here: the socket is written when it has room, from the snapshot. Except
    for `stop`, `num_peers` and what `ModelServer` gives to other threads, everything belongs to the serving thread.

    Args:
        address: where to bind, like "tcp://0.0.0.0:45000"; port `*` takes a free one.
        name: the name of this worker, for errors.
        shape: the shape of its model.
        layout: the layout of its model.
        is_pinned: whether the model is on a GPU.
        round_seconds: the longest time that a peer's round takes; after it the peer has no use for a reply.

    Raises:
        ValueError: `address` is not of this form.
        ConnectionError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        shape: ModelShape,
        layout: FlatLayout,
        is_pinned: bool,
        round_seconds: float,
    ) -> None:
        super().__init__(shape=shape, layout=layout, is_pinned=is_pinned)
        self._round_seconds = round_seconds
        self._clients: set[ClientConnection] = set()
        listener = open_listener(address, name=name)
        self.address = address_of(listener)
        self._wakeup, self._wakeup_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._listener = BoundedListener(
            listener,
            self._selector,
            data=None,
            connections=self._clients,
            max_connections=lambda: self.max_connections,
            admit=self._admit,
            close=self._refuse,
        )

    @property
    def max_connections(self) -> int:
        """The number of connections that may be open at once."""
        return MIN_CONNECTIONS + CONNECTIONS_PER_PEER * self.num_peers

    def serve(self) -> None:
        """See `ModelServer`."""
        try:
            while True:
                is_quiet = self._listener.is_accepting and not self._clients
                for key, _ in self._selector.select(None if is_quiet else TICK_SECONDS):
                    if key.fileobj is self._wakeup:
                        return
                    if key.fileobj is self._listener.socket:
                        self._listener.accept()
                    elif key.data in self._clients:  # else it has just been closed for another one
                        self._serve_client(key.data)
                self._close_expired()
        finally:
            self.close()

    def stop(self) -> None:
        """See `ModelServer`."""
        with contextlib.suppress(OSError):  # it has ended
            self._wakeup_sender.send(b"!")

    def close(self) -> None:
        """See `ModelServer`."""
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        for opened in (self._listener.socket, self._wakeup, self._wakeup_sender):
            opened.close()

    def _choose(self, latest: Published) -> Published:
        """See `ModelServer`: never None, as replies that have taken longer than a round are broken off."""
        replies = [client.reply for client in self._clients if client.reply is not None]
        being_sent = {reply.published.number: reply.published for reply in replies}
        if latest.number in being_sent or len(being_sent) < MAX_REPLIES:
            return latest
        given_up = time.monotonic() - self._round_seconds  # replies that began before then
        for number in sorted(being_sent):
            if all(reply.start < given_up for reply in replies if reply.published.number == number):
                for client in [c for c in self._clients if c.reply and c.reply.published.number == number]:
                    self._drop(client)
                return latest
        return being_sent[max(being_sent)]

    def _admit(self, connection: socket.socket, host: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = ClientConnection(connection, host)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._serve_client(client, may_read=False)

    def _serve_client(self, client: ClientConnection, *, may_read: bool = True) -> None:
        """Send what is unsent and answer what was received, until either of them has to wait."""
        try:
            if may_read and not client.waits_to_send:
                data = client.socket.recv(READ_BYTES)
                if not data:
                    raise ConnectionResetError
                client.reader.feed(data)
            while not (waits_to_send := not client.send()) and (frame := client.reader.next()) is not None:
                self._handle(client, frame)
            if waits_to_send != client.waits_to_send:
                client.waits_to_send = waits_to_send
                event = selectors.EVENT_WRITE if waits_to_send else selectors.EVENT_READ
                self._selector.modify(client.socket, event, client)
        except BlockingIOError:
            pass
        except OSError:  # it has gone
            self._disconnect(client)
        except (ZmtpError, MessageError):
            self.stats.num_garbage_messages += client.is_ready
            self._disconnect(client)

    def _handle(self, client: ClientConnection, frame: Frame) -> None:
        """Queue the answer to one frame of a client."""
        if not client.is_ready:
            if not (frame.is_command and frame.body.startswith(_READY)):
                raise ZmtpError(f"got {frame.body[:8]!r}, expected the command READY")
            client.is_ready = True
        elif frame.is_command:
            context = frame.body[len(_PING) + 2 :]
            if not frame.body.startswith(_PING) or len(context) > MAX_PING_BYTES:
                raise ZmtpError(f"got the command {frame.body[:8]!r}, expected PING")
            client.unsent = [memoryview(command(b"PONG", context))]
        else:
            request = Message.parse(frame.body)
            if request.kind not in (MessageKind.FETCH, MessageKind.PROBE):
                raise MessageError(f"got kind {request.kind.name}, expected a request")
            self._reply(client, request)

    def _reply(self, client: ClientConnection, request: Message) -> None:
        client.has_asked, client.since = True, time.monotonic()
        answer = self._answer_to(request)
        head = header_of(HEADER_BYTES) + answer.header
        self.stats.bytes_sent += HEADER_BYTES
        if answer.model is None:
            client.unsent = [memoryview(head)]
            return
        published, reading = answer.model
        client.reply = Reply(published, reading, client.since)
        model = memoryview(published.snapshot.vector.raw.numpy().data)
        client.unsent = [memoryview(head + header_of(len(model))), model]
        self.stats.bytes_sent += len(model)
        self.stats.num_models_sent += 1

    def _close_expired(self) -> None:
        """Close the connections whose time is over; once per TICK_SECONDS."""
        if not self._listener.is_due():
            return
        now = time.monotonic()
        for client in list(self._clients):
            silent = now - client.since
            if (client.unsent and silent > STALLED_SECONDS) or silent > IDLE_SECONDS:
                self._drop(client)
            elif not client.is_ready and silent > HANDSHAKE_SECONDS:
                self._refuse(client)

    def _disconnect(self, client: ClientConnection) -> None:
        """Close a connection whose client has gone or sent what is not of this protocol."""
        if client.is_ready:
            self._drop(client)
        else:
            self._refuse(client)

    def _refuse(self, client: ClientConnection) -> None:
        self.stats.num_refused_connections += 1
        self._drop(client)

    def _drop(self, client: ClientConnection) -> None:
        """Close a connection; idempotent."""
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._selector.unregister(client.socket)
        self.stats.num_unread_replies += client.close()

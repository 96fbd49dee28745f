"""Serving without keys, to whoever reaches the port: every stranger's connections, frames and time are bounded."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import selectors
import socket
import struct
import time
from collections import Counter
from typing import NamedTuple

from ...flat.layout import FlatLayout
from .message import HEADER_BYTES, Kind, Message, MessageError, ModelShape
from .server import MAX_REPLIES, ModelServer, Published
from .snapshot_pool import Reading
from .zmtp import GREETING, Frame, FrameReader, ZmtpError, command, header_of, ready

MIN_CONNECTIONS = 64  # at once, and CONNECTIONS_PER_PEER for each peer that is known
CONNECTIONS_PER_PEER = 2  # one to fetch and one to probe
BACKLOG = 128  # connections that the kernel has accepted and we have not
HANDSHAKE_SECONDS = 10.0  # from the connection to the end of its handshake
STALLED_SECONDS = 10.0  # without a byte taken of a reply
IDLE_SECONDS = 60.0  # without a request
TICK_SECONDS = 1.0  # between two looks at the time
READ_BYTES = 2048
MAX_PING_BYTES = 16  # of the context of a PING (ZeroMQ RFC 37)
_PING, _READY = b"\x04PING", b"\x05READY"
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Reply(NamedTuple):
    """A model on its way."""

    published: Published
    reading: Reading
    start: float


class _Client:
    """One connection."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.socket = connection
        self.host = host
        self.reader = FrameReader()
        self.unsent = [memoryview(GREETING + ready(b"ROUTER"))]
        self.reply: _Reply | None = None
        self.is_ready = False  # its handshake is complete
        self.has_asked = False
        self.since = time.monotonic()  # the connection, the last request, or the last bytes taken, whichever is last
        self.waits_to_send = False  # rather than to read


class PlainServer(ModelServer):
    """Serves everybody, over ZeroMQ's protocol without security, spoken here rather than by libzmq.

    libzmq accepts connections without a bound, collects the frames of a message without a bound, and cannot hang up on
    one client of a socket that has many. Here:

    - MIN_CONNECTIONS and CONNECTIONS_PER_PEER for each peer are open at most. One more closes another: of the address
      with the most connections the one that has never asked, or else that has been silent longest.
    - A frame has 1 KiB at most, and a message one frame. Whoever sends something else is hung up on at once. A client
      is read only once it has its answer, so no more than READ_BYTES and one frame is kept of what it says.
    - A handshake takes HANDSHAKE_SECONDS, a reply goes on for as long as each STALLED_SECONDS have seen some of it
      taken, a silent connection stays for IDLE_SECONDS. A ping is answered, and counts for nothing.
    - MAX_REPLIES snapshots are being sent at most, each to any number of clients. Who asks beyond that gets the newest
      of those, and replies that have taken longer than a round are broken off for a newer one. So clients that do not
      read make models older, by a round at most, and never keep a peer without one.

    [Note: Serving never blocks training] holds here: the socket is written when it has room, from the snapshot.

    Args:
        address: where to bind, like "tcp://0.0.0.0:45000"; port `*` takes a free one.
        name: of this worker, for errors.
        shape: of its model.
        layout: of its model.
        is_pinned: whether the model is on a GPU.
        round_seconds: how long a peer's round takes at most, after which it has no use for a reply.

    Raises:
        ValueError: `address` is none.
        ConnectionError: it cannot be bound.
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
        self._clients: set[_Client] = set()
        self._next_look = 0.0
        self._listener = _listen(address, name)
        host, port = self._listener.getsockname()[:2]
        self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._bell, self._clapper = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_accepting = True

    @property
    def max_connections(self) -> int:
        """How many may be open at once."""
        return MIN_CONNECTIONS + CONNECTIONS_PER_PEER * self.num_peers

    def serve(self) -> None:
        """See `ModelServer`."""
        try:
            while True:
                is_quiet = self._is_accepting and not self._clients
                for key, _ in self._selector.select(None if is_quiet else TICK_SECONDS):
                    if key.fileobj is self._bell:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._clients:  # else it was closed for another just now
                        self._attend(key.data)
                self._look_at_the_time()
        finally:
            self.close()

    def stop(self) -> None:
        """See `ModelServer`."""
        with contextlib.suppress(OSError):  # it has ended
            self._clapper.send(b"!")

    def close(self) -> None:
        """See `ModelServer`."""
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        for opened in (self._listener, self._bell, self._clapper):
            opened.close()

    def _choose(self, latest: Published) -> Published:
        """See `ModelServer`: always one, as replies that stand in the way are broken off."""
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

    def _accept(self) -> None:
        """Take in all that have connected, in the place of others where there are too many."""
        try:
            for _ in range(BACKLOG):
                connection, (host, *_) = self._listener.accept()
                if len(self._clients) >= self.max_connections:
                    self._make_room()
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client = _Client(connection, host)
                self._clients.add(client)
                self._selector.register(connection, selectors.EVENT_READ, client)
                self._attend(client, may_read=False)
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:  # the process is short of them: give one back, and pause
                self._make_room()
                self._selector.unregister(self._listener)
                self._is_accepting = False
            # else there are no more, or this one has gone

    def _make_room(self) -> None:
        """Close one connection: of the address with the most the one that is worth least."""
        counts = Counter(client.host for client in self._clients)
        if counts:
            ((host, _),) = counts.most_common(1)
            candidates = [client for client in self._clients if client.host == host]
            self._refuse(min(candidates, key=lambda client: (client.has_asked, client.since)))

    def _attend(self, client: _Client, *, may_read: bool = True) -> None:
        """Send what is due and answer what was said, until one of them must wait."""
        try:
            if may_read and not client.waits_to_send:
                data = client.socket.recv(READ_BYTES)
                if not data:
                    raise ConnectionResetError
                client.reader.feed(data)
            while not (waits_to_send := not self._is_sent(client)) and (frame := client.reader.next()) is not None:
                self._hear(client, frame)
            if waits_to_send != client.waits_to_send:
                client.waits_to_send = waits_to_send
                event = selectors.EVENT_WRITE if waits_to_send else selectors.EVENT_READ
                self._selector.modify(client.socket, event, client)
        except BlockingIOError:
            pass
        except OSError:  # it has gone
            self._hang_up(client)
        except (ZmtpError, MessageError):
            self.stats.num_garbage_messages += client.is_ready
            self._hang_up(client)

    def _is_sent(self, client: _Client) -> bool:
        """Send as much as there is room for; whether that was all."""
        while client.unsent:
            try:
                num_sent = client.socket.sendmsg(client.unsent)
            except BlockingIOError:
                return False
            if client.reply is not None:  # else a client could stay for ever by asking for signs of life
                client.since = time.monotonic()
            while client.unsent and num_sent >= len(client.unsent[0]):
                num_sent -= len(client.unsent.pop(0))
            if client.unsent:
                client.unsent[0] = client.unsent[0][num_sent:]
        if client.reply is not None:
            client.reply.reading.end()
            client.reply = None
        return True

    def _hear(self, client: _Client, frame: Frame) -> None:
        """Queue the answer to what a client said."""
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
            if request.kind not in (Kind.FETCH, Kind.PROBE):
                raise MessageError(f"got kind {request.kind.name}, expected a request")
            self._reply(client, request)

    def _reply(self, client: _Client, request: Message) -> None:
        client.has_asked, client.since = True, time.monotonic()
        answer = self._answer_to(request)
        head = header_of(HEADER_BYTES) + answer.header
        self.stats.bytes_sent += HEADER_BYTES
        if answer.model is None:
            client.unsent = [memoryview(head)]
            return
        published, reading = answer.model
        client.reply = _Reply(published, reading, client.since)
        model = memoryview(published.snapshot.vector.raw.numpy().data)
        client.unsent = [memoryview(head + header_of(len(model))), model]
        self.stats.bytes_sent += len(model)
        self.stats.num_models_sent += 1

    def _look_at_the_time(self) -> None:
        """Hang up on who has had his time; once per TICK_SECONDS."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + TICK_SECONDS
        if not self._is_accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._is_accepting = True
        for client in list(self._clients):
            silent = now - client.since
            if (client.unsent and silent > STALLED_SECONDS) or silent > IDLE_SECONDS:
                self._drop(client)
            elif not client.is_ready and silent > HANDSHAKE_SECONDS:
                self._refuse(client)

    def _hang_up(self, client: _Client) -> None:
        """It has gone, or said what is no word of ours."""
        if client.is_ready:
            self._drop(client)
        else:
            self._refuse(client)

    def _refuse(self, client: _Client) -> None:
        self.stats.num_refused_connections += 1
        self._drop(client)

    def _drop(self, client: _Client) -> None:
        """Close its connection; idempotent."""
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._selector.unregister(client.socket)
        client.socket.close()
        if client.reply is not None:
            self.stats.num_unread_replies += 1
            client.reply.reading.end()
            client.reply = None
        client.unsent = []


def _listen(address: str, name: str) -> socket.socket:
    """A socket that listens at "tcp://host:port"; host may be *, port * or 0."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        if host in [interface for _, interface in socket.if_nameindex()]:
            host = _host_of(host)
        found = socket.getaddrinfo(
            None if host == "*" else host.strip("[]"),
            0 if port == "*" else int(port),
            type=socket.SOCK_STREAM,
            family=socket.AF_INET if host == "*" else socket.AF_UNSPEC,
            flags=socket.AI_PASSIVE,
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"worker {name!r}: got address {address!r}, expected 'tcp://host:port': {error}") from error
    family, *_, place = found[0]
    try:
        listener = socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConnectionError(
            f"worker {name!r}: cannot bind {address}: {error}; is another process using this port?"
        ) from error
    listener.setblocking(False)
    return listener


def _host_of(interface: str) -> str:
    """The address of a network interface, which ZeroMQ's addresses may name."""
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])

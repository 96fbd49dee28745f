"""Strangers: clients of a worker that write the bytes of its protocol by hand, and keep to nothing else."""

from __future__ import annotations

import contextlib
import socket
import struct

from gossip_modules.dpwa.protocol import HEADER_BYTES, MessageHeader, MessageKind, ModelShape

TIMEOUT = 20.0
LENGTH_BYTES = 8


def connect(address: str) -> socket.socket:
    """A stranger."""
    host, port = address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT)


def framed(body: bytes) -> bytes:
    """A frame: the length of the body, 8 bytes, little-endian, and the body."""
    return struct.pack("<Q", len(body)) + body


def ask(stranger: socket.socket, shape: ModelShape, kind: MessageKind = MessageKind.FETCH) -> None:
    """Send a request."""
    stranger.sendall(framed(MessageHeader(kind, shape).pack()))


def answer(stranger: socket.socket) -> MessageHeader:
    """The header of what a worker answers."""
    return MessageHeader.parse(read(stranger, LENGTH_BYTES + HEADER_BYTES)[LENGTH_BYTES:])


def ask_and_never_read(address: str, shape: ModelShape) -> socket.socket:
    """A client whose reply has begun; the rest of it is never read."""
    stranger = connect(address)
    ask(stranger, shape)
    assert stranger.recv(1)
    return stranger


def read(stranger: socket.socket, num_bytes: int) -> bytes:
    """So many bytes of what it is sent."""
    data = b""
    while len(data) < num_bytes:
        more = stranger.recv(num_bytes - len(data))
        if not more:
            raise ConnectionError("the other end has hung up")
        data += more
    return data


def wait_until_closed(stranger: socket.socket) -> None:
    """Until the other end has hung up."""
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(1 << 16):
            pass

"""Strangers: clients of a worker that speak ZeroMQ's protocol by hand, and keep to nothing else."""

from __future__ import annotations

import contextlib
import socket
import struct

from gossip_modules.dpwa.wire.message import HEADER_BYTES, Message, MessageKind, ModelShape

TIMEOUT = 20.0
PING = b"\x04\x07\x04PING\0\x0a"


def connect(address: str) -> socket.socket:
    """A stranger."""
    host, port = address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT)


def zmtp_handshake(stranger: socket.socket) -> None:
    """ZMTP 3.0 without security, by hand, as a DEALER (ZeroMQ RFC 23)."""
    stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    stranger.sendall(bytes([4, len(ready)]) + ready)
    read(stranger, read(stranger, 66)[65])


def ask(stranger: socket.socket, shape: ModelShape, kind: MessageKind = MessageKind.FETCH) -> None:
    """Send a request."""
    stranger.sendall(bytes([0, HEADER_BYTES]) + Message(kind, 5, shape).pack())


def ask_and_never_read(address: str, shape: ModelShape) -> socket.socket:
    """A client whose reply has begun; the rest of it is never read."""
    stranger = connect(address)
    zmtp_handshake(stranger)
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

"""FrameReader: the server's side of ZeroMQ's protocol ZMTP 3.0 without security."""

from __future__ import annotations

import struct
from typing import NamedTuple

MAX_FRAME_BYTES = 1024  # of what is read; a request has 64
SIGNATURE_BYTES, GREETING_BYTES = 10, 64
_MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + _MECHANISM + bytes(32)  # version 3.0
_MORE, _LONG, _COMMAND = 1, 2, 4
_LENGTH = struct.Struct(">Q")


class ZmtpError(ValueError):
    """Bytes that are not of this protocol, or a frame that is too long."""


class Frame(NamedTuple):
    """One frame.

    body: its bytes, without the header.
    is_command: whether it is a command of the protocol; else it is a message.
    """

    body: bytes
    is_command: bool


class FrameReader:
    """The frames in what a client sends: ZMTP 3.0 with the mechanism NULL (ZeroMQ RFC 23).

    It keeps the bytes of one incomplete frame, so little more than MAX_FRAME_BYTES, whatever is sent. A frame that
    announces others of the same message is refused: libzmq would keep them all until the last one has come, in 30 times
    their bytes where they are empty, and does not bound their number.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._has_greeting = False

    def feed(self, data: bytes) -> None:
        """Add bytes that have arrived; `next` returns the frames in them."""
        self._bytes += data

    def next(self) -> Frame | None:
        """The next frame, None while it is not complete.

        Raises:
            ZmtpError: another protocol, version or mechanism; a frame that is too long or one of several.
        """
        if not self._has_greeting and not self._read_greeting():
            return None
        data = self._bytes
        if not data:
            return None
        flags = data[0]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ZmtpError(f"got a frame with flags {flags:#x}, expected ZMTP 3.0")
        if flags & _MORE:
            raise ZmtpError("got a message of several frames, expected one")
        start = 1 + _LENGTH.size if flags & _LONG else 2
        if len(data) < start:
            return None
        length = _LENGTH.unpack_from(data, 1)[0] if flags & _LONG else data[1]
        if length > MAX_FRAME_BYTES:
            raise ZmtpError(f"got a frame of {length} bytes, expected {MAX_FRAME_BYTES} at most")
        if len(data) < start + length:
            return None
        body = bytes(data[start : start + length])
        del data[: start + length]
        return Frame(body, bool(flags & _COMMAND))

    def _read_greeting(self) -> bool:
        """Read the greeting; returns whether it is complete. A wrong one is refused at its first wrong byte."""
        data = self._bytes
        is_signed = bytes(data[:1]) in (b"", b"\xff") and (
            len(data) < SIGNATURE_BYTES or data[SIGNATURE_BYTES - 1] == 0x7F
        )
        if not is_signed or (len(data) > SIGNATURE_BYTES and data[SIGNATURE_BYTES] < 3):
            raise ZmtpError(f"got a greeting that begins with {bytes(data[:12])!r}, expected ZMTP 3.0")
        if len(data) < GREETING_BYTES:
            return False
        if (mechanism := bytes(data[12:32])) != _MECHANISM:
            raise ZmtpError(
                f"got the mechanism {mechanism!r}, expected NULL: the peer has keys and this worker has none"
            )
        del data[:GREETING_BYTES]
        self._has_greeting = True
        return True


def header_of(num_bytes: int) -> bytes:
    """The header of a message of one frame of that length."""
    return bytes([0, num_bytes]) if num_bytes < 1 << 8 else bytes([_LONG]) + _LENGTH.pack(num_bytes)


def command(name: bytes, body: bytes = b"") -> bytes:
    """The bytes of a command shorter than 256 bytes."""
    text = bytes([len(name)]) + name + body
    return bytes([_COMMAND, len(text)]) + text


def ready(socket_type: bytes) -> bytes:
    """The bytes of the command READY, which ends a handshake."""
    return command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type)

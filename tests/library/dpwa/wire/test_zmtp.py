"""ZeroMQ's protocol: whatever is sent, in whatever portions, what is kept is bounded."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip_modules.dpwa.wire.zmtp import (
    GREETING,
    MAX_FRAME_BYTES,
    Frame,
    FrameReader,
    ZmtpError,
    command,
    header_of,
    ready,
)

SENT = GREETING + ready(b"DEALER") + header_of(5) + b"hello" + header_of(300) + bytes(300) + command(b"PING", b"\0\1")


def frames_of(portions: list[bytes]) -> list[Frame]:
    reader, frames = FrameReader(), []
    for portion in portions:
        reader.feed(portion)
        while (frame := reader.next()) is not None:
            frames.append(frame)
    return frames


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_portions_do_not_matter(size: int) -> None:
    first, hello, zeros, ping = frames_of([SENT[k : k + size] for k in range(0, len(SENT), size)])
    assert first.is_command
    assert first.body == b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    assert (hello, zeros) == (Frame(b"hello", False), Frame(bytes(300), False))
    assert ping == Frame(b"\x04PING\0\1", True)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1", "got a greeting that begins with b'GET"),
        (b"\xff" * 10, "got a greeting"),
        (GREETING[:10] + b"\x01", "got a greeting"),  # ZMTP 2
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32), "got the mechanism b'CURVE.*the peer has keys"),
        (GREETING + b"\x08", "got a frame with flags 0x8"),
        (GREETING + b"\x01", "got a message of several frames"),
        (
            GREETING + b"\x02" + struct.pack(">Q", 1 << 40),
            f"got a frame of {1 << 40} bytes, expected {MAX_FRAME_BYTES}",
        ),
        (GREETING + b"\x06" + struct.pack(">Q", 1025), "got a frame of 1025 bytes"),
    ],
)
def test_what_is_wrong_is_refused_at_once(sent: bytes, why: str) -> None:
    with pytest.raises(ZmtpError, match=why):
        frames_of([sent])


@settings(derandomize=True, deadline=None)
@given(st.lists(st.binary(max_size=2000), max_size=20), st.booleans())
def test_what_is_kept_is_bounded(portions: list[bytes], is_greeted: bool) -> None:
    reader = FrameReader()
    reader.feed(GREETING if is_greeted else b"")
    try:
        for portion in portions:
            reader.feed(portion)
            while (frame := reader.next()) is not None:
                assert len(frame.body) <= MAX_FRAME_BYTES
            assert len(reader._bytes) <= MAX_FRAME_BYTES + 9
    except ZmtpError:
        pass

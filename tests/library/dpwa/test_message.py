"""The wire format: what is written is read, and nothing else is."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from gossip_modules.dpwa.interpolation import Standing
from gossip_modules.dpwa.protocol import (
    HEADER_BYTES,
    MAGIC,
    MessageError,
    MessageHeader,
    MessageKind,
    ModelShape,
    RefusedModelError,
)
from gossip_modules.flat.buffer import FlatBuffer


def shape_of(module: nn.Module) -> ModelShape:
    """As the wrapper takes it."""
    buffer = FlatBuffer(module)
    return ModelShape.of(buffer.signature(), buffer.vector.layout)


SHAPE = shape_of(nn.Linear(3, 2))
MESSAGE = MessageHeader(MessageKind.MODEL, SHAPE, Standing(12.5, 0.25))


@settings(derandomize=True, deadline=None)
@given(
    kind=st.sampled_from(MessageKind),
    clock=st.floats(allow_nan=False),
    loss=st.none() | st.floats(allow_nan=False),
    num_bytes=st.integers(0, 2**64 - 1),
)
def test_a_packed_message_is_parsed(kind: MessageKind, clock: float, loss: float | None, num_bytes: int) -> None:
    message = MessageHeader(kind, SHAPE._replace(num_bytes=num_bytes), Standing(clock, loss))
    data = message.pack()
    assert len(data) == HEADER_BYTES == 56
    assert MessageHeader.parse(data) == message


def test_layout_of_the_header() -> None:
    data = MESSAGE.pack()
    assert data[:8] == MAGIC + bytes([2, MessageKind.MODEL]) + (1).to_bytes(2, "little")
    assert data[8:24] == SHAPE.digest
    assert data[48:] == SHAPE.num_bytes.to_bytes(8, "little")


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.binary(max_size=200))
@example(b"")
@example(MESSAGE.pack()[:-1])
@example(MESSAGE.pack() + b"\0")
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        message = MessageHeader.parse(data)
    except MessageError:
        return
    assert message.pack() == data


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255))
def test_a_changed_byte_takes_no_memory_and_is_judged(place: int, value: int) -> None:
    data = bytearray(MESSAGE.pack())
    data[place] = value
    tracemalloc.start()
    try:
        message = MessageHeader.parse(bytes(data))
        message.check(SHAPE)
    except (MessageError, RefusedModelError):
        pass
    else:
        assert message.shape == SHAPE
        assert math.isfinite(message.standing.clock)
        assert message.standing.loss is None or math.isfinite(message.standing.loss)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20  # whatever length the header declares, up to 2^64 bytes


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1", "got a header of 14 bytes, expected 56"),
        (b"x" * 56, "begins with b'xxxx', expected b'gdpw'"),
        (MAGIC + b"\x01" + MESSAGE.pack()[5:], "got version 1, expected 2; install the same release"),
        (MAGIC + b"\x02\x63" + MESSAGE.pack()[6:], "got kind 99"),
        (MAGIC + b"\x02\x01\x04" + MESSAGE.pack()[7:], "flags 0x4"),
    ],
)
def test_an_invalid_message_raises_an_error_with_the_reason(data: bytes, error: str) -> None:
    with pytest.raises(MessageError, match=error):
        MessageHeader.parse(data)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            MESSAGE._replace(standing=Standing(1.0, math.nan)),
            "got loss nan, expected a finite number; the peer has div",
        ),
        (MESSAGE._replace(standing=Standing(1.0, math.inf)), "got loss inf"),
        (MESSAGE._replace(standing=Standing(math.nan)), "got clock nan"),
        (MESSAGE._replace(standing=Standing(-1.0)), "got clock -1.0, expected a finite number >= 0"),
        (MESSAGE._replace(shape=shape_of(nn.Linear(400, 2))), "got a model of 2 tensors, .* sizes differ"),
        (MESSAGE._replace(shape=shape_of(nn.Linear(2, 2))), "names, shapes or dtypes differ; wrap the same model"),
        (MESSAGE._replace(shape=shape_of(nn.Linear(3, 2).double())), "names, shapes or dtypes differ; wrap the same"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(message: MessageHeader, error: str) -> None:
    with pytest.raises(RefusedModelError, match=error):
        MessageHeader.parse(message.pack()).check(SHAPE)


def test_digest_knows_names_shapes_and_dtypes() -> None:
    modules = [nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 3).half(), nn.Sequential(nn.Linear(2, 3))]
    assert len({shape_of(module).digest for module in modules}) == len(modules)
    assert shape_of(nn.Linear(2, 3)) == shape_of(nn.Linear(2, 3))

"""Headers and tensors arrive as they were, and what is not theirs is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip_modules.mailbox.sealed import Seal, pack, unpack

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=10,
)
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def packed(text: Any, rest: bytes = b"") -> bytes:
    """The bytes of any JSON value, or text, in the place of the header."""
    encoded = text if isinstance(text, bytes) else json.dumps(text).encode()
    return len(encoded).to_bytes(4, "little") + encoded + rest


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=4))
def test_headers_and_tensors_arrive(header: dict[str, Any], kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [(torch.randn(shape, generator=draw) * 4).to(dtype) for dtype, shape in kinds]
    data = pack(header, tensors)
    got, arrived = unpack(data, max_bytes=len(data))
    assert got == header
    for x, y in zip(tensors, arrived, strict=True):
        assert (y.dtype, y.shape) == (x.dtype, x.shape)
        assert y.reshape(-1).view(torch.uint8).tolist() == x.reshape(-1).view(torch.uint8).tolist()


def test_a_transposed_parameter_arrives() -> None:
    x = torch.nn.Parameter(torch.arange(6.0).view(2, 3)).t()
    data = pack({}, [x])
    assert torch.equal(unpack(data, max_bytes=999)[1][0], x)


def test_arrived_tensors_are_writable_and_apart() -> None:
    data = pack({}, [torch.zeros(1, dtype=torch.int8), torch.ones(2)])
    _, (x, y) = unpack(data, max_bytes=999)
    x += 5
    assert torch.equal(y, torch.ones(2))
    assert unpack(data, max_bytes=999)[1][0] == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\0",
        packed([{}, []], b"x"),
        packed([{}, [["float32", [1]]]], b"123"),
        packed([{}, [["float32", [-1]], ["float32", [2]]]], b"1234"),
        packed([{}, [["float32", [-1, -1]]]], b"1234"),
        packed([{}, [["float32", [1.0]]]], b"1234"),
        packed([{}, [["float32", 1]]], b"1234"),
        packed([{}, [["float32", [True]]]], b"1234"),
        packed([{}, [["float32", {"1": 1}]]], b"1234"),
        packed([{}, [["float32", [1 << 62, 0]]]]),
        packed([{}, [["float32", [1 << 40, 1 << 40]]]]),
        packed([{}, [["uint8", [1] * 100]]], b"1"),
        packed([{}, [["qint8", [1]]]], b"1"),
        packed([{}, [["nn", [1]]]], b"1"),
        packed([{}, [[["uint8"], [1]]]], b"1"),
        packed([{}, 5]),
        packed([{}, None]),
        packed([{}]),
        packed({}),
        packed([[], []]),
        packed("text"),
        packed(b"\xff\xfe"),
        packed(b"[" * 100_000),
        packed(b"[{}," + b"9" * 10_000 + b"]"),
        (1 << 31).to_bytes(4, "little") + b"[{},[]]",
        packed(b" " * (4 << 20) + b"[{},[]]"),
    ],
    ids=lambda data: repr(data[:60]),
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^got .*expected|^got a header that is no JSON"):
        unpack(data, max_bytes=1 << 30)


def test_more_bytes_than_allowed_are_refused() -> None:
    data = pack({"a": 1}, [torch.ones(9)])
    with pytest.raises(ValueError, match=rf"got {len(data)} bytes, expected at most {len(data) - 1} bytes"):
        unpack(data, max_bytes=len(data) - 1)


def test_a_header_that_no_reader_takes_is_not_packed() -> None:
    with pytest.raises(ValueError, match=r"got a header of \d+ bytes of JSON, expected at most .*; give tensors"):
        pack({"a": "x" * (4 << 20)})


def test_altered_bytes_are_refused_or_equal_in_size() -> None:
    """Any change of a byte, or of the length, raises ValueError or gives tensors of the same size."""
    draw, data = random.Random(0), pack({"a": [1, {"b": None}]}, [torch.ones(3), torch.ones(2, dtype=torch.int8)])
    for _ in range(2000):
        altered = bytearray(data)
        altered[draw.randrange(len(data))] = draw.randrange(256)
        end = draw.choice([len(data), draw.randrange(len(data))])
        try:
            _, tensors = unpack(bytes(altered[:end]), max_bytes=1000)
        except ValueError:
            continue
        assert end == len(data)
        assert sum(x.numel() * x.element_size() for x in tensors) == 14


@pytest.mark.parametrize("key", [b"key", None])
def test_a_seal_opens_its_own_only(key: bytes | None) -> None:
    seal = Seal(key)
    sealed = seal.seal("a/b", b"content")
    assert seal.open("a/b", sealed) == b"content"
    assert seal.open("a/b", memoryview(seal.seal("a/b", b""))) == b""
    assert seal.open("a/c", sealed) is None
    assert [end for end in range(len(sealed)) if seal.open("a/b", sealed[:end]) is not None] == []
    assert seal.open("a/b", sealed + b"x") is None
    assert Seal(b"another key").open("a/b", sealed) is None
    assert seal.open("a/b", Seal(b"another key").seal("a/b", b"content")) is None


def test_path_and_content_are_told_apart() -> None:
    seal = Seal(None)
    assert seal.open("a", seal.seal("ab", b"c")) is None
    assert seal.open("a", seal.seal("ab", b"c").replace(b"c", b"bc")) is None

"""Messages of several dtypes in one buffer, and their headers."""

from __future__ import annotations

import pytest
import torch

from gossip_modules.rounds.message_rounds import header, read_header
from gossip_modules.rounds.messages import MessageBuffer
from tests.harness.ranks import CPU

SIZES = [(torch.bfloat16, 3), (torch.float64, 2), (torch.uint8, 5), (torch.float32, 0), (torch.float32, 7)]


def test_fields_are_aligned_and_apart() -> None:
    buffer = MessageBuffer(SIZES, CPU)
    stop = buffer.raw.data_ptr()
    for field, (dtype, numel) in zip(buffer.fields, SIZES, strict=True):
        assert (field.dtype, field.numel()) == (dtype, numel)
        if numel:
            assert field.data_ptr() % 8 == 0
            assert field.data_ptr() >= stop
            stop = field.data_ptr() + numel * dtype.itemsize
    assert stop <= buffer.raw.data_ptr() + buffer.raw.numel()
    # Every field is rounded up to 8 bytes, no more.
    assert buffer.raw.numel() == 8 + 16 + 8 + 0 + 32


def test_fields_do_not_touch_each_other() -> None:
    buffer = MessageBuffer(SIZES, CPU)
    for value, field in enumerate(buffer.fields):
        field.fill_(value)
    assert [set(field.tolist()) for field in buffer.fields] == [{0.0}, {1.0}, {2}, set(), {4.0}]
    assert MessageBuffer([], CPU).raw.numel() == 0


@pytest.mark.parametrize("word", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 5, -1, -(2**63)])
def test_header_holds_words_modulo_2_to_the_32(word: int) -> None:
    """And is read from its 8 bytes alone."""
    for words in ((word, 3), (4, word)):
        mine, other = header(*words, CPU), header(0, 0, CPU)
        assert mine.nbytes == 8
        assert read_header(other) == [0, 0]
        other.copy_(mine)
        assert read_header(other) == read_header(mine) == [words[0] % 2**32, words[1] % 2**32]

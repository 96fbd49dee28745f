"""Messages of several dtypes in one buffer, and their headers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import GossipDataParallel
from gossip_modules.extend import Algorithm, Memory, Round, Share, Vectors
from gossip_modules.rounds.message_rounds import header, read_header
from gossip_modules.rounds.messages import Message, MessageBuffer, Received
from gossip_modules.rounds.vector import Vector
from tests.harness.ranks import CPU, run_ranks

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


@dataclass(frozen=True)
class TwoShares(Algorithm):
    """Each rank sends its number, and then 100 more; the first replies are read at the end."""

    found: list[float] = dataclasses.field(default_factory=list, repr=False, compare=False)
    takes_wire_dtype: ClassVar[bool] = False
    checks_messages: ClassVar[bool] = False
    mixes_buffers: ClassVar[bool] = False

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        def message(key: str, more: float) -> Message:
            made = v.message([(torch.float32, 4096)], key=key)
            made.fields[0].fill_(v.rank + more)
            return made

        _, *first = yield Share(message("first", 10 * k))
        _, *second = yield Share(message("second", 100))
        self.found.extend(float(theirs.fields[0].mean()) - 10 * k for _, theirs in first)
        self.found.extend(float(theirs.fields[0].mean()) - 100 for _, theirs in second)


def test_replies_stay_until_the_end_of_a_round() -> None:
    """Also where whole messages keep their memory from round to round."""

    def body(group: dist.ProcessGroup) -> list[float]:
        algorithm = TwoShares()
        model = GossipDataParallel(
            nn.Linear(2, 2), algorithm=algorithm, graph="ring", push_sum=False, rounds="manual", process_group=group
        )
        for _ in range(3):
            model.gossip_step()
        model.close()
        return algorithm.found

    for rank, found in enumerate(run_ranks(3, body)):
        others = {(rank - 1) % 3, (rank + 1) % 3}
        assert [set(found[k : k + 2]) for k in range(0, 12, 2)] == [others] * 6


def test_all_messages_have_no_own_one_at_their_beginning() -> None:
    x = Vector([torch.zeros(4)])
    with pytest.raises(ValueError, match="got own= in the reply to a Gather, expected the reply to a Share"):
        Received([], begins_with_own=False).add_to(x, own=x)

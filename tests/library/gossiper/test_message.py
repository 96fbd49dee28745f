"""Messages of several dtypes in one buffer, and which part of a vector is which."""

from __future__ import annotations

import itertools

import pytest
import torch

from gossip_modules.extend import FlatVector
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from gossip_modules.gossiper.message import Header, MessageBuffer, tensor_runs
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
        header, other = Header(*words, device=CPU), Header(device=CPU)
        assert header.raw.numel() * header.raw.element_size() == 8
        assert other.read() == (0, 0)
        other.raw.copy_(header.raw)
        assert other.read() == header.read() == (words[0] % 2**32, words[1] % 2**32)


LAYOUT = FlatLayout.of(
    [
        (torch.float32, [*map(TensorSpec, [(2, 3), (2, 3), (0,), (4, 5), (7,), ()]), TensorSpec((3,), True)]),
        (torch.float64, [TensorSpec((2,)), TensorSpec((0, 4))]),
        (torch.float32, 6),
        (torch.bfloat16, [TensorSpec((2, 2), True)]),
    ]
)


def test_runs_are_the_parts_in_as_few_runs_as_possible() -> None:
    matrices = tensor_runs(LAYOUT, lambda spec: spec.is_matrix)
    assert [(s.segment, s.first, s.last) for s in matrices] == [(0, 0, 32)]
    assert [spec.shape for spec in matrices[0].specs] == [(2, 3), (2, 3), (4, 5)]
    rest = tensor_runs(LAYOUT, lambda spec: not spec.is_matrix)
    assert [(s.segment, s.first, s.last) for s in rest] == [(0, 32, 43), (1, 0, 2), (2, 0, 6), (3, 0, 4)]
    buffers = tensor_runs(LAYOUT, lambda spec: spec.is_buffer)
    assert [(s.segment, s.first, s.last) for s in buffers] == [(0, 40, 43), (3, 0, 4)]


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_a_predicate_and_of_its_opposite_partition_a_layout(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    specs = [TensorSpec((draw(4), draw(3)) if draw(2) else (draw(5),), bool(draw(2))) for _ in range(8)]
    layout = FlatLayout.of([(torch.float32, specs), (torch.float64, specs[::-1])])
    found = [*tensor_runs(layout, lambda spec: spec.is_buffer), *tensor_runs(layout, lambda spec: not spec.is_buffer)]
    vector = FlatVector.zeros(layout, CPU)
    for run in found:
        assert run.of(vector).numel() == sum(spec.numel for spec in run.specs) > 0
        assert len({spec.is_buffer for spec in run.specs}) == 1
        run.of(vector).add_(1)
    assert all(bool((segment == 1).all()) for segment in vector.segments)
    for one, other in itertools.combinations(found, 2):
        is_joined = one.segment == other.segment and (one.last == other.first or other.last == one.first)
        assert not is_joined or one.specs[0].is_buffer is not other.specs[0].is_buffer

"""Sequences without padding, and which of them a step reads."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from train.tasks.byte_tokenizer import END, PAD, SMALLEST_VOCABULARY, ByteTokenizer
from train.tasks.language_model.packed_text import PackedText, SequenceBatches, steps_in
from train.tasks.language_model.text_folder import TextFile, beginning


def counting(num_tokens: int) -> PackedText:
    """Tokens 0, 1, 2, ...: each says where it stands."""
    return PackedText(np.arange(num_tokens, dtype=np.uint16), num_bytes=num_tokens)


def batches(text: PackedText, *, rank: int = 0, accumulation_steps: int = 1) -> SequenceBatches:
    steps = steps_in(text, length=4, batch_size=3, accumulation_steps=accumulation_steps)
    return SequenceBatches(text, 4, 3, accumulation_steps, steps, rank, seed=1)


def test_files_are_packed_with_an_end_between_them(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer.learn([], vocabulary_size=SMALLEST_VOCABULARY)
    files = []
    for name, content in {"a": "ä\n", "b": "bc"}.items():
        (tmp_path / name).write_text(content)
        files.append(TextFile(name, tmp_path / name, (tmp_path / name).stat().st_size))
    text = PackedText.of(beginning(files, 0), tokenizer)
    assert text.tokens.dtype == np.uint16
    assert text.num_bytes == 5
    ends = np.flatnonzero(text.tokens == END).tolist()
    assert ends == [0, 4, 7], "every byte is a token"
    assert tokenizer.decode([text.tokens[1:4].tolist(), text.tokens[5:7].tolist()]) == ["ä\n", "bc"]


def test_targets_are_the_next_tokens_and_behind_the_end_there_is_none() -> None:
    batch = counting(10).sequences(np.array([3, 7]), 4)
    assert torch.equal(batch.inputs[0][0], torch.tensor([3, 4, 5, 6]))
    assert torch.equal(batch.targets, torch.tensor([[4, 5, 6, 7], [8, 9, PAD, PAD]]))
    assert batch.num_items == 6


def test_a_pass_reads_each_sequence_once_and_every_pass_cuts_elsewhere() -> None:
    own = batches(counting(103), accumulation_steps=2)
    assert own.steps_per_pass == 24 // 6
    plans = [own.plan(number) for number in range(6)]
    for plan in plans:
        assert plan.shape == (4, 2, 3)
        assert len(np.unique(plan)) == plan.size
        assert len(np.unique(plan % 4)) == 1, "sequences do not overlap"
        assert plan.max() + 4 < 103, "no sequence of a training batch is short"
    assert len({int(plan.flat[0]) % 4 for plan in plans}) > 1
    assert not np.array_equal(batches(counting(103), rank=1).plan(0), batches(counting(103)).plan(0))


def test_the_stream_is_a_function_of_the_step() -> None:
    own = batches(counting(103))
    whole = list(islice(own.train_stream(0), 20))
    assert all(part.num_items == 12 for parts in whole for part in parts)
    for first in (1, own.steps_per_pass, own.steps_per_pass + 3):
        resumed = list(islice(own.train_stream(first), 3))
        for (one,), (other,) in zip(whole[first:], resumed):
            assert torch.equal(one.inputs[0], other.inputs[0])


@pytest.mark.parametrize("num_tokens", [20, 15, 3])
def test_a_share_that_is_shorter_than_a_step_is_refused(num_tokens: int) -> None:
    fits = counting(16)
    assert steps_in(fits, length=4, batch_size=3, accumulation_steps=1) == 1
    with pytest.raises(ValueError, match=rf"got {num_tokens} tokens of training text .* expected at least 28: 6 seq"):
        steps_in(counting(num_tokens), length=4, batch_size=3, accumulation_steps=2)


def test_bits_by_frequencies() -> None:
    text = PackedText(np.array([END, 3, 3, 4], dtype=np.uint16), num_bytes=3)
    assert text.bits_of(np.array([0, 0, 0, 3, 3])) == pytest.approx(3 * np.log2(11 / 4))

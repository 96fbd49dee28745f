"""Tokens and batches of them: nothing is lost in a tokenizer, and a batch is a pure function that keeps its limit."""

from __future__ import annotations

import json
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from train.tasks.byte_tokenizer import END, PAD, SMALLEST_VOCABULARY, START
from train.tasks.translation.parallel_text import ListedText, Pair
from train.tasks.translation.token_batches import TokenBatches, by_length, micro_batch
from train.tasks.translation.token_sequences import Sequences, TokenizedText
from train.tasks.translation.tokenization import BytePairs

WORDS = ["ein", "Vöglein", "über", "Straße", "grüßt", "zwölf", "Äpfel", "früh"]


def sentence(generator: np.random.Generator) -> str:
    return " ".join(generator.choice(WORDS, size=generator.geometric(0.15)))


@pytest.fixture(scope="module")
def text() -> ListedText:
    generator = np.random.default_rng(0)
    return ListedText([Pair(sentence(generator), sentence(generator)) for _ in range(700)])


@pytest.fixture(scope="module")
def tokenizer(text: ListedText) -> BytePairs:
    return BytePairs.train(text, vocabulary_size=300)


@pytest.fixture(scope="module")
def tokenized(text: ListedText, tokenizer: BytePairs) -> TokenizedText:
    return TokenizedText.of(text, tokenizer, max_length=30, cuts=False)


@pytest.mark.parametrize(
    "sentence",
    [
        "zwölf Äpfel über die Straße",
        "naïve 日本語 😀",
        "two  spaces ",
        "\ttab\nline",
        "",
        "e\u0301 is not \u00e9",
        "</s> <pad>",
    ],
)
def test_text_survives_its_tokens(tokenizer: BytePairs, sentence: str) -> None:
    (tokens,) = tokenizer.encode([sentence])
    assert all(END < token < tokenizer.num_tokens for token in tokens), "marks are never made by text"
    assert tokenizer.decode([[START, *tokens, END, PAD]]) == [sentence]


def test_frequent_words_become_tokens(tokenizer: BytePairs) -> None:
    assert [len(tokens) for tokens in tokenizer.encode(["zwölf Straße", "Straße zwölf"])] == [2, 2]


def test_equal_text_gives_equal_tokens_and_a_file_brings_them_back(
    text: ListedText, tokenizer: BytePairs, tmp_path: Path
) -> None:
    assert BytePairs.train(text, vocabulary_size=300).digest == tokenizer.digest
    assert BytePairs.train(text, vocabulary_size=280).digest != tokenizer.digest
    assert BytePairs.train(text, vocabulary_size=280).num_tokens == 280
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = BytePairs.load(tmp_path / "tokenizer.json")
    assert (loaded.digest, loaded.encode(["Vöglein"])) == (tokenizer.digest, tokenizer.encode(["Vöglein"]))


def test_a_file_that_is_no_tokenizer_is_refused(text: ListedText, tokenizer: BytePairs, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got vocabulary_size=258, expected at least 259: every byte is a token"):
        BytePairs.train(text, vocabulary_size=SMALLEST_VOCABULARY - 1)
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=r"got .*tokenizer\.json: .*No such file"):
        BytePairs.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"got .*tokenizer\.json: got no tokenizer .*, expected the JSON"):
        BytePairs.load(path)
    other = json.loads(tokenizer.description)
    other["model"] = {**other["model"], "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []}
    path.write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"got a tokenizer that begins with \('a', 'b', 'c'\), expected \('<pad>'"):
        BytePairs.load(path)


def test_long_pairs_are_left_out_of_training_and_cut_elsewhere(text: ListedText, tokenizer: BytePairs) -> None:
    longest = [max(map(len, tokenizer.encode(pair))) + 1 for pair in text]
    num_long = sum(length > 20 for length in longest)
    assert 0 < num_long < len(longest)
    learnt = TokenizedText.of(text, tokenizer, max_length=20, cuts=False)
    assert (len(learnt), learnt.num_too_long) == (len(longest) - num_long, num_long)
    assert learnt.sizes.tolist() == [length for length in longest if length <= 20]
    cut = TokenizedText.of(text, tokenizer, max_length=20, cuts=True)
    assert (len(cut), cut.num_too_long) == (len(longest), num_long)
    assert cut.sizes.tolist() == [min(length, 20) for length in longest]
    assert learnt.digest != cut.digest


def test_sequences_are_padded_to_the_longest_asked_for() -> None:
    sequences = Sequences.of([[5, 6, 7], [], [8]], max_length=3)
    assert sequences.padded(np.array([2, 0])).tolist() == [[8, END, PAD], [5, 6, END]]
    assert sequences.padded(np.array([1])).tolist() == [[END]]


def batches_of(text: TokenizedText, *, rank: int = 0, world_size: int = 3, accumulation_steps: int = 2) -> TokenBatches:
    return TokenBatches(
        text, max_tokens=128, accumulation_steps=accumulation_steps, rank=rank, world_size=world_size, seed=5
    )


def test_an_epoch_has_each_pair_at_most_once_and_as_many_steps_on_every_rank(tokenized: TokenizedText) -> None:
    ranks = [batches_of(tokenized, rank=rank) for rank in range(3)]
    seen: list[set[int]] = []
    for epoch in range(3):
        plans = [batches.plan(epoch) for batches in ranks]
        assert {len(plan) for plan in plans} == {ranks[0].steps_per_epoch}
        parts = list(chain.from_iterable(chain.from_iterable(plans)))
        assert len(parts) == ranks[0].steps_per_epoch * 3 * 2
        indices = np.concatenate(parts)
        assert len(np.unique(indices)) == len(indices)
        assert len(indices) > 0.85 * len(tokenized), "only what does not fill a step of all ranks is left out"
        seen.append(set(indices.tolist()))
    assert len(set.union(*seen)) == len(tokenized), "other pairs are left out in other epochs"


def test_no_batch_exceeds_its_tokens_and_most_are_nearly_full(tokenized: TokenizedText) -> None:
    sizes = []
    for (part,) in batches_of(tokenized, world_size=1, accumulation_steps=1).plan(0):
        inputs, targets, num_items = micro_batch(tokenized, part)
        for tensor in (*inputs, targets):
            assert tensor.numel() <= 128
        assert num_items == int((targets != PAD).sum())
        sizes.append(max(inputs[0].numel(), targets.numel()))
    assert np.mean(sizes) > 0.8 * 128


def test_batches_are_a_pure_function_of_the_step(tokenized: TokenizedText) -> None:
    batches = batches_of(tokenized, rank=1)
    steps = list(islice(batches.train_stream(0), 2 * batches.steps_per_epoch + 3))
    for first in (1, batches.steps_per_epoch, batches.steps_per_epoch + 2):
        resumed = next(batches_of(tokenized, rank=1).train_stream(first))
        for part, again in zip(steps[first], resumed, strict=True):
            assert torch.equal(part.targets, again.targets)
            assert all(torch.equal(x, y) for x, y in zip(part.inputs, again.inputs, strict=True))
    one, other = (np.concatenate(list(chain.from_iterable(batches.plan(epoch)))) for epoch in (0, 1))
    assert not np.array_equal(np.sort(one), np.sort(other))


def test_a_micro_batch_asks_for_each_token_after_those_before() -> None:
    text = TokenizedText(
        Sequences.of([[7], [8, 9]], max_length=9), Sequences.of([[3, 4, 5], [6]], max_length=9), num_too_long=0
    )
    (source, mask, decoder), targets, num_items = micro_batch(text, np.array([0, 1]))
    assert source.tolist() == [[7, END, PAD], [8, 9, END]]
    assert mask.tolist() == [[True, True, False], [True, True, True]]
    assert decoder[0].tolist() == [START, 3, 4, 5]
    assert decoder[1, :2].tolist() == [START, 6], "what comes behind END has no target"
    assert targets.tolist() == [[3, 4, 5, END], [6, END, PAD, PAD]]
    assert num_items == 6


def test_sentences_and_ranks_that_do_not_fit_are_refused(tokenized: TokenizedText) -> None:
    with pytest.raises(ValueError, match=r"got max_tokens=8 and a sentence of up to \d+ tokens, .* lower --max-length"):
        TokenBatches(tokenized, max_tokens=8, accumulation_steps=1, rank=0, world_size=1, seed=0)
    with pytest.raises(ValueError, match=r"got \d+ training pairs, \d+ batches of 128 tokens"):
        batches_of(tokenized, world_size=500)
    empty = TokenizedText(Sequences.of([], max_length=2), Sequences.of([], max_length=2), num_too_long=0)
    with pytest.raises(ValueError, match=r"got 0 training pairs, 0 batches of 128 tokens, expected at least 6"):
        batches_of(empty)


def test_every_sequence_is_read_once_by_length(tokenized: TokenizedText) -> None:
    batches = by_length(tokenized.sizes, 64)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(len(tokenized)))
    assert all(len(batch) * tokenized.sizes[batch].max() <= 64 for batch in batches)
    assert [batch.tolist() for batch in by_length(np.array([9, 100, 8]), 20)] == [[2, 0], [1]]
    assert by_length(np.empty(0, dtype=np.int64), 20) == []

"""TokenizedText: a parallel text as numbers, in a few large arrays."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from train.tasks.byte_tokenizer import END, PAD
from train.tasks.translation.parallel_text import ParallelText
from train.tasks.translation.tokenization import BytePairs

CHUNK = 10_000
"""Pairs that are encoded at once."""


class Sequences:
    """Sequences of tokens, one after the other: 4.5 million sentences are two arrays, not as many lists.

    Args:
        tokens: the tokens of all sequences, int32 [sum of lengths].
        lengths: int64 [N].
    """

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self.tokens, self.lengths = tokens, lengths
        self._starts = np.cumsum(lengths) - lengths

    @classmethod
    def of(cls, sentences: Iterable[Sequence[int]], *, max_length: int) -> Self:
        """END after each sentence, and before that no more than max_length - 1 tokens of it."""
        column = _Column(max_length)
        for tokens in sentences:
            column.append(tokens)
        return cls(*column.arrays())

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, indices: np.ndarray) -> Tensor:
        """Those at `indices`, int64 [len(indices), longest of them], filled up with PAD."""
        lengths = self.lengths[indices]
        is_token = np.arange(lengths.max()) < lengths[:, None]
        places = self._starts[indices][:, None] + np.arange(lengths.max())
        tokens = np.full(is_token.shape, PAD, dtype=np.int64)
        tokens[is_token] = self.tokens[places[is_token]]
        return torch.from_numpy(tokens)


@dataclass(frozen=True)
class TokenizedText:
    """Pairs as tokens, each side ended by END.

    Args:
        sources: what is translated.
        targets: as many translations.
        num_too_long: pairs that were longer than they may be, and left out or cut.
    """

    sources: Sequences
    targets: Sequences
    num_too_long: int

    @classmethod
    def of(cls, text: ParallelText, tokenizer: BytePairs, *, max_length: int, cuts: bool) -> Self:
        """Encode `text`.

        Args:
            text: read once, from its beginning.
            tokenizer: the tokenizer of both languages.
            max_length: the most tokens that a side may have, END included.
            cuts: pairs with a longer side are cut to that length, as a test set needs; otherwise they are left out.
        """
        sides = (_Column(max_length), _Column(max_length))
        num_too_long = 0
        pairs = iter(text)
        while chunk := list(islice(pairs, CHUNK)):
            encoded = [tokenizer.encode(sentences) for sentences in zip(*chunk, strict=True)]
            is_too_long = [max(map(len, pair)) >= max_length for pair in zip(*encoded, strict=True)]
            num_too_long += sum(is_too_long)
            for side, sentences in zip(sides, encoded, strict=True):
                for tokens, is_long in zip(sentences, is_too_long, strict=True):
                    if cuts or not is_long:
                        side.append(tokens)
        return cls(Sequences(*sides[0].arrays()), Sequences(*sides[1].arrays()), num_too_long)

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of the longer side of each pair, int64 [N]."""
        return np.maximum(self.sources.lengths, self.targets.lengths)

    @property
    def digest(self) -> str:
        """A short hash of all tokens, to tell whether two ranks, or two runs, read the same text."""
        digest = hashlib.sha256()
        for side in (self.sources, self.targets):
            digest.update(side.tokens.data)
            digest.update(side.lengths.data)
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.sources)


class _Column:
    """Grows by a sequence at a time, at four bytes a token."""

    def __init__(self, max_length: int) -> None:
        self._tokens, self._lengths, self._max_length = array("i"), array("q"), max_length

    def append(self, tokens: Sequence[int]) -> None:
        kept = tokens[: self._max_length - 1]
        self._tokens.extend(kept)
        self._tokens.append(END)
        self._lengths.append(len(kept) + 1)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.frombuffer(self._tokens, dtype=np.int32), np.frombuffer(self._lengths, dtype=np.int64)

"""BytePairs: sentences as numbers, one vocabulary for both languages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typing_extensions import Self

from train.tasks.byte_tokenizer import ByteTokenizer
from train.tasks.translation.parallel_text import ParallelText


class BytePairs(ByteTokenizer):
    """A `ByteTokenizer` of sentences: a space stands before each, so that a word is the same one wherever it stands.

    Args:
        description: see `ByteTokenizer`.

    Example:
        >>> pairs = BytePairs.train(ListedText([Pair("five", "fünf")]), vocabulary_size=260)
        >>> pairs.decode(pairs.encode(["fünf"]))
        ['fünf']
    """

    @classmethod
    def train(cls, text: ParallelText, *, vocabulary_size: int) -> Self:
        """Learn the tokens of both languages; see `ByteTokenizer.learn`."""
        return cls.learn(_sentences(text), vocabulary_size=vocabulary_size)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See `ByteTokenizer`."""
        return super().encode([f" {text}" for text in texts])

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """See `ByteTokenizer`."""
        return [text.removeprefix(" ") for text in super().decode(rows)]


def _sentences(text: ParallelText) -> Iterable[str]:
    for pair in text:
        yield from (f" {pair.source}", f" {pair.target}")

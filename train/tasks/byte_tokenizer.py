"""ByteTokenizer: text as numbers by byte-pair encoding, through the library tokenizers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typing_extensions import Self

from train.job.files import write_atomically
from train.job.outputs import TOKENIZER

PAD, START, END = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256


class ByteTokenizer:
    """Text as numbers and back, without loss: the alphabet is the 256 bytes, so that no text is unknown to it.

    Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", ACL 2016, arXiv
    1508.07909; over bytes as in Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Spaces
    belong to the word behind them, so that line ends, tabs and double spaces survive too.

    Args:
        description: a tokenizer in the format of the library tokenizers, JSON; nothing in it is executed.

    Raises:
        ValueError: it is none, or has other special tokens.

    Example:
        >>> tokenizer = ByteTokenizer.learn(["five", "fünf"], vocabulary_size=260)
        >>> tokenizer.decode(tokenizer.encode(["fünf"]))
        ['fünf']
    """

    def __init__(self, description: str) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(description)
        except Exception as error:  # the library raises no narrower one
            raise ValueError(f"got no tokenizer ({error}), expected the JSON that a run leaves") from error
        found = tuple(self._tokenizer.id_to_token(index) for index in (PAD, START, END))
        if found != SPECIAL_TOKENS:
            raise ValueError(
                f"got a tokenizer that begins with {found}, expected {SPECIAL_TOKENS}; take one that a run has left"
            )

    @classmethod
    def learn(cls, texts: Iterable[str], *, vocabulary_size: int) -> Self:
        """Merge the most frequent neighbours until there are `vocabulary_size` tokens, or no more.

        The same text always gives the same tokens. With SMALLEST_VOCABULARY every byte is a token by itself.

        Raises:
            ValueError: not even the bytes fit.
        """
        if vocabulary_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"got vocabulary_size={vocabulary_size}, expected at least {SMALLEST_VOCABULARY}: every byte is a token"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        # They keep their places in the vocabulary, but are no longer looked for in text: "</s>" is four bytes there.
        return cls(json.dumps({**json.loads(tokenizer.to_str()), "added_tokens": []}))

    @classmethod
    def load(cls, path: Path) -> Self:
        """The tokenizer in the file `path`.

        Raises:
            ValueError: there is none; the file is named.
        """
        try:
            return cls(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"got {path}: {error}") from error

    def save(self, path: Path) -> None:
        """Write the tokenizer to `path`, atomically."""
        write_atomically(path, lambda temporary: temporary.write_text(self.description, encoding="utf-8"))

    @property
    def description(self) -> str:
        """What the constructor takes."""
        return self._tokenizer.to_str()

    @property
    def digest(self) -> str:
        """A short hash, equal for tokenizers that say the same numbers."""
        return hashlib.sha256(self.description.encode()).hexdigest()[:16]

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary."""
        return self._tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text as the numbers of its tokens, without start and end."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of numbers; special tokens are left out, bytes that are no UTF-8 become U+FFFD."""
        words = [[token for token in row if token >= len(SPECIAL_TOKENS)] for row in rows]
        return self._tokenizer.decode_batch(words)


def check_tokenizer_options(*, tokenizer: str, vocabulary_size: int, run_dir: Path) -> None:
    """Check what a run says of its tokenizer, before there is one.

    Args:
        tokenizer: path of one that is there; empty: it is learnt.
        vocabulary_size: the number of tokens of a trained tokenizer.
        run_dir: folder of the run.

    Raises:
        ValueError: not even the bytes fit, or the run would clear the file away that it is to read.
    """
    if vocabulary_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"got vocabulary_size={vocabulary_size}, expected at least {SMALLEST_VOCABULARY}: 256 bytes and "
            "the marks of padding, start and end"
        )
    if tokenizer and Path(tokenizer).resolve() == (run_dir / TOKENIZER).resolve():
        raise ValueError(
            f"got tokenizer={tokenizer!r} in the folder of this run, which clears what an earlier one left "
            "there, expected it elsewhere; choose another --out-dir, or copy it"
        )

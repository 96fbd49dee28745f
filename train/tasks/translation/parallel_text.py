"""ParallelText: sentences of one language beside their translations, from two files or from memory."""

from __future__ import annotations

import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


class ParallelText(ABC):
    """Pairs of sentences, in the same order whenever they are asked for; neither side of a pair is blank."""

    num_blank = 0
    """Pairs that the last whole pass left out, because a side of theirs is."""

    @abstractmethod
    def __iter__(self) -> Iterator[Pair]: ...


@dataclass(frozen=True)
class ListedText(ParallelText):
    """Pairs in memory."""

    pairs: Sequence[Pair]

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)


class Corpus(NamedTuple):
    """Three parallel texts without a pair in common."""

    train: ParallelText
    validation: ParallelText
    """That every rank's own model is measured on."""
    test: ParallelText
    """That the averaged model translates."""


class TextFiles(ParallelText):
    """The lines of two files, UTF-8, plain or gzip; a pair of which one side is blank is left out.

    Files are read from their beginning each time, a line at a time, so that they may be larger than memory.

    Args:
        source: path of the sentences.
        target: path of their translations, line by line.
        joiner: taken out of every line: "@@ " undoes the subwords of a text that was cut by another program.
    """

    def __init__(self, source: Path, target: Path, joiner: str = "") -> None:
        self.source, self.target, self.joiner = source, target, joiner

    def __iter__(self) -> Iterator[Pair]:
        """See `ParallelText`.

        Raises:
            ValueError: one file is longer, or a line is not UTF-8, or a compressed file is damaged.
        """
        counts, num_blank = [0, 0], 0
        with ExitStack() as stack:
            sides = [lines_of(stack.enter_context(_open(path)), path) for path in (self.source, self.target)]
            for source, target in zip_longest(*sides):
                counts[0] += source is not None
                counts[1] += target is not None
                if source is None or target is None:
                    continue  # to the end of the longer one, so that the error can say how long
                pair = Pair(*(" ".join(line.replace(self.joiner, "").split()) for line in (source, target)))
                if pair.source and pair.target:
                    yield pair
                else:
                    num_blank += 1
        if counts[0] != counts[1]:
            raise ValueError(
                f"got {counts[0]} lines in {self.source} and {counts[1]} in {self.target}, expected as many: line n of "
                "one translates line n of the other; take both from the same version of the corpus"
            )
        self.num_blank = num_blank


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def lines_of(file: Iterable[bytes], path: Path | str) -> Iterator[str]:
    """The lines of `file`, UTF-8; only a line feed ends one.

    Raises:
        ValueError: one is not UTF-8, or a compressed file is damaged; `path` says which file.
    """
    number = 0
    try:
        for number, line in enumerate(file, start=1):  # noqa: B007 - read when one fails
            yield line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"got byte 0x{error.object[error.start]:02x} in line {number} of {path}, expected UTF-8; convert the file, "
            "for instance with iconv"
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"got {path}, damaged after line {number} ({error}), expected a whole gzip file; fetch it again"
        ) from error

"""Claim: a figure, or a few words, that rows of CSV files say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.record import RESULTS, rows_of


@dataclass(frozen=True)
class Claim:
    """A text that rows of CSV files say.

    Attributes:
        csvs: the names of the files in benchmarks/results/.
        quantifier: the rows and columns, and how they become the text: a mean over seeds, the worst seed, at equal
            steps or at an equal loss, tuned or untuned. A reader can compute the text from it.
        query: returns the figure or the words from the tables of `csvs`, in their order.
        form: the format of the figure, with one place.
    """

    csvs: tuple[str, ...]
    quantifier: str
    query: Callable[..., Any]
    form: str = "{}"

    def text(self, folder: Path = RESULTS) -> str:
        """Return the text.

        Args:
            folder: that has the files.
        """
        return _text(self, tuple(_state(folder / csv) for csv in self.csvs))


def _state(file: Path) -> tuple[Path, int]:
    """A file, wherever links lead, and when it changed."""
    file = file.resolve()
    return file, file.stat().st_mtime_ns


@cache
def _text(claim: Claim, files: tuple[tuple[Path, int], ...]) -> str:
    """The text of a claim; pages and `--list` ask for most of them several times."""
    return claim.form.format(claim.query(*(_read(*file) for file in files)))


@lru_cache(maxsize=64)
def _read(file: Path, changed: int) -> pd.DataFrame:
    """Read a file once; queries leave it as it is."""
    return rows_of(file.name, file.parent)

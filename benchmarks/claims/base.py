"""Claim: a figure, or a few words, that rows of CSV files say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
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
        return self.form.format(self.query(*(_rows(folder, csv) for csv in self.csvs)))


def _rows(folder: Path, csv: str) -> pd.DataFrame:
    return _read(folder, csv, (folder / csv).stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _read(folder: Path, csv: str, changed: int) -> pd.DataFrame:
    """Read a file once; queries leave it as it is."""
    return rows_of(csv, folder)

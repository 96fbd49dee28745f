"""Computed: a study without training, whose rows are computed one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.record import append_row, matching, rows_in

Cell: TypeAlias = tuple[Mapping[str, Any], Callable[[], Mapping[str, Any]]]
"""The columns that name a row, and a function that computes the others."""


@dataclass(frozen=True)
class Computed:
    """A table that is computed row by row.

    Args:
        cells: yields the cells in their order, given the rows so far, which it may choose by.
        columns: all columns of a row.
    """

    cells: Callable[[Callable[[], Any]], Iterator[Cell]]
    columns: tuple[str, ...]

    def run(self, path: Path, minutes: float) -> bool:
        """Compute the rows that the file does not have; returns whether it has all now.

        Args:
            path: the CSV file.
            minutes: no row begins after them.
        """
        end = time.monotonic() + 60 * minutes

        def rows() -> Any:
            return rows_in(path, self.columns)

        for key, compute in self.cells(rows):
            if len(matching(rows(), key)):
                continue
            if time.monotonic() > end:
                return False
            append_row(path, {**key, **compute()}, seed=int(key.get("run_seed", 0)))
            print(key, flush=True)
        return True

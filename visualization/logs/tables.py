"""CSV tables of numbers, read such that whatever is wrong with one is named by file and line, and the rest is kept."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd


class FileProblem(NamedTuple):
    """What is wrong with a file.

    Attributes:
        path: the path of the file.
        line: counted from 1; None: the whole file.
        text: got, expected, remedy.
    """

    path: Path
    line: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.path}{'' if self.line is None else f':{self.line}'}: {self.text}"


class Table(NamedTuple):
    """The rows that can be trusted, and what is wrong with the others.

    Attributes:
        rows: a column per name of the header, and `line`, where the row stands in the file.
        problems: empty if the file is whole.
    """

    rows: pd.DataFrame
    problems: tuple[FileProblem, ...]


def read_numbers(path: Path) -> Table:
    """A CSV with a header in which each cell is a number, or empty: NaN.

    Reading ends at the first line that is cut off or has other cells than the header; a row with a cell that is no
    number is left out, and so is a file that cannot be read.

    Args:
        path: the path of the file.
    """
    cells, problems = _read_cells(path)
    if not cells:
        return Table(pd.DataFrame(), problems or (FileProblem(path, None, _EMPTY),))
    (_, header), *lines = cells
    if twice := sorted({name for name in header if [*header, "line"].count(name) > 1}):
        text = f"got a column {', '.join(twice)} more often than expected, once; the file is left out"
        return Table(pd.DataFrame(), (FileProblem(path, 1, text),))
    rows: list[dict[str, float]] = []
    bad: list[FileProblem] = []
    for line, values in lines:
        if len(values) != len(header):
            text = f"got {len(values)} cells, expected the {len(header)} of the header; rows from here on are left out"
            bad.append(FileProblem(path, line, text))
            break
        try:
            numbers = {name: _number(name, value) for name, value in zip(header, values, strict=True)}
        except ValueError as error:
            bad.append(FileProblem(path, line, f"{error}; the row is left out"))
            continue
        rows.append({**numbers, "line": line})
    if not lines and not problems:
        bad.append(FileProblem(path, 1, "got a header and no rows, expected a row per epoch; has the run just begun?"))
    bad.sort(key=lambda problem: problem.line or 0)
    return Table(pd.DataFrame(rows, columns=[*header, "line"], dtype=float), (*bad, *problems))


def read_columns(path: Path, columns: Collection[str], *, source: str) -> pd.DataFrame:
    """A CSV that a script has just written, of text and numbers.

    Args:
        path: the path of the file.
        columns: that it must have.
        source: what writes such files, for the error.

    Raises:
        ValueError: there is no such file, it is no CSV, a column is missing, or there are no rows.
    """
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"got {path}: {reason}, expected a CSV of {source}; write it with that, or name it") from error
    if missing := [name for name in columns if name not in table] or (["rows"] if table.empty else []):
        raise ValueError(f"got {path} without {', '.join(missing)}, expected a CSV of {source}; write it again")
    return table


_EMPTY = "got an empty file, expected a header and a row per epoch; copy it again, or leave it out"


def _read_cells(path: Path) -> tuple[list[tuple[int, Sequence[str]]], tuple[FileProblem, ...]]:
    """Numbered lines as cells, without one that is cut off."""
    problems: tuple[FileProblem, ...] = ()
    try:
        data = path.read_bytes()
    except OSError as error:
        return [], (FileProblem(path, None, f"got {error.strerror}, expected a file to read; it is left out"),)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems = (FileProblem(path, line, "got bytes that are no text (UTF-8); rows from here on are left out"),)
        text = "".join(data[: error.start].decode().splitlines(keepends=True)[: line - 1])
    if text and not text.endswith("\n"):
        lines = text.splitlines(keepends=True)
        cut = "got a line without its end, expected a whole row; the file was cut, copy it again"
        text, problems = "".join(lines[:-1]), (*problems, FileProblem(path, len(lines), cut))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    cells: list[tuple[int, Sequence[str]]] = []
    try:
        cells += ((reader.line_num, row) for row in reader if row)
    except csv.Error as error:
        problems = (
            FileProblem(path, reader.line_num, f"got no CSV ({error}); rows from here on are left out"),
            *problems,
        )
    return cells, problems


def _number(name: str, cell: str) -> float:
    try:
        return float(cell) if cell.strip() else float("nan")
    except ValueError:
        raise ValueError(f"got {name}={cell!r}, expected a number") from None

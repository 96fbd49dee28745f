"""Show a run live in the terminal: `python -m gossip_modules.watch RUN`.

Reads the `metrics_<rank>.jsonl` that `MetricsLogger(model, to=[JSONLines(RUN)])`, or a training script with --out-dir,
writes in the folder RUN, one for each rank. Columns, each over the last two rows of a rank:

    step, /s       optimizer steps so far, and per second
    loss           the value of that name, if there is one
    wait           the share of the time in which training waited for peers
    peers          the number of peers that messages came from or went to
    slowest        the peer with the largest median wait, and the milliseconds
    MB/s           payload sent
    late           forwards that rounds were late, on average
    distance       the consensus distance, as last measured
    age            seconds since the last row; "!" after four times the seconds between rows

A malformed row is passed over; a line below the table names its file, once for each file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

_BLOCK = 1 << 16  # bytes read at the end of a file, doubled until two rows are in them
_HEAD = ("rank", "step", "/s", "loss", "wait", "peers", "slowest", "MB/s", "late", "distance", "age")
_NUMBERS = ("loss", "wait_seconds", "bytes_sent", "mean_staleness", "consensus_distance")  # or null
_NAN = math.nan
_CLEAR, _RED, _BOLD, _PLAIN = "\x1b[H\x1b[J", "\x1b[31m", "\x1b[1m", "\x1b[0m"

Row = Mapping[str, Any]


def last_rows(path: Path, on_malformed: Callable[[bytes], object] = lambda line: None) -> tuple[Row, Row] | None:
    """The last two rows of a file, or its only row twice; None without a row.

    A line under way is left out.

    Args:
        path: the file.
        on_malformed: called with each malformed line, such as an unfinished one of a killed process.
    """
    with path.open("rb") as file:
        size, length = file.seek(0, os.SEEK_END), _BLOCK
        while True:
            file.seek(max(size - length, 0))
            lines = file.read(length).split(b"\n")[:-1]
            if length >= size or len(lines) > 3:  # the first line may be cut, and one unfinished
                break
            length *= 2
    rows: list[Row] = []
    for line in reversed(lines if length >= size else lines[1:]):
        if (row := _parsed(line)) is not None:
            rows.insert(0, row)
        elif line:
            on_malformed(line)
        if len(rows) == 2:
            break
    return (rows[0], rows[-1]) if rows else None


def _parsed(line: bytes) -> Row | None:
    """The row of a line; None: it is malformed."""
    try:
        row: Row = json.loads(line)
        values = [float(row["time"]), float(row["step"])]
        numbers = [value for name, value in row.items() if name in _NUMBERS or name.startswith("wait_median/")]
        values += [0.0 for value in numbers if value is not None and isinstance(float(value), float)]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    is_number = isinstance(row["time"], int | float) and isinstance(row["step"], int | float)
    return row if is_number and "rank" in row and all(map(math.isfinite, values)) else None


def cells(rows: tuple[Row, Row], now: float) -> tuple[str, ...]:
    """The columns of a rank."""
    before, row = rows
    seconds = row["time"] - before["time"]

    def get(name: str, of: Row = row) -> float:
        value = of.get(name)
        return _NAN if value is None else float(value)

    def rate(name: str) -> float:
        change = get(name) - get(name, before)
        return change / seconds if seconds > 0 and change >= 0 else _NAN  # counters begin anew where a job resumes

    waits = {key.partition("/")[2]: get(key) for key in row if key.startswith("wait_median/")}
    slowest = max(waits, key=lambda peer: waits[peer], default=None)
    peers = {key.partition("/")[2] for key in row if key.startswith(("bytes_sent/", "bytes_received/"))}
    age = max(now - row["time"], 0.0)
    return (
        str(row["rank"]),
        str(row["step"]),
        _text(rate("step"), ".3g"),
        _text(get("loss"), ".4g"),
        _text(100 * rate("wait_seconds"), ".0f", " %"),
        str(len(peers)),
        "-" if slowest is None else f"{slowest} {1000 * waits[slowest]:.3g} ms",
        _text(rate("bytes_sent") / 1e6, ".3g"),
        _text(get("mean_staleness"), ".2g"),
        _text(get("consensus_distance"), ".3g"),
        f"{age:.0f}{'!' if 0 < 4 * seconds < age else ''}",
    )


def table(folder: Path, now: float, told: set[Path] | None = None) -> Iterator[str]:
    """The lines of the view.

    Args:
        folder: of the run.
        now: the time.
        told: mutated: files with a malformed row that were named before; the ones of this view are added.
    """
    malformed: dict[Path, bytes] = {}
    found = {path: last_rows(path, partial(malformed.setdefault, path)) for path in folder.glob("metrics_*.jsonl")}
    yield from _rows(folder, found, now)
    told = set() if told is None else told
    for path in sorted(malformed.keys() - told):
        yield f"{path.name}: passed over a malformed row, {malformed[path][:60].decode(errors='replace')!r}"
    told.update(malformed)


def _rows(folder: Path, found: Mapping[Path, tuple[Row, Row] | None], now: float) -> Iterator[str]:
    ranks = sorted((rows for rows in found.values() if rows is not None), key=_order)
    if not ranks:
        yield f"{folder}: no rows yet"
        return
    steps = [row["step"] for _, row in ranks]
    yield f"{folder}: {len(ranks)} ranks, steps {min(steps)} to {max(steps)}"
    lines = [_HEAD, *(cells(rows, now) for rows in ranks)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the run until Control-C; returns the exit code."""
    description, _, columns = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m gossip_modules.watch",
        description=description,
        epilog=columns,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("--once", action="store_true", help="print the table once, and end")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds from one look to the next (2)")
    options = parser.parse_args(arguments)
    if not options.run.is_dir():
        parser.error(f"got {options.run}, expected the folder of a run, as given to JSONLines or --out-dir")
    if not options.interval > 0:
        parser.error(f"got --interval {options.interval:g}, expected seconds above 0")
    if options.once:
        print("\n".join(table(options.run, time.time())))
        return 0
    told: set[Path] = set()
    try:
        while True:
            _draw(list(table(options.run, time.time(), told)))
            time.sleep(options.interval)
    except KeyboardInterrupt:
        return 0


def _draw(lines: Sequence[str]) -> None:
    """In place on a terminal, where rows that stay away are red; one after the other elsewhere."""
    if not sys.stdout.isatty():
        print("\n".join(lines), flush=True)
        return
    width, height = shutil.get_terminal_size()
    head, *others = lines[: max(height - 1, 1)]
    shown = [_BOLD + head[:width] + _PLAIN]
    shown += [_RED + line[:width] + _PLAIN if line.endswith("!") else line[:width] for line in others]
    print(_CLEAR + "\n".join(shown), flush=True)


def _order(rows: tuple[Row, Row]) -> tuple[float, str]:
    rank = str(rows[1]["rank"])
    try:
        return float(rank), rank
    except ValueError:
        return math.inf, rank


def _text(value: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{form}}{unit}"


if __name__ == "__main__":
    sys.exit(main())

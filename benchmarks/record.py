"""What every row of benchmarks/results/ says beside its figures: when, of which code, where and how it was measured."""

from __future__ import annotations

import csv
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PROVENANCE = ("date", "commit", "torch", "machine", "cores", "command", "seed")
DTYPES = {"commit": str, "data": str, "library": str, "victims": str, "named": str}
"""Of columns that look like numbers, and are none."""


def rows_of(csv: str, folder: Path = RESULTS) -> pd.DataFrame:
    """The rows of a file of benchmarks/results/, or of another folder."""
    return pd.read_csv(folder / csv, dtype=DTYPES)


def commit() -> str:
    """The last commit that changed the library, with "+" where files of it differ from that."""
    if shutil.which("git") is None:
        return "unknown"
    log = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--abbrev=10", "--", "gossip_modules"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    changes = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "gossip_modules"], cwd=ROOT, capture_output=True)
    return (log.stdout.strip() or "unknown") + ("+" if changes.returncode == 1 else "")


def cpu_model() -> str:
    """The processor's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def command() -> str:
    """The command line of this process, as a reader can type it in the root of the repository.

    The interpreter is `python`. A path below $GOSSIP_DATA begins with this variable. A path elsewhere outside of the
    repository becomes one in benchmarks/results/ if it is a CSV file, and one in runs/, which git ignores, if not.
    """
    return " ".join(["python", *(_typed(argument) for argument in sys.orig_argv[1:])])


def _typed(argument: str) -> str:
    head, equals, value = argument.rpartition("=")
    path = Path(value)
    if not (path.is_absolute() or ".." in path.parts):
        return shlex.quote(argument)
    path, data = path.resolve(), os.environ.get("GOSSIP_DATA")
    if path.is_relative_to(ROOT):
        value = path.relative_to(ROOT).as_posix()
    elif data and path.is_relative_to(Path(data).resolve()):
        return f"{head}{equals}$GOSSIP_DATA/{shlex.quote(path.relative_to(Path(data).resolve()).as_posix())}"
    else:
        value = f"{'benchmarks/results' if path.suffix == '.csv' else 'runs'}/{path.name}"
    return f"{head}{equals}{shlex.quote(value)}"


def digest(path: Path) -> str:
    """The name of a file of data and the first 16 digits of its SHA-256: the column `data` of rows that used it."""
    return f"{path.name} {short_hash(path.read_bytes(), num_digits=16)}"


def short_hash(content: bytes, *, num_digits: int = 12) -> str:
    """The first digits of a SHA-256: 12 in the column `data` of studies, whose data have no file of their own."""
    return hashlib.sha256(content).hexdigest()[:num_digits]


def provenance(seed: int) -> dict[str, Any]:
    """The columns of PROVENANCE, for a measurement that is made now.

    Args:
        seed: what was drawn at random was drawn from.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    values = (now, commit(), torch.__version__, cpu_model(), os.cpu_count(), command(), seed)
    return dict(zip(PROVENANCE, values, strict=True))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], *, seed: int) -> None:
    """`append_rows` to a new file, in the place of the one that is there."""
    path.unlink(missing_ok=True)
    append_rows(path, rows, seed=seed)


def append_row(path: Path, row: Mapping[str, Any], *, seed: int) -> None:
    """Append figures to a CSV file: see `append_rows`."""
    append_rows(path, [row], seed=seed)


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]], *, seed: int) -> None:
    """Append figures to a CSV file, with the columns of PROVENANCE before them; makes the file where it is not there.

    Args:
        path: of the file. A last line that was cut off is removed.
        rows: of one measurement, figures by column, all with the same columns. If they have a column of PROVENANCE,
            their values are written.
        seed: of the measurement.

    Raises:
        ValueError: the file has other columns.
    """
    before = provenance(seed)
    names = list({**before, **rows[0]})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of another process that appends; until the file is closed
        file.seek(0)
        text = file.read()
        columns = next(csv.reader(text.splitlines()), None)
        if columns not in (None, names):
            raise ValueError(f"got a row with {names} for {path}, expected {columns}; choose another file")
        if not text.endswith("\n"):
            file.truncate(len(text[: text.rfind("\n") + 1].encode()))
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if columns is None:
            writer.writeheader()
        writer.writerows({**before, **row} for row in rows)
        file.flush()
        os.fsync(file.fileno())


def rows_in(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """The rows of a CSV file that `append_rows` has written; none where there is no file.

    Args:
        path: of the file.
        columns: of the measurement, without those of PROVENANCE.

    Raises:
        ValueError: it has other columns.
    """
    expected = [*PROVENANCE, *columns]
    if not path.is_file() or not path.stat().st_size:
        return pd.DataFrame(columns=expected)
    rows = pd.read_csv(path, dtype=DTYPES)
    if list(rows) != expected:
        missing, unknown = [x for x in expected if x not in rows], [x for x in rows if x not in expected]
        raise ValueError(
            f"got {path} with missing columns {missing} and unknown columns {unknown}, expected those that are "
            "written today, in their order; choose another file"
        )
    return rows


def matching(rows: pd.DataFrame, key: Mapping[str, Any]) -> pd.DataFrame:
    """The rows that have these values."""
    found = pd.Series(True, index=rows.index)
    for name, value in key.items():
        found &= rows[name] == value
    return rows[found]

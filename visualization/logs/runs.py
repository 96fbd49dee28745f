"""Runs as they lie in their folders: rank_0000.csv, rank_0001.csv, ... and summary.json, all ranks in one table.

What cannot be read is a `FileProblem` that names file and line; the rest of the run is kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from visualization.logs.tables import FileProblem, read_numbers

SUMMARY = "summary.json"
INDEX = ("epoch", "step", "time_seconds")
"""Columns without which a row has no place."""
COLUMNS = (*INDEX, "own_steps", "loss", "bytes_sent", "consensus_distance")
"""Columns of every task; those of its metrics are own_test_<metric> and averaged_test_<metric>."""
OWN_OPTIONS = ("seed", "out_dir", "overwrite", "resume")
"""Options in which runs of several seeds differ."""
SUMMARY_KEYS: Mapping[str, type] = {"config": dict, "world_size": int, "ranks": list, "averaged_test": dict}


@dataclass(frozen=True)
class LoggedRun:
    """What a run has left.

    Attributes:
        name: in legends.
        folder: the folder of the run.
        table: a row per rank and epoch: the columns of the CSVs, and `rank`.
        summary: summary.json; empty while the run has not ended.
        seeds: the seeds of the runs in one table, see `seeds_together`.
    """

    name: str
    folder: Path
    table: pd.DataFrame
    summary: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()

    @property
    def config(self) -> Mapping[str, Any]:
        """The options of the run; empty without a summary."""
        return self.summary.get("config", {})

    @property
    def recipe(self) -> str | None:
        """The method of the run; None without a summary."""
        return self.config.get("recipe")

    @property
    def world_size(self) -> int:
        """Ranks of the run; without a summary those whose table is here."""
        return int(self.summary.get("world_size", self.table["rank"].nunique()))

    @property
    def numbers(self) -> list[int]:
        """Of the ranks that the summary has results of, in their order; those of an elastic run are its workers."""
        return list(self.summary.get("workers", range(len(self.summary.get("ranks", ())))))

    def has(self, column: str) -> bool:
        """Whether some row has a value there."""
        return column in self.table and bool(self.table[column].notna().any())


def seeds_together(runs: Sequence[LoggedRun]) -> list[LoggedRun]:
    """Runs that differ in the seed and nothing else as one, with the ranks of all in its table; others as they are."""
    groups: dict[str, list[LoggedRun]] = {}
    for run in runs:
        options = {name: value for name, value in run.config.items() if name not in OWN_OPTIONS}
        key = json.dumps([run.world_size, options], sort_keys=True, default=str) if "seed" in run.config else run.name
        groups.setdefault(key, []).append(run)
    found: list[LoggedRun] = []
    for group in groups.values():
        seeds = {run.config.get("seed") for run in group}
        found += [_together(group)] if len(seeds) == len(group) > 1 else group
    return found


def _together(runs: Sequence[LoggedRun]) -> LoggedRun:
    tables = [run.table.assign(rank=run.table["rank"] + index * run.world_size) for index, run in enumerate(runs)]
    first = runs[0]
    seeds = tuple(int(run.config["seed"]) for run in runs)
    return LoggedRun(f"{first.name}, {len(runs)} seeds", first.folder, pd.concat(tables), first.summary, seeds)


def find_runs(paths: Sequence[Path]) -> tuple[dict[str, Path], list[FileProblem]]:
    """Folders of runs by a short name of their own.

    Args:
        paths: folders of runs, or folders that hold such folders at any depth.

    Returns:
        The runs, and what holds none.
    """
    folders: list[Path] = []
    problems = []
    for path in paths:
        found = sorted({file.parent for name in ("rank_*.csv", SUMMARY) for file in path.rglob(name)})
        if not found:
            text = "got no rank_*.csv in or below it, expected the --out-dir of a run, or a folder of runs; check it"
            problems.append(FileProblem(path, None, text))
        folders += (folder for folder in found if folder not in folders)
    return _short_names(folders), problems


def read_run(folder: Path, *, name: str = "", has_ended: bool = True) -> tuple[LoggedRun | None, list[FileProblem]]:
    """The run in a folder, and what is wrong with its files.

    Left out are rows that are cut off or no numbers, and tables of ranks that belong to another run: their epochs end
    at other steps, or summary.json has other figures of them.

    Args:
        folder: with rank_0000.csv, ...
        name: in legends; empty: of the folder.
        has_ended: whether summary.json must be there, and is looked at.

    Returns:
        None instead of a run where not one row is left.
    """
    summary, problems = read_summary(folder / SUMMARY) if has_ended else ({}, [])
    tables: dict[int, pd.DataFrame] = {}
    whole = set()
    for path in sorted(folder.glob("rank_*.csv")):
        rank, rows, wrong = _read_rank(path)
        problems += wrong
        if rank is not None and len(rows):
            tables[rank] = rows.assign(rank=rank)
            whole |= set() if wrong else {rank}
    if tables and summary:
        problems += _compare_with_summary(folder, tables, summary, whole)
    if tables:
        problems += _drop_strangers(folder, tables)
    if not tables:
        return None, [*problems, FileProblem(folder, None, "got no row of any rank, expected rank_*.csv of a run")]
    table = pd.concat(tables.values(), ignore_index=True)
    return LoggedRun(name or folder.resolve().name, folder, table, summary), problems


def read_runs(paths: Sequence[Path]) -> tuple[list[LoggedRun], list[FileProblem]]:
    """All runs in or below the folders, with what is wrong with them."""
    folders, problems = find_runs(paths)
    runs = []
    for name, folder in folders.items():
        run, wrong = read_run(folder, name=name)
        problems += wrong
        runs += [] if run is None else [run]
    return runs, problems


def read_summary(path: Path) -> tuple[dict[str, Any], list[FileProblem]]:
    """A summary.json, empty if it is none, and what is wrong with it."""
    if not path.is_file():
        text = "got no such file, expected one, as of every run that has ended; drawn without its options and results"
        return {}, [FileProblem(path, None, text)]
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, [FileProblem(path, None, f"got {error.strerror}, expected the summary of a run; left out")]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        return {}, [FileProblem(path, line, f"got no JSON ({error}), expected the summary of a run; left out")]
    if not isinstance(summary, dict):
        return {}, [FileProblem(path, 1, f"got a {type(summary).__name__}, expected the summary of a run; left out")]
    wrong = [f"{key}: {kind.__name__}" for key, kind in SUMMARY_KEYS.items() if not isinstance(summary.get(key), kind)]
    if not wrong and not isinstance(summary["config"].get("recipe"), str):
        wrong.append("config.recipe: str")
    if not wrong and not all(
        isinstance(rank, dict) and _is_number(rank.get("time_seconds")) for rank in summary["ranks"]
    ):
        wrong.append("ranks: list of dict with time_seconds")
    if not wrong and not _is_of_each(summary.get("workers", [0] * len(summary["ranks"])), summary["ranks"]):
        wrong.append("workers: list of int, one for each of ranks")
    if wrong:
        return {}, [FileProblem(path, None, f"got it without {', '.join(wrong)}; left out")]
    return summary, []


def _is_of_each(numbers: object, ranks: Sequence[object]) -> bool:
    is_list = isinstance(numbers, list) and all(isinstance(number, int) for number in numbers)
    return is_list and len(numbers) == len(ranks)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_rank(path: Path) -> tuple[int | None, pd.DataFrame, list[FileProblem]]:
    """Rank, rows and problems of a table."""
    digits = path.stem.removeprefix("rank_")
    # rank_1.csv would take the place of rank_0001.csv.
    if not digits.isdecimal() or path != _path(path.parent, int(digits)):
        text = "got no rank in its name, expected rank_0000.csv; left out"
        return None, pd.DataFrame(), [FileProblem(path, None, text)]
    rows, found = read_numbers(path)
    problems = list(found)
    if rows.columns.empty:
        return None, rows, problems
    missing = [name for name in COLUMNS if name not in rows]
    if lost := [name for name in INDEX if name in missing]:
        text = f"got no column {', '.join(lost)}, expected the table of a rank; the file is left out"
        return None, rows.iloc[:0], [*problems, FileProblem(path, 1, text)]
    if missing:
        problems.append(FileProblem(path, 1, f"got no column {', '.join(missing)}; drawn without"))
    for index in range(len(rows)):
        row = rows.iloc[index]
        if bad := [name for name in INDEX if not math.isfinite(row[name])]:
            text = f"got no {', '.join(bad)}, expected a number; rows from here on are left out"
        elif index and (bad := [name for name in INDEX if row[name] < rows.iloc[index - 1][name]]):
            before = rows.iloc[index - 1]
            text = "; ".join(f"got {name} {row[name]:g} after {before[name]:g}" for name in bad)
            text += ", expected them to grow: two runs in one file? rows from here on are left out"
        else:
            continue
        return int(digits), rows.iloc[:index], [*problems, FileProblem(path, int(row["line"]), text)]
    return int(digits), rows, problems


def _drop_strangers(folder: Path, tables: dict[int, pd.DataFrame]) -> list[FileProblem]:
    """Leave out tables whose epochs end at other steps than those of most ranks; a run's ranks share its steps."""
    steps = pd.concat(tables.values())
    usual = {epoch: rows["step"].mode().iloc[0] for epoch, rows in steps.groupby("epoch")}
    problems = []
    for rank, rows in list(tables.items()):
        others = rows[rows["step"] != rows["epoch"].map(usual)]
        if len(others):
            row = others.iloc[0]
            text = (
                f"got step {row['step']:g} at the end of epoch {row['epoch']:g}, expected the {usual[row['epoch']]:g} "
                "of other ranks: a table of another run? The file is left out"
            )
            problems.append(FileProblem(_path(folder, rank), int(row["line"]), text))
            del tables[rank]
    return problems


def _compare_with_summary(
    folder: Path, tables: dict[int, pd.DataFrame], summary: dict[str, Any], whole: set[int]
) -> list[FileProblem]:
    """Leave out tables that do not end as the summary says, or the summary if that is none.

    Args:
        folder: the folder of the run.
        tables: by rank; those of another run are deleted.
        summary: the summary of the run; cleared if it belongs to another one.
        whole: ranks whose table ends where the run has ended.
    """
    strangers: dict[int, FileProblem] = {}
    numbers = summary.get("workers", range(summary["world_size"]))
    results = dict(zip(numbers, summary["ranks"]))
    for rank, rows in tables.items():
        path, row = _path(folder, rank), rows.iloc[-1]
        if rank not in numbers and "workers" in summary:  # it died, or left, before the end
            continue
        if rank not in numbers:
            text = f"got rank {rank} in a run of {summary['world_size']}, expected a lower one: a file of another run?"
            strangers[rank] = FileProblem(path, None, f"{text} It is left out")
            continue
        if rank not in results:
            continue
        seconds, told = row["time_seconds"], results[rank]["time_seconds"]
        if seconds > told * (1 + 1e-6) or (rank in whole and seconds < told * (1 - 1e-6)):
            text = (
                f"got {seconds:.6g} s of training in the last row, expected the {told:.6g} s of {SUMMARY}: "
                "a table of another run? It is left out"
            )
            strangers[rank] = FileProblem(path, int(row["line"]), text)
    if len(strangers) == len(tables):
        world_size = summary["world_size"]
        summary.clear()
        text = f"got a run of {world_size} ranks that none of the {len(tables)} tables here ends like, expected theirs"
        return [FileProblem(folder / SUMMARY, None, f"{text}: the summary of another run? It is left out")]
    for rank in strangers:
        del tables[rank]
    absent = [rank for rank in numbers if rank not in tables and rank not in strangers]
    problems = list(strangers.values())
    found = set(folder.glob("rank_*.csv"))
    if missing := [path.name for path in (_path(folder, rank) for rank in absent) if path not in found]:
        names = f"{missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}"
        text = f"got no {names}, expected tables of {summary['world_size']} ranks; copy them here from other machines"
        problems.append(FileProblem(folder, None, text))
    return problems


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:04d}.csv"


def _short_names(folders: Sequence[Path]) -> dict[str, Path]:
    """Each folder by as much of the end of its path as it shares with no other, in their order."""
    parts = [folder.resolve().parts for folder in folders]
    names = {}
    for folder, own in zip(folders, parts, strict=True):
        length = 1
        while length < len(own) and sum(other[-length:] == own[-length:] for other in parts) > 1:
            length += 1
        names["/".join(own[-length:])] = folder
    return names

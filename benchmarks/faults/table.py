"""The rows of all cells, in a file that grows by a cell at a time, and the table that is drawn from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from benchmarks.record import matching

from .cell import Key
from .fault import FAULTS

WRAPPERS = {
    "allreduce": "AllReduce",
    "sgp": "SGP",
    "osgp": "SGP, overlap",
    "dpsgd": "D-PSGD",
    "choco": "CHOCO",
    "adpsgd": "AD-PSGD",
    "wagma": "WAGMA",
    "diloco": "DiLoCo",
    "dpwa": "dpwa",
}
SETTING = ("commit", "torch", "seed", "timeout_seconds", "world_size")
COLUMNS = (
    *(
        "timeout_seconds",
        "world_size",
        "wrapper",
        "fault",
        "repeat",
        "victims",
        "rank",
        "role",
        "seconds",
        "call",
        "error_type",
        "error",
    ),
    *("names_the_dead", "names_an_innocent", "named", "exit_code", "hung"),
    *("wait_call", "wait_seconds", "beyond_timeout_seconds", "exit_seconds"),
)
"""Of the CSV beside those of PROVENANCE, a row per rank of a cell.

seconds: from the fault to the rank's error, or to its end where it had none. call: where the error was raised.
names_the_dead: whether its message names a victim; empty where there is no error. named: whom it names. wait_seconds:
of the longest call after the fault, without the time that the rank itself was stopped; beyond_timeout_seconds: how much
longer than the timeout that was. exit_seconds: from the error or the last call to the end of the process. hung: killed
at the limit."""
GRACE = 1.0
"""Seconds that a wait may be longer than the timeout."""
EXIT_GRACE = 5.0
"""Seconds that the interpreter may take to exit, on a busy machine; torch alone takes one."""


def done(rows: pd.DataFrame, setting: Mapping[str, Any]) -> set[Key]:
    """The cells that are complete, of this commit, torch, seed, timeout and world size."""
    sizes = (
        matching(rows, {column: setting[column] for column in SETTING}).groupby(["wrapper", "fault", "repeat"]).size()
    )
    return {Key(w, f, int(r)) for (w, f, r), size in sizes.items() if size >= setting["world_size"]}


def newest(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the setting that was measured last."""
    for column in SETTING:
        if len(rows):
            rows = rows[rows[column] == rows[column].iloc[-1]]
    return rows


def deviations(rows: pd.DataFrame) -> list[str]:
    """What is not as it should be, a sentence per rank."""
    found = []
    for row in rows.to_dict("records"):
        fault, is_survivor = FAULTS[row["fault"]], row["role"] == "survivor"
        has_error, problems = isinstance(row["error_type"], str), []
        if row["hung"]:
            problems.append("had to be killed")
        if row["beyond_timeout_seconds"] > GRACE:
            problems.append(f"waited {row['wait_seconds']:.1f} s in {row['wait_call']}")
        handlers = fault.exit_timeouts * row["timeout_seconds"]
        if row["exit_seconds"] > EXIT_GRACE + handlers and not row["hung"]:
            problems.append(f"took {row['exit_seconds']:.1f} s to exit")
        if fault.is_survived and has_error:
            problems.append(f"{row['error_type']}: {row['error']}")
        if is_survivor and not fault.is_survived and not has_error and not row["hung"]:
            problems.append(f"no error, exit code {row['exit_code']}")
        if has_error and row["names_the_dead"] is False and not fault.is_survived:
            problems.append(f"does not name the victim: {row['error_type']}: {row['error'][:160]}")
        if row["names_an_innocent"] is True and row["names_the_dead"] is not True and not fault.is_survived:
            problems.append(f"names {row['named']}")
        if problems:
            who = f"{WRAPPERS[row['wrapper']]}, {fault.title}, {row['role']} {row['rank']}"
            found.append(f"{who}: {'; '.join(problems)}".replace("|", "/"))
    return found


def markdown(rows: pd.DataFrame) -> str:
    """The newest setting: a row per fault, a column per wrapper, and what deviates."""
    rows = newest(rows)
    if not len(rows):
        return "No cells.\n"
    wrappers = [name for name in WRAPPERS if name in set(rows["wrapper"])]
    faults = [name for name in FAULTS if name in set(rows["fault"])]
    table = pd.DataFrame(
        {
            WRAPPERS[wrapper]: [
                _summary(rows[(rows["wrapper"] == wrapper) & (rows["fault"] == fault)]) for fault in faults
            ]
            for wrapper in wrappers
        },
        index=pd.Index([FAULTS[fault].title for fault in faults], name="fault"),
    )
    survivors = rows[(rows["role"] == "survivor") & ~rows["fault"].map(lambda name: FAULTS[name].is_survived)]
    errors = survivors[survivors["error_type"].notna()]
    lines = [
        table.to_markdown(),
        "",
        LEGEND,
        "",
        f"Of {len(survivors)} survivors {len(errors)} got an error, and {_num_true(errors['names_the_dead'])} errors "
        f"name the victim. {int(rows['hung'].sum())} of {len(rows)} processes had to be killed. The longest wait was "
        f"{rows['wait_seconds'].max():.1f} s.",
        "",
        'Deviations from "no wait beyond timeout + 1 s, every error names the dead rank":',
        "",
        *([f"- {text}" for text in deviations(rows)] or ["- nothing"]),
    ]
    return "\n".join(lines) + "\n"


LEGEND = """\
A cell has the seconds from the fault to the last survivor's error, and how many of the survivors' errors name the
victim. It has the longest wait in one call, if that is longer than the timeout and a second, and the number of
processes that had to be killed. Errors come in the call that needs the victim. A survivor that can train on gets its
error in the next average over all."""


def _summary(cell: pd.DataFrame) -> str:
    if not len(cell):
        return ""
    fault = FAULTS[cell["fault"].iloc[0]]
    survivors = cell[cell["role"] == "survivor"]
    errors = survivors[survivors["error_type"].notna()]
    if fault.is_survived:
        num_errors = int(cell["error_type"].notna().sum())
        parts = ["no error" if num_errors == 0 else f"{num_errors} errors"]
    elif len(errors):
        parts = [f"{errors['seconds'].max():.1f} s", f"{_num_true(errors['names_the_dead'])} of {len(survivors)}"]
    else:
        parts = ["no error"]
    if cell["beyond_timeout_seconds"].max() > GRACE:
        parts.append(f"waited {cell['wait_seconds'].max():.1f} s")
    if cell["hung"].any():
        parts.append(f"{int(cell['hung'].sum())} killed")
    return ", ".join(parts)


def _num_true(column: pd.Series) -> int:
    return int((column == True).sum())  # noqa: E712 (an object column: bools and missing values)

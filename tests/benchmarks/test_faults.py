"""The table of faults: who is named, what is measured, and two cells of real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import pytest

from benchmarks import record
from benchmarks.faults import methods
from benchmarks.faults.__main__ import Faults
from benchmarks.faults.accused import accused
from benchmarks.faults.cell import Call, Key, blame, calls_of, longest
from benchmarks.faults.fault import FAULTS
from benchmarks.faults.table import COLUMNS, WRAPPERS, deviations, done, markdown
from benchmarks.record import append_rows, rows_in

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 5.0
"""Of the cells below: a killed rank is noticed long before, and a stop of half of it is none."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank 0: round 3: receive from rank 2 failed after 0.1 s (timeout 10 s): closed", {2}),
        ("rank 0: global average among ranks [0, 1, 2, 3] failed, connections to ranks [2] are closed", {2}),
        ("rank 0: the average among ranks [1, 2, 3] failed after 10.0 s", set()),
        ("rank 0: ranks [1, 3] did not call averaged()", {1, 3}),
        ("rank 0: ranks 1 to 3 did not call averaged()", {1, 2, 3}),
        ("rank 0: ranks 1 and 2 have died", {1, 2}),
        ("rank 0: the group average of ranks (0, 2) in round 3; rank 2 has died", {2}),
        ("rank 0: telling ranks 0 to 3 of another batch failed", set()),
        ("[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 10000 ms", {1, 2}),
        ("worker 'w0': a fetch from 'w3' did not end within 5 s", {3}),
        ("Connection closed by peer [127.0.0.1]:25253", set()),
    ],
)
def test_ranks_named_by_an_error(text: str, expected: set[int]) -> None:
    assert accused(text, rank=0) == expected


def test_blame() -> None:
    def columns(fault: str, rank: int, text: str) -> dict[str, Any]:
        return blame(text, rank=rank, fault=FAULTS[fault], world_size=4)

    relayed = "rank 0: receive from rank 3 failed: rank 2 has died"
    assert columns("kill-even", 0, relayed) == {"named": "2 3", "names_the_dead": True, "names_an_innocent": True}
    innocent = "rank 0: receive from rank 3 failed"
    assert columns("kill-even", 0, innocent) == {"named": "3", "names_the_dead": False, "names_an_innocent": True}
    assert columns("kill-even", 0, "") == {"named": ""}
    assert columns("stop-long", 2, "rank 2: receive from rank 3 failed") == {"named": "3"}
    alone = "rank 1: ranks [0, 2, 3] did not call averaged()"
    assert columns("averaged-alone", 1, alone)["names_the_dead"]
    assert columns("store-frozen", 1, "rank 1: the key-value store did not answer")["names_the_dead"]
    assert not columns("store-frozen", 1, "rank 1: receive from rank 0 failed")["names_the_dead"]


def test_the_longest_call() -> None:
    events = [
        {"event": "enter", "call": "training step", "time": 1.0},
        {"event": "leave", "time": 4.0},
        {"event": "enter", "call": "averaged", "time": 5.0},
        {"event": "error", "time": 7.0},
        {"event": "enter", "call": "close", "time": 8.0},
    ]
    calls = calls_of(events, 9.0)
    assert calls == [Call("training step", 1.0, 4.0), Call("averaged", 5.0, 7.0), Call("close", 8.0, 9.0)]
    assert longest(calls, since=0.0, stopped=None) == ("training step", 3.0)
    assert longest(calls, since=3.0, stopped=None) == ("averaged", 2.0)
    assert longest(calls, since=3.0, stopped=(3.0, 6.5)) == ("close", 1.0)
    assert longest([], since=0.0, stopped=None) == ("", 0.0)


SETTING = {"commit": "abc+", "torch": "2.14.1", "seed": 0, "timeout_seconds": 10.0, "world_size": 4}
MEASURED = {**SETTING, "date": "today", "machine": "a machine", "cores": 2, "command": "make faults"}


def row(rank: int, **values: Any) -> dict[str, Any]:
    """Of a cell in which everything is as it should be."""
    return {
        **MEASURED,
        "repeat": 0,
        "wrapper": "sgp",
        "fault": "kill-even",
        "victims": "2",
        "rank": rank,
        "role": "survivor",
        "seconds": 0.1,
        "call": "training step",
        "error_type": "ConnectionError",
        "error": "rank 2 has died",
        "named": "2",
        "names_the_dead": True,
        "names_an_innocent": False,
        "exit_code": 1,
        "hung": False,
        "wait_call": "training step",
        "wait_seconds": 0.1,
        "beyond_timeout_seconds": 0.0,
        "exit_seconds": 0.5,
        **values,
    }


VICTIM = {
    "role": "victim",
    "exit_code": -9,
    "names_the_dead": None,
    "names_an_innocent": None,
    "named": "",
    **dict.fromkeys(("call", "error_type", "error")),
}


def cell(of_rank_0: Mapping[str, Any] = MappingProxyType({}), **values: Any) -> list[dict[str, Any]]:
    """All ranks of a cell."""
    return [row(0, **{**values, **of_rank_0}), row(1, **values), row(2, **{**values, **VICTIM}), row(3, **values)]


def frame_of(path: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """Through the file."""
    for own in rows:
        measured = {name: own[name] for name in MEASURED if name not in ("timeout_seconds", "world_size")}
        monkeypatch.setattr(record, "provenance", lambda seed, measured=measured: measured)
        append_rows(path, [{name: own[name] for name in COLUMNS}], seed=0)
    return rows_in(path, COLUMNS)


def test_a_table_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results" / "faults.csv"
    monkeypatch.setattr(record, "PROVENANCE", tuple(name for name in MEASURED if name not in COLUMNS))
    frame_of(path, cell(), monkeypatch)
    rows = frame_of(path, cell(fault="kill-odd")[:3], monkeypatch)  # a cell that was cut off
    with path.open("a") as file:
        file.write("today,ab")  # within a line
    assert done(rows, SETTING) == {Key("sgp", "kill-even", 0)}
    assert done(rows, {**SETTING, "commit": "def"}) == set()
    assert done(rows, {**SETTING, "timeout_seconds": 2.0}) == set()
    assert len(frame_of(path, cell(fault="kill-0"), monkeypatch)) == 4 + 3 + 4


def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other.csv with missing columns .*unknown columns .*choose another file"):
        rows_in(path, COLUMNS)


def test_nothing_deviates() -> None:
    rows = pd.DataFrame(cell())
    assert deviations(rows) == []
    text = markdown(rows)
    assert re.search(r"kill -9 of rank 2 +\| 0.1 s, 3 of 3", text)
    assert "Of 3 survivors 3 got an error, and 3 errors name the victim." in text
    assert text.endswith("- nothing\n")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hung": True, "error_type": None}, "had to be killed"),
        ({"beyond_timeout_seconds": 9.0, "wait_seconds": 19.0, "wait_call": "settle"}, r"waited 19.0 s in settle"),
        ({"error_type": None, "error": None, "names_the_dead": None, "exit_code": 0}, "no error, exit code 0"),
        (
            {"names_the_dead": False, "named": "3", "error": "rank 3 is late"},
            "does not name the victim: .* rank 3 is late",
        ),
        ({"exit_seconds": 20.0}, "took 20.0 s to exit"),
        ({"fault": "stop-short"}, "ConnectionError: rank 2 has died"),
    ],
)
def test_deviations(values: dict[str, Any], expected: str) -> None:
    found = deviations(pd.DataFrame(cell(values)))
    assert len(found) == 1
    assert re.search(rf"^SGP, .*, survivor 0: .*{expected}", found[0]), found


def test_the_table_shows_the_newest_commit_only() -> None:
    rows = pd.DataFrame([*cell(commit="old", seconds=77.0), *cell(fault="kill-0")])
    assert "kill -9 of rank 2" not in markdown(rows)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got wrappers \['nope'\], expected some of \['allreduce'"):
        Faults(wrappers=("nope",))
    with pytest.raises(ValueError, match=r"got faults \['nope'\]"):
        Faults(faults=("nope",))
    with pytest.raises(ValueError, match=r"got world_size=3, expected an even number of 4 or more"):
        Faults(world_size=3)


def test_all_wrappers_can_be_made() -> None:
    assert list(methods._MAKERS) == list(WRAPPERS)


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.faults", *options]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(300)  # two imports of torch, on a machine that may be busy
def test_two_cells(tmp_path: Path) -> None:
    """A kill and a short stop of SGP; a second call finds nothing left to do."""
    path = tmp_path / "faults.csv"
    options = [
        "--wrappers",
        "sgp",
        "--faults",
        "kill-even",
        "stop-short",
        "--timeout",
        f"{TIMEOUT}",
        "--output",
        str(path),
    ]
    first = subprocess.run(command(*options), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    rows = rows_in(path, COLUMNS)
    killed, stopped = (rows[rows["fault"] == fault].set_index("rank") for fault in ("kill-even", "stop-short"))
    assert list(killed["role"]) == ["survivor", "survivor", "victim", "survivor"]
    assert killed["exit_code"][2] == -9
    survivors = killed[killed["role"] == "survivor"]
    assert (survivors["exit_code"] == 1).all()
    assert survivors["error"].str.contains(r"^rank \d: .*rank \d", regex=True).all()
    assert survivors["names_the_dead"].any()  # those whose round was with the victim
    assert (survivors["seconds"] < 3 * TIMEOUT).all()
    assert stopped["error"].isna().all(), list(stopped["error"])
    assert (stopped["exit_code"] == 0).all()
    assert not rows["hung"].any()
    assert (stopped.drop(2)["wait_seconds"] > 0.3 * TIMEOUT).any(), "who waits for a stopped rank waits"
    assert stopped["wait_seconds"][2] < 0.8 * TIMEOUT, "the time of being stopped is no wait"
    assert "SIGSTOP for half the timeout" in path.with_suffix(".md").read_text()
    before = path.read_text()
    second = subprocess.run(command(*options), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert path.read_text() == before
    assert "kill -9 of rank 2" in second.stdout


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(300)  # an import of torch, on a machine that may be busy
def test_no_process_outlives_the_command(tmp_path: Path) -> None:
    """Not even a stopped one, when the command is killed."""
    options = [
        "--wrappers",
        "sgp",
        "--faults",
        "stop-long",
        "--timeout",
        "60",
        "--output",
        str(tmp_path / "faults.csv"),
    ]
    parent = subprocess.Popen(command(*options, "--logs", str(tmp_path)), cwd=ROOT, env=ENVIRONMENT)
    try:
        events = tmp_path / "sgp-stop-long-0" / "events"
        while not events.exists() or '"due"' not in events.read_text():
            time.sleep(0.05)
        time.sleep(0.5)  # until rank 2 is stopped
        started = _descendants(parent.pid)
        assert len(started) == 1 + 1 + 4
        parent.kill()
        parent.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in started):
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()


def _descendants(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(each for child in children for each in _descendants(child))]

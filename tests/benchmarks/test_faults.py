"""The table of faults: who is named, what is measured, and two cells of real processes."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import pytest

from benchmarks.faults import methods
from benchmarks.faults.__main__ import Faults
from benchmarks.faults.accused import accused
from benchmarks.faults.cell import Call, Key, blame, calls_of, longest
from benchmarks.faults.fault import FAULTS
from benchmarks.faults.table import COLUMNS, WRAPPERS, FaultTable, deviations, markdown

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
def test_whom_an_error_names(text: str, expected: set[int]) -> None:
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


def row(rank: int, **values: Any) -> dict[str, Any]:
    """Of a cell in which everything is as it should be."""
    return {
        **SETTING,
        "date": "today",
        "machine": "a machine",
        "cores": 2,
        "command": "make faults",
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


def test_a_table_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "results" / "faults.csv"
    FaultTable(path).append(cell())
    FaultTable(path).append(cell(fault="kill-odd")[:3])  # a cell that was cut off
    with path.open("a") as file:
        file.write("today,ab")  # within a line
    table = FaultTable(path)
    assert table.done(SETTING) == {Key("sgp", "kill-even", 0)}
    assert table.done({**SETTING, "commit": "def"}) == set()
    assert table.done({**SETTING, "timeout_seconds": 2.0}) == set()
    table.append(cell(fault="kill-0"))
    assert len(FaultTable(path).frame()) == 4 + 3 + 4
    assert tuple(table.frame().columns) == COLUMNS


def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other.csv with columns \('a', 'b'\), expected .*name another file"):
        FaultTable(path)


def frame_of(tmp_path: Path, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Through the file."""
    table = FaultTable(tmp_path / "faults.csv")
    table.append(rows)
    return table.frame()


def test_nothing_deviates(tmp_path: Path) -> None:
    rows = frame_of(tmp_path, cell())
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
        ({"names_the_dead": False, "named": "3", "error": "rank 3 is late"}, "names nobody .* rank 3 is late"),
        ({"exit_seconds": 20.0}, "took 20.0 s to exit"),
        ({"fault": "stop-short"}, "ConnectionError: rank 2 has died"),
    ],
)
def test_what_deviates(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    found = deviations(frame_of(tmp_path, cell(values)))
    assert len(found) == 1
    assert re.search(rf"^SGP, .*, survivor 0: .*{expected}", found[0]), found


def test_the_table_shows_the_newest_commit_only(tmp_path: Path) -> None:
    rows = frame_of(tmp_path, [*cell(commit="old", seconds=77.0), *cell(fault="kill-0")])
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


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(300)  # two imports of torch, on a machine that may be busy
def test_two_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kill and a short stop of SGP; a second call finds nothing left to do."""
    path = tmp_path / "faults.csv"
    options = Faults(wrappers=("sgp",), faults=("kill-even", "stop-short"), timeout=TIMEOUT, output=path)
    options.main()
    rows = FaultTable(path).frame()
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
    capsys.readouterr()
    before = path.read_text()
    options.main()
    assert path.read_text() == before
    assert "kill -9 of rank 2" in capsys.readouterr().out


PARENT = """
import os, signal, sys, time
from pathlib import Path
from benchmarks.faults.fork_server import ForkServer
folder = Path(sys.argv[1])
server = ForkServer()
server.start("world/store", {"role": "store", "port_file": str(folder / "port")}, folder / "log")
while not (folder / "port").exists():
    time.sleep(0.01)
server.signal("world/store", signal.SIGSTOP)
print((folder / "port").read_text(), flush=True)
sys.stdin.read()
"""


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(300)  # two imports of torch, on a machine that may be busy
def test_no_process_outlives_the_command(tmp_path: Path) -> None:
    """Not even a stopped one, when the command is killed."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    try:
        port = int(parent.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=30.0) as connection:
            parent.kill()
            with contextlib.suppress(ConnectionResetError):  # or an end of file, when the process is gone
                assert connection.recv(1) == b""
    finally:
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()

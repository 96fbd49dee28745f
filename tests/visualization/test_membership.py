"""Who came and went in an elastic run: read from the files of its workers, drawn, and told in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.harness.finished_runs import write_run
from visualization.logs.membership import LoggedMembership, read_membership
from visualization.logs.runs import read_run
from visualization.panels.membership import draw_membership
from visualization.report import Report, main
from visualization.style import styled

START = 1_700_000_000.0


def generation(
    seconds: float, number: int, members: list[int], *, joined: tuple[int, ...] = (), left: dict[str, str] | None = None
) -> dict[str, Any]:
    own = {"generation": number, "step": 10 * number, "batch": 30 * number, "members": members}
    return {"event": "generation", "unix_seconds": START + seconds, **own, "joined": joined, "left": left or {}}


def steps(seconds: float, *, slowest: float = 0.02, live: int = 3) -> dict[str, Any]:
    own = {"num_steps": 50, "median_seconds": 0.01, "slowest_seconds": slowest, "live": live, "deadline_seconds": 1.5}
    return {"event": "steps", "unix_seconds": START + seconds, "span_seconds": 1.0, **own}


FIRST = generation(0.0, 1, [0, 1, 2], joined=(0, 1, 2))
LOST = generation(10.2, 2, [0, 2], left={"1": "its connection closed"})
GROWN = generation(20.0, 3, [0, 2, 3], joined=(3,))


def write(folder: Path) -> Path:
    """Worker 1 dies after 10 seconds, and worker 3 comes after 20.

    Worker 2 is the first to begin without worker 1, and worker 3 the first to begin with itself; to it all are new.
    """
    calm = [float(second) for second in range(1, 26)]
    lines = {
        0: [FIRST, LOST, GROWN, *(steps(second, slowest=0.5 if second == 10 else 0.02) for second in calm)],
        1: [{**FIRST, "unix_seconds": START + 0.2}, *(steps(second) for second in calm[:9])],
        2: [{**FIRST, "unix_seconds": START + 0.1}, {**LOST, "unix_seconds": START + 10.0}, *map(steps, calm[:20])],
        3: [{**GROWN, "unix_seconds": START + 19.9, "joined": (0, 2, 3)}, *map(steps, calm[20:])],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for number, own in lines.items():
        text = "".join(json.dumps(line) + "\n" for line in own)
        (folder / f"membership_{number:04d}.jsonl").write_text(text, encoding="utf-8")
    return folder


def logged(folder: Path) -> LoggedMembership:
    membership, problems = read_membership(write(folder))
    assert problems == []
    assert membership is not None
    return membership


def test_each_generation_is_there_once_as_its_first_worker_began_it(tmp_path: Path) -> None:
    membership = logged(tmp_path)
    assert [one.number for one in membership.generations] == [1, 2, 3]
    assert [one.seconds for one in membership.generations] == pytest.approx([0.0, 10.0, 19.9])
    first, lost, grown = membership.generations
    assert first.members == (0, 1, 2)
    assert (lost.members, lost.left) == ((0, 2), {1: "its connection closed"})
    assert (grown.members, grown.joined) == ((0, 2, 3), (3,))
    assert len(membership.steps) == 25 + 9 + 20 + 5
    assert membership.steps["seconds"].is_monotonic_increasing


def test_a_worker_that_joins_before_the_others_have_begun_changes_no_order(
    tmp_path: Path,
) -> None:
    write(tmp_path)
    early = {**GROWN, "unix_seconds": START + 9.0, "joined": (0, 2, 3)}
    (tmp_path / "membership_0003.jsonl").write_text(json.dumps(early) + "\n", encoding="utf-8")
    membership, problems = read_membership(tmp_path)
    assert problems == []
    assert membership is not None
    assert [one.number for one in membership.generations] == [1, 2, 3]
    assert [one.seconds for one in membership.generations] == pytest.approx([0.0, 10.0, 10.0])


def test_the_steps_around_a_moment_are_those_of_all_workers(tmp_path: Path) -> None:
    membership = logged(tmp_path)
    around = membership.around(10.0)  # spans of which a part lies between 7 and 13
    assert sorted(around["seconds"].unique()) == [7, 8, 9, 10, 11, 12, 13, 14]
    assert around["slowest_seconds"].max() == 0.5
    assert set(around[around["seconds"] < 10]["worker"]) == {"0000", "0001", "0002"}
    assert membership.around(20.0)["slowest_seconds"].max() == 0.02


def test_a_run_that_is_not_elastic_has_none(tmp_path: Path) -> None:
    assert read_membership(write_run(tmp_path / "run")) == (None, [])


@pytest.mark.parametrize(
    "line", ["{", "3", "[]", '{"a": 1}', '{"event": "generation"}', '{"event": "steps", "unix_seconds": "x"}']
)
def test_a_line_that_is_no_event_is_named_and_the_rest_is_kept(tmp_path: Path, line: str) -> None:
    path = write(tmp_path) / "membership_0002.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines[:2], line + "\n", *lines[2:]]), encoding="utf-8")
    membership, problems = read_membership(tmp_path)
    assert [(problem.path, problem.line) for problem in problems] == [(path, 3)]
    assert "got no event of an elastic run" in problems[0].text
    assert membership is not None
    assert len(membership.steps) == 25 + 9 + 20 + 5


def test_members_and_slowest_steps_are_drawn(tmp_path: Path) -> None:
    with styled():
        figure = draw_membership(logged(tmp_path))
    above, below = figure.axes
    members, joined, left = above.get_lines()
    assert np.asarray(members.get_xydata()).tolist() == [[0, 3], [10, 2], [pytest.approx(19.9), 3], [25, 3]]
    assert np.asarray(joined.get_xydata()).tolist() == [[pytest.approx(19.9), 3]]
    assert np.asarray(left.get_xydata()).tolist() == [[10, 2]]
    drawn = {str(line.get_label()): line for line in below.get_lines()}
    slowest = pd.Series(*reversed([np.asarray(x) for x in drawn["slowest step"].get_data()]))
    assert slowest[10] == 500
    assert slowest.drop(10).eq(20).all()
    assert set(np.asarray(drawn["deadline for a silent worker"].get_ydata())) == {1500}


def test_the_report_names_workers_and_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visualization.report._image", lambda figure, description: f"<img alt='{description}'>")
    folder = write(write_run(tmp_path / "run", num_ranks=3))
    (folder / "rank_0001.csv").rename(folder / "rank_0003.csv")  # who died has left no table
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    summary["ranks"] = [summary["ranks"][index] for index in (0, 2, 1)]
    path.write_text(json.dumps(summary | {"workers": [0, 2, 3]}), encoding="utf-8")
    assert main(Report(folder)) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "Workers over time" in text
    for row in (
        ["workers 0, 1, 2 began", "0.0", "1", "3", "1.50", "10.0", "20.0"],
        ["worker 1 left: its connection closed", "10.0", "2", "2", "1.50", "10.0", "500.0"],
        ["worker 3 joined", "19.9", "3", "3", "1.50", "10.0", "20.0"],
    ):
        assert "".join(f"<td>{cell}</td>" for cell in row) in text
    assert "<td>3</td><td>100.00</td>" in text, "results are of workers, by their numbers"


def test_tables_of_workers_that_have_died_stay(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_ranks=3)
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    del summary["ranks"][1]
    path.write_text(json.dumps(summary | {"workers": [0, 2], "world_size": 2}), encoding="utf-8")
    run, problems = read_run(folder)
    assert problems == []
    assert run is not None
    assert run.numbers == [0, 2]
    assert sorted(run.table["rank"].unique()) == [0, 1, 2]
    path.write_text(json.dumps(summary | {"workers": [0]}), encoding="utf-8")
    run, problems = read_run(folder)
    assert run is not None
    assert run.summary == {}
    assert "workers: list of int, one for each of ranks" in problems[0].text

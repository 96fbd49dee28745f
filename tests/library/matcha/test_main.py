"""The command that prints a plan."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gossip_modules import matcha
from gossip_modules.matcha.__main__ import geometric, main, read_links
from tests.harness.scripts import module_output


def table(text: str, first_column: str) -> list[list[str]]:
    """The rows under the header that starts with `first_column`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == [first_column])
    rows = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        rows.append(line.split())
    return rows


def test_a_predefined_graph(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--graph", "0", "--budget", "0.5"])
    text = capsys.readouterr().out
    assert "base graph 0: 8 ranks, 12 links, max degree 5, 5 matchings" in text
    assert "0.5 of the full schedule = 2.5 matchings per round" in text
    rows = table(text, "matching")
    assert [float(row[2]) for row in rows] == pytest.approx([0.984, 0, 0.758, 0.758, 0], abs=2e-3)
    assert rows[0][4:] == ["0-4", "1-5", "2-3", "6-7"]
    methods = {" ".join(row[:-3]): [float(cell) for cell in row[-3:]] for row in table(text, "method")}
    assert methods["D-PSGD"] == pytest.approx([5, 0.2857, 0.6538], abs=2e-3)
    assert methods["MATCHA"] == pytest.approx([2.5, 0.3964, 0.6440], abs=2e-3)
    assert methods["MATCHA, p and alpha jointly"][2] == pytest.approx(0.633, abs=2e-3)
    assert methods["periodic D-PSGD"][2] == pytest.approx(0.8269, abs=2e-3)
    assert methods["equal p"][2] == pytest.approx(0.7906, abs=2e-3)


def test_links_from_a_file_with_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "links.txt", tmp_path / "plan.json"
    path.write_text("# a square\n0 1 0.01\n1 2 .01\n\n3 2 0.1 # slow\n0 3 0.1\n", encoding="utf-8")
    main(["--edges", str(path), "--budget-seconds", "0.05", "--output", str(output), "--num-budgets", "2"])
    text = capsys.readouterr().out
    assert "= 0.05 seconds per round" in text
    assert str(output) in text
    plan = json.loads(output.read_text(encoding="utf-8"))
    assert sum(p * c for p, c in zip(plan["probabilities"], plan["costs"], strict=True)) == pytest.approx(
        0.05, rel=1e-4
    )
    assert plan["budgets"] == [0.5, 1.0]
    assert all(rhos[1] == pytest.approx(plan["dpsgd"]["rho"], abs=1e-6) for rhos in plan["rhos"].values())


def test_links_from_a_file_without_seconds(tmp_path: Path) -> None:
    path = tmp_path / "links.txt"
    path.write_text("0 1\n2 1\n", encoding="utf-8")
    assert read_links(path) == ("links.txt", (((0, 1),), ((1, 2),)), None, None)


def test_a_geometric_graph_and_long_matchings(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--nodes", "70", "--radius", "0.25", "--seed", "1", "--budget", "0.2"])
    text = capsys.readouterr().out
    assert "... (3" in text
    assert "jointly" not in text  # takes too long for so many
    base = geometric(16, 0.4, seed=1)
    assert base.positions is not None
    assert len(base.positions) == 16
    assert base == geometric(16, 0.4, seed=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n1 0\n", "links.txt:2: got '1 0', expected a new link"),
        ("0 1 2 3\n", "links.txt:1: got '0 1 2 3'"),
        ("0\n", "links.txt:1: got '0'"),
        ("# none yet\n", "links.txt: got no links, expected a line"),
        ("a b\n", "links.txt:1: got 'a b'"),
        ("0 1 1.0\n1 2\n", r"got no seconds for \['1 2'\], expected them for all links or for none"),
        ("0 1\n2 3\n", "in 2 pieces"),
        ("0 0\n", "self-loops"),
        ("0 1 -1\n", "expected finite seconds above 0"),
    ],
)
def test_files_that_are_no_links(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "links.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_links(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--graph", "6", "--budget", "0.5"], "got graph 6, expected 0 to 5"),
        (["--graph", "0", "--budget", "1.5"], "got budget=1.5, expected above 0 and at most 1"),
        (["--graph", "0", "--budget-seconds", "1"], "got budget_seconds=1.0 without costs"),
        (["--graph", "0"], "one of the arguments --budget --budget-seconds is required"),
        (["--nodes", "16", "--radius", "0.01", "--budget", "0.5"], "in 16 pieces"),
        (["--edges", "/nonexistent", "--budget", "0.5"], "No such file"),
        (["--edges", os.devnull, "--budget", "0.5"], "got no links"),
        (["--nodes", "1", "--budget", "0.5"], "got 1 nodes and radius 0.4, expected 2 nodes or more"),
        (["--nodes", "-3", "--budget", "0.5"], "got -3 nodes and radius 0.4, expected 2 nodes or more"),
        (["--nodes", "4", "--radius", "-1", "--budget", "0.5"], "expected 2 nodes or more and a radius above 0"),
        (["--graph", "0", "--seed", "0", "--budget", "0.5"], "got --radius or --seed without --nodes"),
        (["--edges", os.devnull, "--radius", "0.4", "--budget", "0.5"], "got --radius or --seed without --nodes"),
        (["--graph", "0", "--budget", "0.5", "--num-budgets", "-1"], "got --num-budgets -1, expected 0 or more"),
        (["--graph", "0", "--budget", "0.5", "--output", "/nonexistent/a"], "expected a file in a folder that exists"),
        (["--graph", "0", "--budget", "0.5", "--output", "/"], "got --output /, expected a file in a folder"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    streams = capsys.readouterr()
    assert message in streams.err.splitlines()[-1]
    assert streams.out == ""


def test_every_name_of_the_mathematics_is_there() -> None:
    assert all(hasattr(matcha, name) for name in matcha.__all__)


@pytest.mark.e2e
def test_the_command_runs_without_a_warning() -> None:
    assert "MATCHA" in module_output("gossip_modules.matcha", "--graph", "5", "--budget", "0.5")

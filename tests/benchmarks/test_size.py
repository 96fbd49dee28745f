"""The command that counts statements, and moves between files."""

from __future__ import annotations

import doctest
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import size
from benchmarks.size import METHODS, SizeOptions, main, moves, statements, table


def test_statements_are_counted_without_docstrings_and_comments(tmp_path: Path) -> None:
    package = tmp_path / "dpwa"
    package.mkdir()
    (tmp_path / "a.py").write_text('"""A."""\n\nx = 1  # one\n', encoding="utf-8")
    (package / "b.py").write_text('def f():\n    """F."""\n    return (1,\n        2)\n', encoding="utf-8")
    count = statements(tmp_path)
    assert count == {"top level": 1, "dpwa": 2}
    assert [line.split() for line in table(count).split("\n") if line] == [
        ["1", "top", "level"],
        ["1", "core"],
        ["2", "dpwa"],
        ["2", "extras"],
        ["3", "together"],
    ]
    assert doctest.testmod(size).failed == 0


def test_the_command_prints_a_line_for_each_package(capsys: pytest.CaptureFixture[str]) -> None:
    main(SizeOptions())
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line]
    found = Counter({name: int(number.replace(",", "")) for number, name in lines})
    assert {"wrappers", "rounds", "dpwa", "lab"} <= found.keys()
    assert found["core"] + found["extras"] == found["together"]


def test_moves_are_counted_in_one_step() -> None:
    num_calls, num_moves = moves(METHODS["SGP"])
    assert 0 < num_moves < num_calls


def test_the_page_has_the_command_and_no_count() -> None:
    root = Path(size.__file__).parents[1]
    page = (root / "docs" / "decisions" / "tools.md").read_text(encoding="utf-8")
    assert "python -m benchmarks.size --moves" in page
    assert re.findall(r"At commit", page) == []

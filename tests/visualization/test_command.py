"""Commands of visualization/ on files that are not there, or are something else: one line, and exit code 2."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from visualization.command import command


@pytest.mark.parametrize(
    ("name", "num_files"),
    [
        *[("cluster", 1), ("consensus", 1), ("curves", 1), ("matcha", 1), ("plot", 1), ("report", 1)],
    ],
)
@pytest.mark.parametrize("content", [None, "", "something,else\n1,2\n"])
def test_a_file_that_is_not_there_or_another_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    num_files: int,
    content: str | None,
) -> None:
    paths = [tmp_path / f"file_{index}" for index in range(num_files)]
    if content is not None:
        for path in paths:
            path.write_text(content)
    monkeypatch.setattr(sys, "argv", [name, *map(str, paths)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, f"visualization.{name}", raising=False)
    with pytest.raises(SystemExit) as end:
        # In the place of __main__, where its annotations are looked up.
        runpy.run_module(f"visualization.{name}", run_name="__main__", alter_sys=True)
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(re.match(r"error: .*got .*expected|error: got ", line) for line in lines), lines
    assert any(str(tmp_path / "file_0") in line for line in lines)


def test_help_shows_the_docstring_as_it_is_and_how_the_script_was_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["visualization/report.py", "--help"])
    monkeypatch.delitem(sys.modules, "visualization.report", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("visualization.report", run_name="__main__", alter_sys=True)
    assert not end.value.code
    text = capsys.readouterr().out
    assert text.startswith("The report of one run as a single HTML file: results, curves,")
    assert "\n    python -m visualization.report runs/digits_sgp          # writes report.html there\n" in text
    assert "usage: python -m visualization.report [-h]" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_script_that_was_started_by_its_path_is_named_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train/compare.py", "--help"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert command() == "python train/compare.py"


@pytest.mark.parametrize("arguments", [["--help"], ["--kind", "none"]])
def test_a_closed_output_ends_the_command_without_a_traceback(arguments: list[str]) -> None:
    """As in `python -m visualization.spectra --help | head`, if nothing reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    program = """
from dataclasses import make_dataclass
from visualization.command import closed_output_ends, read_arguments

with closed_output_ends():
    print(read_arguments(make_dataclass("Options", [("kind", str, "all")]), description="Options"))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + 13, "")

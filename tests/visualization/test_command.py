"""Commands of visualization/ on files that are not there, or are something else: one line, and exit code 2."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "num_files"),
    [
        *[("accuracy_bytes", 1), ("cluster", 1), ("consensus", 1), ("curves", 1), ("matcha", 1), ("plot", 1)],
        *[("report", 1), ("stragglers", 2)],
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

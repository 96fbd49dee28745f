"""The pages of benchmarks are what the CSV files beside them say, and every CSV file has a page."""

from __future__ import annotations

import csv
import functools
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import pages
from benchmarks.record import PROVENANCE, RESULTS, ROOT, write_rows


def test_pages_are_up_to_date() -> None:
    assert pages.stale() == []


def test_every_file_of_results_has_a_page_and_says_how_it_was_measured() -> None:
    read = {csv for page in pages.PAGES.values() for csv in (page.csv, *page.also)}
    assert {path.name for path in RESULTS.glob("*.csv")} == read
    for path in RESULTS.glob("*.csv"):
        rows = pd.read_csv(path)
        assert {"command", "commit", "machine", "date", "seed"} <= set(rows), path
        assert rows[["command", "commit", "machine", "date", "seed"]].notna().all(axis=None), path


def test_rows_say_when_of_which_code_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "benchmarks/x.py", "--name", "a b"])
    write_rows(tmp_path / "new" / "x.csv", [{"ms": 1.5}, {"ms": 2.5}], seed=7)
    with (tmp_path / "new" / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*PROVENANCE, "ms"]
    assert [(row["ms"], row["seed"], row["command"]) for row in rows] == [
        (value, "7", "python benchmarks/x.py --name 'a b'") for value in ("1.5", "2.5")
    ]
    assert all(rows[0].values())


def test_tables_keep_empty_cells_and_format_numbers() -> None:
    rows = pd.DataFrame({"name": ["a", "b"], "count": [1000.0, None], "ms": [0.25, 3.0]})
    columns = {"name": ("name", "s"), "count": ("count", ",d"), "ms": ("time, ms", ".1f")}
    assert pages.table(rows, columns).splitlines() == [
        *("| name | count | time, ms |", "|---|---:|---:|", "| a | 1,000 | 0.2 |", "| b |  | 3.0 |")
    ]


def test_a_page_that_was_edited_by_hand_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "texts", functools.cache(pages.texts))  # which take seconds
    monkeypatch.setattr(sys, "argv", ["pages"])
    assert pages.main() == 0
    monkeypatch.setattr(sys, "argv", ["pages", "--check"])
    assert pages.main() == 0
    edited, stray = tmp_path / "docs" / "restart.md", tmp_path / "docs" / "stray.md"
    edited.write_text(edited.read_text() + "A claim.\n")
    stray.write_text("No data.\n")
    capsys.readouterr()
    assert pages.main() == 1
    said = capsys.readouterr().out
    assert f"error: got {edited} out of date" in said
    assert f"error: got {stray} out of date" in said


def test_commits_of_rows_are_in_the_history_or_the_page_says_that_they_are_not() -> None:
    named = {commit.rstrip("+") for path in RESULTS.glob("*.csv") for commit in pd.read_csv(path, dtype=str)["commit"]}
    is_complete = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(is_complete, cwd=ROOT, capture_output=True, text=True).stdout != "false\n":
        pytest.skip("the history of this repository is not here")
    for commit in named:
        merged = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True)
        assert (merged.returncode == 0) != (commit in pages.NOT_IN_HISTORY), commit


def test_the_page_of_a_finished_study_names_a_script_that_its_commit_has() -> None:
    for own in pages.PAGES.values():
        if own.script:
            assert not (ROOT / own.script.partition(":")[2]).exists(), own.script
    assert "`git show bb6c722:benchmarks/outer_steps.py`" in pages.page("outer_steps")
    assert "does not have 7ec9a98290: rows" in pages.page("elastic")
    assert "Paths that begin with / are those of the machine" in pages.page("elastic_cost")

"""The pages of benchmarks are what the CSV files beside them say, and every CSV file has a page."""

from __future__ import annotations

import csv
import os
import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import pages
from benchmarks.claims.registry import filled
from benchmarks.pages.base import QUESTIONS
from benchmarks.record import PROVENANCE, RESULTS, write_rows


@pytest.fixture(scope="module")
def made() -> dict[Path, str]:
    """The pages that commands write, and a picture, by their paths from docs/benchmarks/; they take seconds."""
    return {Path(os.path.relpath(path, pages.DOCS)): text for path, text in pages.texts().items()}


@pytest.fixture
def _made_once(made: dict[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "texts", lambda: {pages.DOCS / name: text for name, text in made.items()})


@pytest.mark.usefixtures("_made_once")
def test_pages_are_up_to_date() -> None:
    assert pages.stale() == []


def test_a_page_has_its_result_first_and_its_commands_last() -> None:
    for name, own in pages.PAGES.items():
        assert own.question in QUESTIONS, name
        assert own.result.endswith("."), name
        text = (pages.DOCS / f"{name}.md").read_text(encoding="utf-8")
        assert filled(own.text) in text
        headings = re.findall(r"^(?:## .*|\?\?\? note \"All .*)$", text, re.MULTILINE)
        assert headings[-1] == "## Measured with", name
        assert re.match(r"(# .*)\n\n<!-- .* -->\n\n\*\*.*\d", text, re.DOTALL), name


def test_every_file_of_results_has_a_page_and_says_how_it_was_measured() -> None:
    read = {csv for page in pages.PAGES.values() for csv in page.files()}
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


@pytest.mark.usefixtures("_made_once")
def test_a_page_that_was_edited_by_hand_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["pages"])
    assert pages.main() == 0
    monkeypatch.setattr(sys, "argv", ["pages", "--check"])
    assert pages.main() == 0
    edited, stray = tmp_path / "docs" / "scale.md", tmp_path / "docs" / "stray.md"
    edited.write_text(edited.read_text() + "A claim.\n")
    stray.write_text("No data.\n")
    capsys.readouterr()
    assert pages.main() == 1
    said = capsys.readouterr().out
    assert f"error: got {edited} out of date" in said
    assert f"error: got {stray} out of date" in said

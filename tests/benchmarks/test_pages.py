"""The pages of benchmarks are what the CSV files beside them say, and every CSV file has a page."""

from __future__ import annotations

import csv
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks import pages
from benchmarks.pages import uneven
from benchmarks.pages.control import summary
from benchmarks.record import PROVENANCE, RESULTS, ROOT, write_rows


def test_pages_are_up_to_date() -> None:
    assert pages.stale() == []


def test_every_file_of_results_has_a_page_and_says_how_it_was_measured() -> None:
    read = {csv for page in pages.LISTED.values() for csv in (page.csv, *page.also)}
    missing = {csv for page in pages.LISTED.values() if page.may_be_missing for csv in (page.csv, *page.also)}
    there = {path.name for path in RESULTS.glob("*.csv")}
    assert read - missing <= there <= read
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


def row(method: str, accuracy: float | None, *, rate: float = 0.1, seed: int = 1, **setting: Any) -> dict[str, Any]:
    known = {"workers": 16, "alpha": 0.1, "momentum": 0.9, "learning_rate": rate, "steps": 9, "batch_size": 8}
    made = {"command": "c", "commit": "abc", "date": "d", "torch": "2", "machine": "m", "cpu_seconds": 60.0}
    return {**made, **known, "method": method, "accuracy_percent": accuracy, "seed": seed, **setting}


def test_the_page_says_which_gaps_came_out() -> None:
    rows = [row("ar", 60.0), row("ar", 62.0, seed=2), row("ar", 40.0, rate=0.3)]  # the best rate of seed 1
    rows += [row("qgdsgdm", 57.0), row("relaysgd", 56.0), row("d2", None)]
    text = uneven.data(pd.DataFrame(rows))
    assert "| All-reduce |  | 61.0 ± 1.0 (2; 0.1*) |  | 90.2 | 90.2 | 90.2 |" in text
    assert "| D2, ring |  | diverged |  | 88.2 | 88.5 | 61.0 |" in text
    assert "Order: All-reduce 61.0, QG-DSGDm, ring 57.0, RelaySGD, two binary trees 56.0." in text
    # 90.2 over 89.5 is less than a point; 90.2 over 84.8 is 5.4, of which 4.0 came out; 89.5 over 84.8 did not.
    assert "differ by 1 point or more 1 of 2 come in the same order, 1 of 2 with at least half" in text
    assert "not met by: RelaySGD, two binary trees over QG-DSGDm, ring (published +4.7, here -1.0)." in text


def test_the_page_says_where_base_graphs_are_near_all_reduce() -> None:
    figures = [(5, 60.0, 59.8, 59.0), (25, 60.0, 59.0, 59.5)]
    rows = [
        row(name, accuracy, workers=n)
        for n, *accuracies in figures
        for name, accuracy in zip(("ar", "base", "sgp"), accuracies, strict=True)
    ]
    text = uneven.workers(pd.DataFrame([*rows, row("ar", 50.0, workers=3)]))
    assert "| 3 | 50.0 (1; 0.1*) |  |  |  |  |  |  |" in text
    assert "| 5 | 60.0 (1; 0.1*) | 59.8 (1; 0.1*) | 59.0 (1; 0.1*) | -0.2 | yes | -0.2 | +0.8 |" in text
    assert "| -1.0 | **no** | -1.0 | -0.5 |" in text
    assert "for 1 of 2 numbers of workers; its gap is -1.0 to -0.2 points." in text
    faster = row("ar", 63.0, rate=0.3, workers=25)  # all-reduce takes a higher rate than Base-2 does
    text = uneven.workers(pd.DataFrame([*rows, faster]))
    assert "| 25 | 63.0 (1; 0.3*) | 59.0 (1; 0.1*) | 59.5 (1; 0.1*) | -4.0 | **no** | -1.0 | -0.5 |" in text


def test_the_page_compares_each_seed_with_all_reduce() -> None:
    figures = [("allreduce", 1, 0.60, 1.875), ("allreduce", 2, 0.62, 1.875), ("ring-every-4", 1, 0.58, 0.5)]
    figures += [("average-every-4", 1, 0.599, 0.4688), ("average-every-4", 2, 0.6160, 0.4688)]
    common = {"data": "noise", "ranks": 16, "epochs": 8, "lr": 0.1, "momentum": 0.9, "batch_size": 32, "rounds": 9}
    names = ("method", "seed", "accuracy", "models_per_step")
    text = summary(pd.DataFrame([{**common, **dict(zip(names, row, strict=True))} for row in figures]))
    assert "| allreduce | 2 | 9 | 1.875 | 61.00% | +0.00 | +0.00, +0.00 | no |" in text
    assert "| average-every-4 | 2 | 9 | 0.469 | 60.75% | -0.25 | -0.10, -0.40 | yes |" in text
    assert "| ring-every-4 | 1 | 9 | 0.500 | 58.00% | -2.00 | -2.00 | no |" in text
    assert "All-reduce with 2 seeds: 60.00% to 62.00%, 2.00 points apart." in text


def test_commits_of_rows_are_in_the_history_or_the_page_says_that_they_are_not() -> None:
    named = {commit.rstrip("+") for path in RESULTS.glob("*.csv") for commit in pd.read_csv(path, dtype=str)["commit"]}
    is_complete = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(is_complete, cwd=ROOT, capture_output=True, text=True).stdout != "false\n":
        pytest.skip("the history of this repository is not here")
    for commit in named:
        merged = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True)
        assert (merged.returncode == 0) != (commit in pages.NOT_IN_HISTORY), commit


def test_the_page_of_a_finished_study_names_a_script_that_its_commit_has() -> None:
    for own in pages.LISTED.values():
        if own.script:
            assert not (ROOT / own.script).exists(), own.script
    assert "`git show bb6c722:benchmarks/outer_steps.py`" in pages.page("outer_steps")
    assert "does not have 7ec9a98290: rows" in pages.page("elastic")
    assert "Paths that begin with / are those of the machine" in pages.page("elastic_cost")

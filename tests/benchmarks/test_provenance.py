"""Rows of benchmarks/results/ can be followed: their commit, their command, their data, and what has changed since."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import pages, record
from benchmarks.pages.age import REVIEW, reviewed_at
from benchmarks.pages.markdown import names_data
from benchmarks.record import RESULTS, ROOT

FILES = sorted(RESULTS.glob("*.csv"))


def read(name: str) -> pd.DataFrame:
    return pd.read_csv(RESULTS / name, dtype={"commit": str})


def has_history() -> bool:
    is_complete = ["git", "rev-parse", "--is-shallow-repository"]
    return subprocess.run(is_complete, cwd=ROOT, capture_output=True, text=True).stdout == "false\n"


def test_commits_of_rows_are_in_the_history() -> None:
    named = {commit.rstrip("+") for path in FILES for commit in read(path.name)["commit"]}
    if not has_history():
        pytest.skip("the history of this repository is not here")
    for commit in named:
        merged = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True)
        assert merged.returncode == 0, commit


@pytest.mark.parametrize("name", [path.name for path in FILES])
def test_commands_name_no_path_outside_of_the_repository(name: str) -> None:
    for command in read(name)["command"].unique():
        assert command.startswith("python "), command
        assert re.findall(r"(?:^|[\s='\"])(?:/|~|[^\s]*\.\.(?:/|$))[^\s]*", command) == [], command


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("/tmp/x/cells.csv", "benchmarks/results/cells.csv"),
        ("--logs=/tmp/x/logs", "--logs=runs/logs"),
        ("../cells.csv", "benchmarks/results/cells.csv"),
        (str(ROOT / "benchmarks" / "scale.py"), "benchmarks/scale.py"),
        ("/data/of mine/cifar.tar.gz", "$GOSSIP_DATA/cifar.tar.gz"),
        ("DiLoCo(lr=0.7)", "'DiLoCo(lr=0.7)'"),
        ("runs/cifar16.npz", "runs/cifar16.npz"),
    ],
)
def test_a_command_is_one_that_a_reader_can_type(typed: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSIP_DATA", "/data/of mine")
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-m", "benchmarks.x", typed])
    assert record.command() == f"python -m benchmarks.x {shown}"


def test_data_has_a_hash_or_the_page_says_that_it_has_none(tmp_path: Path) -> None:
    for name, own in pages.PAGES.items():
        text = " ".join((pages.DOCS / f"{name}.md").read_text(encoding="utf-8").split())
        have_names = all(names_data(read(each.csv)) for each in own.measurements())
        assert have_names != ("no hash of the data" in text), name
    file = tmp_path / "digits.npz"
    file.write_bytes(b"abc")
    assert record.digest(file) == "digits.npz ba7816bf8f01cfea"  # FIPS 180-2, the example of SHA-256


# What has changed since.


def test_pages_say_how_many_commits_have_changed_the_measured_code() -> None:
    review = json.loads(REVIEW.read_text(encoding="utf-8"))
    for page in pages.PAGES.values():
        for own in page.measurements():
            assert [path for path in own.measures if not (ROOT / path).exists()] == [], own.title
    if not has_history():
        pytest.skip("the history of this repository is not here")
    found = reviewed_at(review["commit"], pages.PAGES.values())
    assert found == review, "run python -m benchmarks.pages --review"


# Thresholds are compared before rounding: figures of texts, from the rows.


def test_the_slowest_step_after_a_kill_is_compared_with_its_bound() -> None:
    rows = read("elastic.csv")
    holds = (rows["slowest_after_kill_ms"] <= rows["target_ms"]) & (rows["survivors_that_failed"] == 0)
    assert (rows["met"] == holds.map({True: "yes", False: "no"})).all()

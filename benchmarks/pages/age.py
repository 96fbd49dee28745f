"""How old rows are: the commits after theirs that touch what they measure, as of a review."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.record import RESULTS, ROOT

REVIEW = Path(__file__).with_name("review.json")
"""The result of `reviewed_at`, at the last review."""
AGED = "The measured code has later commits:"


def aged(own: Page, rows: pd.DataFrame) -> str:
    """How many later commits touch the code that rows measure, as of the last review; "": none."""
    review = json.loads(REVIEW.read_text(encoding="utf-8"))
    counts = {commit: review["later"].get(_key(commit, own), 0) for commit in _commits(rows)}
    listed = [f"{count} after {commit}" for commit, count in counts.items() if count]
    if not listed:
        return ""
    return f"{AGED} {', '.join(listed)} ({review['date']}, `git log --oneline COMMIT.. -- {' '.join(own.measures)}`)."


def reviewed_at(head: str, pages: Iterable[Page]) -> dict[str, Any]:
    """Count the commits up to `head` that are later than rows and touch what they measure.

    Returns:
        commit and date: of the last change of the library. later: counts by "commit path path"; none is 0.
    """
    head, date = _git("log", "-1", "--format=%h %cs", "--abbrev=10", head, "--", "gossip_modules").split()
    later = {}
    for page in pages:
        for own in page.measurements():
            for commit in _commits(pd.read_csv(RESULTS / own.csv, dtype=str)):
                count = int(_git("rev-list", "--count", f"{commit}..{head}", "--", *own.measures))
                later.update({_key(commit, own): count} if count else {})
    return {"commit": head, "date": date, "later": dict(sorted(later.items()))}


def _commits(rows: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(rows["commit"].str.rstrip("+")))


def _key(commit: str, own: Page) -> str:
    return " ".join([commit, *own.measures])


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()

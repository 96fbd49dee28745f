"""The pages of docs/benchmarks/, generated from the CSV files of benchmarks/results/.

    python -m benchmarks.pages              # writes them
    python -m benchmarks.pages --check      # exit code 1 where a page is not what its CSV file says

A page has what is measured and how, then the figures with command, commit, machine, date and seed. A figure without a
row in a CSV file has no place on a page.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.pages.algorithms import ALGORITHMS
from benchmarks.pages.base import Page
from benchmarks.pages.finished import FINISHED
from benchmarks.pages.gap import GAP
from benchmarks.pages.hosts import HOSTS
from benchmarks.pages.membership import MEMBERSHIP
from benchmarks.pages.training import TRAINING
from benchmarks.record import DTYPES, RESULTS, ROOT

PAGES: Mapping[str, Page] = {**GAP, **ALGORITHMS, **MEMBERSHIP, **TRAINING, **HOSTS, **FINISHED}
"""By the name of the file, in the order of the index."""


NOT_IN_HISTORY = frozenset({"c382ff5ef7", "5bef199f44", "7ec9a98290", "bb0e4d0be7"})
"""Commits that rows name, of branches that were rebased."""

DOCS = ROOT / "docs" / "benchmarks"
MADE = "<!-- Written by `python -m benchmarks.pages` from benchmarks/results/{csv}: change that, not this. -->"


def page(name: str) -> str:
    """The text of a page, from its CSV file."""
    own = PAGES[name]
    rows = pd.read_csv(RESULTS / own.csv, dtype=DTYPES)
    figures = own.render(rows) if own.render else f"{sources(rows)}\n\n{table(rows, own.columns)}\n"
    texts = [f"# {own.title}", MADE.format(csv=own.csv), own.text, *remarks(own, rows)]
    return "\n\n".join([*texts, figures])


def remarks(own: Page, rows: pd.DataFrame) -> list[str]:
    """What a reader cannot repeat as it is written there: the script, the commit, the paths."""
    found = []
    if own.script:
        found.append(
            f"The study is finished, and its script is not in the tree any more: `git show {own.script}` prints it."
        )
    if lost := sorted(NOT_IN_HISTORY & {commit.rstrip("+") for commit in rows["commit"]}):
        found.append(
            f"The history of the repository does not have {' and '.join(lost)}: rows of such a commit were measured "
            "before it was rebased."
        )
    if any(word.startswith("/") for command in rows["command"].unique() for word in command.split()):
        found.append("Paths that begin with / are those of the machine that measured: name your own.")
    return found


def index() -> str:
    """The list of all pages."""
    lines = [
        "# Benchmarks",
        "",
        "<!-- Written by `python -m benchmarks.pages`: change that, not this. -->",
        "",
        "Every figure was measured by the command on its page, on the machine and with the commit that stand",
        "beside it. Compare ratios within one page: absolute times depend on the machine. `benchmarks/README.md`",
        "says how to run the benchmarks.",
        "",
        *(f"- [{own.title}]({name}.md), from `benchmarks/results/{own.csv}`" for name, own in PAGES.items()),
    ]
    return "\n".join(lines) + "\n"


def sources(rows: pd.DataFrame) -> str:
    """Command, date, commit and machine of the rows, an entry for each that differs."""
    entries = []
    for (command, commit), part in rows.groupby(["command", "commit"], sort=False):
        first = part.iloc[0]
        seed = f", seed {first['seed']}" if "seed" in part else ""
        cores = f", {first['cores']} cores" if "cores" in part else ""
        made = f"{first['date']}, commit {commit}, torch {first['torch']}, {first['machine']}{cores}{seed}."
        entries.append(f"    {command}\n\n{made}")
    return "\n\n".join(entries)


def table(rows: pd.DataFrame, columns: Mapping[str, tuple[str, str]]) -> str:
    """The columns as a Markdown table; an empty cell stays empty."""
    lines = [f"| {' | '.join(header for header, _ in columns.values())} |"]
    lines.append(f"|{'|'.join('---' if form == 's' else '---:' for _, form in columns.values())}|")
    for row in rows.to_dict("records"):
        cells = [_cell(row[name], form) for name, (_, form) in columns.items()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: Any, form: str) -> str:
    if pd.isna(value):
        return ""
    return format(int(value) if form.endswith("d") else value, form)


def texts() -> dict[Path, str]:
    """All pages but those of FINISHED, by their file."""
    return {DOCS / "index.md": index(), **{DOCS / f"{name}.md": page(name) for name in PAGES if name not in FINISHED}}


def stale() -> list[Path]:
    """Files that are not what the CSV files say, and pages that no CSV file makes."""
    wanted = texts()
    wrong = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    return [*wrong, *(path for path in sorted(DOCS.glob("*.md")) if path not in wanted and path.stem not in FINISHED)]


def main() -> int:
    """Write the pages or check them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is out of date")
    if parser.parse_args().check:
        for path in (wrong := stale()):
            print(f"error: got {path} out of date, expected what its CSV file says; run python -m benchmarks.pages")
        return 1 if wrong else 0
    DOCS.mkdir(parents=True, exist_ok=True)
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0

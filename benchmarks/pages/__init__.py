"""The pages of docs/benchmarks/, generated from the CSV files of benchmarks/results/.

    python -m benchmarks.pages              # writes them
    python -m benchmarks.pages --check      # exit code 1 where a page is not what its CSV file says
    python -m benchmarks.pages --review     # counts the later commits again, and writes all pages

A page has the result first, then a short table, then all rows, and the commands with commit, machine, day and seed
last. A study of `benchmarks.sections` is a section of the page of another one. A figure without a row in a CSV file has
no place on a page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd

from benchmarks.claims.registry import filled
from benchmarks.pages.age import REVIEW, aged, reviewed_at
from benchmarks.pages.algorithms import ALGORITHMS
from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.default import DEFAULT, picture
from benchmarks.pages.graph_studies import GRAPH_STUDIES
from benchmarks.pages.hosts import HOSTS
from benchmarks.pages.lab_studies import lab_page
from benchmarks.pages.lossy_links import LOSSY_LINKS
from benchmarks.pages.mailbox import MAILBOX
from benchmarks.pages.markdown import fold, names_data, sources, table
from benchmarks.pages.membership import MEMBERSHIP
from benchmarks.pages.pictures import pictures
from benchmarks.pages.published import reproduction_page
from benchmarks.pages.records import RECORDS
from benchmarks.pages.setup import SETUP
from benchmarks.pages.strangers import STRANGERS
from benchmarks.pages.studies import STUDIES
from benchmarks.pages.training import TRAINING
from benchmarks.pages.two_regions import TWO_REGIONS
from benchmarks.pages.wire import WIRE
from benchmarks.record import DTYPES, RESULTS, ROOT
from benchmarks.sections import SECTIONS, address

__all__ = ["PAGES", "main", "page", "stale", "table"]

EVERY: Mapping[str, Page] = {
    **STUDIES,
    **DEFAULT,
    **TRAINING,
    **WIRE,
    **LOSSY_LINKS,
    **RECORDS,
    **HOSTS,
    **MEMBERSHIP,
    **MAILBOX,
    **ALGORITHMS,
    **GRAPH_STUDIES,
    **TWO_REGIONS,
    **STRANGERS,
    "lab": lab_page(),
}
"""All studies by name, in the order of the index, sections too."""
PAGES: Mapping[str, Page] = {
    name: replace(own, sections={each: EVERY[each] for each in EVERY if SECTIONS.get(each) == name})
    for name, own in EVERY.items()
    if name not in SECTIONS
}
"""By the name of the file."""

DOCS = ROOT / "docs" / "benchmarks"
MADE = "<!-- Written by `python -m benchmarks.pages` from benchmarks/results/{csv}: change that, not this. -->"


def page(name: str) -> str:
    """The text of a page, from its CSV file."""
    own = PAGES[name]
    rows = _read(own.csv)
    texts = [f"# {own.title}", MADE.format(csv=own.csv), *_figures(own, rows), *map(_part, own.parts)]
    texts += [text for each, section in own.sections.items() for text in _section(each, section)]
    texts += ["## Setup", filled(own.setup)] if own.setup else []
    return "\n\n".join([*texts, "## Measured with", *_remarks(own, rows), sources(rows)]) + "\n"


def _figures(own: Page, rows: pd.DataFrame) -> list[str]:
    """The result, the summary and all rows, which are folded if there is a summary."""
    every = (own.render(rows) if own.render else table(rows, own.columns)).rstrip("\n")
    shown = [own.summary(rows), fold("All rows", every)] if own.summary else [every]
    return [filled(own.text), *pictures(csv=own.csv), *shown]


def _section(name: str, own: Page) -> Iterator[str]:
    """Yield another study: its result and its table, then what a page has at its end, folded."""
    rows = _read(own.csv)
    yield f"## {own.title} {{ #{name} }}"
    yield from _figures(own, rows)
    yield from map(_part, own.parts)
    setup = [filled(own.setup)] if own.setup else []
    yield fold("How this was measured", "\n\n".join([*setup, *_remarks(own, rows), sources(rows)]))


def _part(own: Page) -> str:
    """A related measurement, folded."""
    rows = _read(own.csv)
    setup = [filled(own.setup)] if own.setup else []
    return fold(own.title, "\n\n".join([*_figures(own, rows), *setup, *_remarks(own, rows), sources(rows)]))


def _remarks(own: Page, rows: pd.DataFrame) -> list[str]:
    """The remarks that the rows have no hash of their data, and that the measured code has later commits."""
    hashed = [] if names_data(rows) else ["The rows have no hash of the data."]
    age = aged(own, rows)
    return [*hashed, *([age] if age else [])]


def _read(csv: str) -> pd.DataFrame:
    return pd.read_csv(RESULTS / csv, dtype=DTYPES)


def index() -> str:
    """The list of all pages, by question."""
    texts = [
        "# Benchmarks",
        "<!-- Written by `python -m benchmarks.pages`: change that, not this. -->",
        "Each page begins with its result and ends with its commands. Read [how the figures are measured](#setup) "
        "once, and compare them with the papers on [Reproduction](reproduction.md).",
    ]
    for question in (*QUESTIONS, ""):
        listed = {name: own for name, own in EVERY.items() if own.question == question}
        if listed:
            texts.append(f"## {question or 'More'}")
            lines = (f"- [{own.title}]({address(name)}). {filled(own.result)}" for name, own in listed.items())
            texts.append("\n".join(map(str.rstrip, lines)))
    return "\n\n".join([*texts, SETUP])


def texts() -> dict[Path, str]:
    """All pages, and the picture of seconds to an equal loss, by their file."""
    own = {DOCS / "index.md": index(), DOCS / "reproduction.md": reproduction_page()}
    pictures = {DOCS.parent / "assets" / "default.svg": picture()}
    return {**own, **pictures, **{DOCS / f"{name}.md": page(name) for name in PAGES}}


def stale() -> list[Path]:
    """Files that are not what the CSV files say, and pages that no CSV file makes."""
    wanted = texts()
    wrong = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    return [*wrong, *(path for path in sorted(DOCS.glob("*.md")) if path not in wanted)]


def main() -> int:
    """Write the pages or check them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is out of date")
    parser.add_argument("--review", action="store_true", help="first count the commits later than the rows")
    options = parser.parse_args()
    if options.check:
        for path in (wrong := stale()):
            print(f"error: got {path} out of date, expected what its CSV file says; run python -m benchmarks.pages")
        return 1 if wrong else 0
    if options.review:
        review = reviewed_at("HEAD", PAGES.values())
        REVIEW.write_text(json.dumps(review, indent=1) + "\n", encoding="utf-8")
    for path, text in texts().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0

"""Figures of a page that are no claims: numbers in bold text, and numbers with a unit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.claims.registry import PLACE

CODE = re.compile(
    r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$|``[^`]+``|`[^`]+`|\]\([^)]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE
)
BOLD = re.compile(r"\*\*(?:(?!\*\*|\n\n).)*?\*\*", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.-])\.?\d[\d,.]*")
UNITS = r"%|percent\b|points?\b|nats\b|bits\b|BLEU\b|ms\b|s\b|seconds\b|minutes\b|MB\b|GB\b|times\b"
MEASURED = re.compile(rf"(?<![\w.-])\.?\d[\d,.]*(?:[ \n-](?:{UNITS})|%)")


def hidden(found: re.Match[str]) -> str:
    """Return blanks of the same length and with the same line breaks."""
    return re.sub(r"[^\n]", " ", found[0])


def section(text: str, title: str) -> tuple[int, int]:
    """Return where the section with a heading begins and ends; both 0: the page has none."""
    start = re.search(rf"^## {re.escape(title)}$", text, re.MULTILINE)
    if start is None:
        return 0, 0
    end = re.compile(r"^## ", re.MULTILINE).search(text, start.end())
    return start.end(), end.start() if end else len(text)


def unclaimed(text: str, title: str = "") -> Iterator[tuple[int, str]]:
    """Yield the line and the text of figures that are no claims.

    Args:
        text: a page. Code, addresses, comments and claims are not read.
        title: the heading of the section in which numbers with units are figures too; "": in the whole page.
    """
    read = CODE.sub(hidden, PLACE.sub(hidden, text))
    begin, end = section(text, title) if title else (0, len(text))
    places = [found.span() for found in BOLD.finditer(read) if NUMBER.search(found[0])]
    places += [found.span() for found in MEASURED.finditer(read, begin, end)]
    for start, stop in sorted(places):
        yield read.count("\n", 0, start) + 1, " ".join(read[start:stop].split())

"""The claims by name, and their places in texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claims.attacks import ATTACK_CLAIMS
from benchmarks.claims.base import Claim
from benchmarks.claims.chaos import CHAOS
from benchmarks.claims.default import DEFAULT
from benchmarks.claims.elastic import ELASTIC
from benchmarks.claims.images import IMAGES
from benchmarks.claims.language import LANGUAGE
from benchmarks.claims.measured import MEASURED
from benchmarks.claims.outer import OUTER
from benchmarks.claims.stragglers import STRAGGLERS
from benchmarks.claims.uneven import UNEVEN
from benchmarks.record import RESULTS

SUBJECTS: Mapping[str, Mapping[str, Claim]] = {
    "attacks": ATTACK_CLAIMS,
    "chaos": CHAOS,
    "default": DEFAULT,
    "elastic": ELASTIC,
    "images": IMAGES,
    "language": LANGUAGE,
    "measured": MEASURED,
    "outer": OUTER,
    "stragglers": STRAGGLERS,
    "uneven": UNEVEN,
}
CLAIMS: Mapping[str, Claim] = {
    f"{subject}.{name}": claim for subject, claims in SUBJECTS.items() for name, claim in claims.items()
}
"""All claims by name: the subject, a point, and the name in the file of the subject."""

BEGIN, END = "<!--claim ", "<!--/-->"
PLACE = re.compile(rf"{BEGIN}([\w.]*)-->(.*?){END}", flags=re.DOTALL)
PLACEHOLDER = re.compile(r"\{([a-z]\w*\.\w+)\}")
# Markdown takes a line that begins with a comment for HTML, also in a list or a quotation.
AT_START = re.compile(rf"^[ \t]*(?:[-*+>] +|\d+\. +)*{BEGIN}[\w.]*-->(?!\n)", flags=re.MULTILINE)


@dataclass(frozen=True)
class WrongPlace:
    """A place where a page is wrong.

    Attributes:
        line: of the page.
        claim: the name, as the page has it.
        got: the text there.
        expected: the text that the rows say, or what to do.
    """

    line: int
    claim: str
    got: str
    expected: str


def text_of(name: str, folder: Path = RESULTS) -> str:
    """Return the text of a claim.

    Raises:
        ValueError: no claim has the name.
    """
    if name not in CLAIMS:
        near = difflib.get_close_matches(name, CLAIMS, n=3) or sorted(SUBJECTS)
        raise ValueError(f"got a claim {name!r}, expected one such as {', '.join(near)}; see benchmarks.claims --list")
    return CLAIMS[name].text(folder)


def filled(text: str, folder: Path = RESULTS) -> str:
    """Return a text with the texts of claims in the place of their names, `{subject.name}`."""
    return PLACEHOLDER.sub(lambda found: text_of(found[1], folder), text)


def plain(text: str) -> str:
    """Return a page without the comments that mark claims."""
    return PLACE.sub(lambda found: found[2].strip("\n"), text)


def rendered(text: str, folder: Path = RESULTS) -> str:
    """Return a page with the texts of all its claims. Line breaks inside a text in a line of prose stay."""
    return PLACE.sub(lambda found: f"{BEGIN}{found[1]}-->{_shown(found, folder)}{END}", text)


def _shown(found: re.Match[str], folder: Path) -> str:
    expected = text_of(found[1], folder)
    if found[2].startswith("\n"):
        return f"\n{expected}\n"
    return found[2] if found[2].split() == expected.split() else expected


def faults(text: str, folder: Path = RESULTS) -> Iterator[WrongPlace]:
    """Yield the places where a page is not what the CSV files say, or where a comment is not readable."""
    for found in PLACE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        try:
            expected = _shown(found, folder)
        except ValueError as error:
            yield WrongPlace(line, found[1], found[2], str(error))
            continue
        if found[2] != expected:
            yield WrongPlace(line, found[1], found[2], expected)
    rest = PLACE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for mark in (BEGIN, END):
        if mark in rest:
            line = rest.count("\n", 0, rest.index(mark)) + 1
            yield WrongPlace(line, "", mark, f"{BEGIN}NAME-->text{END}, one after the other")
    for found in AT_START.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield WrongPlace(line, "", found[0], "a word before it in the line, since Markdown takes this line for HTML")

"""Write the claims into the pages, check the pages, or list the claims."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import benchmarks.claims
from benchmarks.claims.registry import CLAIMS, PLACE, PLACEHOLDER, faults, rendered
from benchmarks.pages import PAGES
from benchmarks.record import RESULTS, ROOT


def pages() -> list[Path]:
    """Return the pages that may have claims."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def wrong(folder: Path = RESULTS) -> Iterator[str]:
    """Yield a line for each place where a page is not what the CSV files of a folder say."""
    for page in pages():
        for fault in faults(page.read_text(encoding="utf-8"), folder):
            start = f"{page.relative_to(ROOT)}:{fault.line}: {fault.claim or 'a comment'}"
            yield f"{start}: got {fault.got!r}, expected {fault.expected!r}"


def places() -> dict[str, list[str]]:
    """Return the places of each claim: pages with lines, and generated pages."""
    found: dict[str, list[str]] = {name: [] for name in CLAIMS}
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for place in PLACE.finditer(text):
            found[place[1]].append(f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, place.start()) + 1}")
    for name, own in PAGES.items():
        texts = [part for each in own.measurements() for part in (each.text, each.result, each.setup)]
        for claim in {claim for text in texts for claim in PLACEHOLDER.findall(text)}:
            found[claim].append(f"docs/benchmarks/{name}.md")
    return found


def listed() -> Iterator[str]:
    """Yield the description of each claim."""
    found = places()
    for name, claim in CLAIMS.items():
        text = claim.text()
        shown = text if "\n" not in text else f"({len(text.splitlines())} lines)"
        lines = [f"{', '.join(claim.csvs)}: {claim.quantifier}", f"on {', '.join(found[name]) or 'no page'}"]
        body = "\n".join(textwrap.fill(line, 118, initial_indent="    ", subsequent_indent="      ") for line in lines)
        yield f"{name}: {shown}\n{body}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write, check or list the claims; the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.claims",
        description=benchmarks.claims.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is out of date")
    parser.add_argument("--list", action="store_true", help="print each claim with its files, rows and pages")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(listed()))
        return 0
    if not options.check:
        for page in pages():
            before = page.read_text(encoding="utf-8")
            if (after := rendered(before)) != before:
                page.write_text(after, encoding="utf-8")
                print(page.relative_to(ROOT))
        return 0
    found = list(wrong())
    for line in found:
        print(f"error: {line}")
    if found:
        print("run python -m benchmarks.claims")
    return int(bool(found))

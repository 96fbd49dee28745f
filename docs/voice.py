"""Counts how the pages speak to their reader, and fails where a page does not speak as PyTorch's documentation does.

    python docs/voice.py                   # `make docs` runs this: the pages that fail, and exit code 1
    python docs/voice.py docs/index.md     # these pages, each with its figures
    python docs/voice.py --report          # all pages with their figures, and exit code 0 in any case

The check reads prose only, without code, tables, headings, comments and signatures. In each page of `GUIDES`:

- at most 20 relative clauses in 1,000 words. Each "which", "who", "whom" and "whose" is one. A "that" is one as well,
  unless it begins a sentence, or follows a word of `BEFORE_CONJUNCTIONS`: a verb of saying or seeing ("check that"), a
  conjunction ("so that") or a preposition ("after that");
- at least 5 "you", "your" or "yours" in 1,000 words;
- none of `IMAGES`, private images that only their author understands.

The pages of `REFERENCE` need no "you". In all pages no row of a table begins with "the same", and no cell is it: a
reader reads one row alone. The pages of docs/benchmarks together have at most `MOST_BENCHMARK_WORDS` words that a
reader sees: outside tables, code and folded parts, before the heading "Measured with".
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).resolve().parent
GUIDES = ("*.md", "learn/*.md", "guides/*.md", "coming_from/*.md", "extend/*.md")
REFERENCE = ("methods/*.md",)
MOST_CLAUSES = 20.0
FEWEST_YOU = 5.0
MOST_BENCHMARK_WORDS = 8000

BEFORE_CONJUNCTIONS = frozenset(
    """
    say says said see sees check checks mean means meant note notes know knows show shows assume assumes expect expects
    require requires ensure ensures find finds decide decides agree agrees tell tells report reports confirm confirms
    imply implies suppose warn warns believe sure certain clear true likely possible
    so such and or but than except provided given now until while because though if when where
    in of on at to for from with without by after before like as about over under above below is was
    """.split()  # noqa: SIM905
)
IMAGES = re.compile(
    r"(?!life ?cycle)\b(doors?|knock(?:s|ed)?|life|lifelines?|farewells?|accuse[sd]?|mails?|laws?|silence|silent(?:ly)?"
    r"|house|anew|siblings?)\b",
    re.IGNORECASE,
)

SAME = re.compile(r"^[ \t]*\| *the same\b.*$|(?<=\| )the same(?= \||,)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Voice:
    """What was counted in the prose of one page."""

    num_words: int
    num_clauses: int
    num_you: int
    images: tuple[str, ...]
    num_same: int

    @property
    def clauses(self) -> float:
        """Relative clauses in 1,000 words."""
        return 1000 * self.num_clauses / max(self.num_words, 1)

    @property
    def you(self) -> float:
        """How often the reader is spoken to, in 1,000 words."""
        return 1000 * self.num_you / max(self.num_words, 1)

    def faults(self, *, is_guide: bool, is_reference: bool = False) -> list[str]:
        """What fails, as got and expected."""
        is_prose = is_guide or is_reference
        found = []
        if is_prose and self.clauses > MOST_CLAUSES:
            found.append(f"got {self.clauses:.1f} relative clauses in 1,000 words, expected at most {MOST_CLAUSES:.0f}")
        if is_guide and self.you < FEWEST_YOU:
            found.append(f'got {self.you:.1f} "you" in 1,000 words, expected at least {FEWEST_YOU:.0f}')
        if is_prose and self.images:
            found.append(f"got {', '.join(map(repr, self.images))}, expected plain words")
        if self.num_same:
            found.append(f'got {self.num_same} rows or cells "the same", expected rows that can be read alone')
        return found


def prose(text: str) -> str:
    """The sentences of a page of Markdown, with one word in place of each piece of code and of each formula."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\$\$.*?\$\$|\\\[.*?\\\]", " ", text, flags=re.DOTALL)
    text = re.sub(r"^:::.*(?:\n[ \t]+.*)*", "", text, flags=re.MULTILINE)  # signatures
    text = re.sub(r"^[ \t]*(?:[|#<]|--8<--).*$", "", text, flags=re.MULTILINE)  # tables, headings, HTML, snippets
    text = re.sub(r"^([ \t]*)(?:!!!|\?\?\?\+?) \w+", r"\1", text, flags=re.MULTILINE)  # the title of a box is read
    text = re.sub(r"``[^`]+``|`[^`]+`|\$[^$\n]+\$|\\\(.*?\\\)", "code", text)
    return re.sub(r"\]\([^)]*\)|\]\[[^\]]*\]", "]", text)


def visible(text: str) -> str:
    """What a reader of a page of docs/benchmarks sees of its text, without tables, code, folded parts and commands."""
    text = text.partition("\n## Measured with\n")[0]
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\?\?\? .*\n(?:(?: {4}.*)?\n)*", "", f"{text}\n", flags=re.MULTILINE)
    text = re.sub(r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^[ \t]*\|.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)|\]\[[^\]]*\]", "]", text)


def benchmark_fault(pages: Iterable[str]) -> str:
    """What fails in the pages of docs/benchmarks together, as got and expected; "": nothing."""
    count = sum(len(re.findall(r"\S*\w\S*", visible(text))) for text in pages)
    if count <= MOST_BENCHMARK_WORDS:
        return ""
    return f"docs/benchmarks: got {count:,} words, expected at most {MOST_BENCHMARK_WORDS:,} in all pages together"


def listen(text: str) -> Voice:
    """What is counted in a page of Markdown."""
    read = prose(text)
    words = [".", *re.findall(r"[a-z][a-z'-]*|[.:;!?]", read.lower())]  # a sentence begins after a mark
    spoken = [word for word in words if word[0].isalpha()]
    clauses = sum(word in ("which", "who", "whom", "whose") for word in spoken)
    clauses += sum(
        word == "that" and before[0].isalpha() and before not in BEFORE_CONJUNCTIONS for before, word in pairwise(words)
    )
    return Voice(
        num_words=len(spoken),
        num_clauses=clauses,
        num_you=sum(word in ("you", "your", "yours", "yourself") for word in spoken),
        images=tuple(sorted({found.lower() for found in IMAGES.findall(read)})),
        num_same=len(SAME.findall(text)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures of pages, and what fails; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages to read; all of docs/ when none is named")
    parser.add_argument("--report", action="store_true", help="print all figures, and exit with code 0 in any case")
    options = parser.parse_args(arguments)
    guides, reference = (
        {page for pattern in patterns for page in DOCS.glob(pattern)} for patterns in (GUIDES, REFERENCE)
    )
    named = [page.resolve() for page in options.pages]
    failed = 0
    for page in named or sorted(DOCS.rglob("*.md"), key=lambda page: (page not in guides, page)):
        is_guide = page in guides or (page in named and page not in reference)
        voice = listen(page.read_text(encoding="utf-8"))
        faults = voice.faults(is_guide=is_guide, is_reference=page in reference)
        failed += bool(faults)
        name = page.relative_to(DOCS.parent) if page.is_relative_to(DOCS.parent) else page
        figures = f"{voice.num_words} words, {voice.clauses:.1f} relative clauses, {voice.you:.1f} you"
        if faults or named or (options.report and is_guide):
            print(f"{name}: {figures}{''.join(f'; {fault}' for fault in faults)}")
    texts = (page.read_text(encoding="utf-8") for page in sorted((DOCS / "benchmarks").glob("*.md")))
    if not named and (fault := benchmark_fault(texts)):
        failed += 1
        print(fault)
    print(f"voice: {failed} pages fail" if failed else "voice: all pages pass")
    return int(bool(failed) and not options.report)


if __name__ == "__main__":
    sys.exit(main())

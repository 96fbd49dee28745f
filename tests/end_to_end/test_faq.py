"""docs/faq.md: its figures are on the pages of results that its answers link to."""

from __future__ import annotations

import re

from tests.harness.pages import ROOT

FAQ = ROOT / "docs" / "faq.md"
ANSWERS = re.split(r"^### ", FAQ.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
FIGURE = re.compile(r"\b\d+\.\d{2,}\b|\b\d+ ms\b")


def sources(answer: str) -> str:
    """The pages of results that an answer links to."""
    names = set(re.findall(r"\]\((benchmarks/\w+\.md)", answer))
    return "\n".join((FAQ.parent / name).read_text(encoding="utf-8") for name in names)


def test_every_figure_is_on_a_page_that_the_answer_links_to() -> None:
    figures = [(answer, figure) for answer in ANSWERS for figure in FIGURE.findall(answer)]
    assert len(figures) >= 8
    assert [figure for answer, figure in figures if not re.search(rf"\b{figure.split()[0]}\b", sources(answer))] == []
    tables = {name for answer in ANSWERS for name in re.findall(r"`(benchmarks/results/\w+\.csv)`", answer)}
    assert [name for name in sorted(tables) if not (ROOT / name).exists()] == []


def test_every_question_has_an_anchor_of_its_own() -> None:
    anchors = re.findall(r"^### .*\{ #([\w-]+) \}$", FAQ.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(anchors) == len(set(anchors)) == len(ANSWERS) >= 15

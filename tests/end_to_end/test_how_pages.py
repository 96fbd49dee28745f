"""The pages docs/learn/how_*.md: each script prints what stands below it, and each diagram is the one that is drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.pages import ROOT
from tests.harness.pictures import collisions, text_boxes
from visualization.diagrams import DIAGRAMS, WIDTH

FOLDER = ROOT / "docs" / "learn"
PAGES = sorted(FOLDER.glob("how_*.md"))
EXAMPLE = re.compile(r"^```py\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES: dict[str, tuple[str, str]] = {
    f"{page.stem}-{number}": (script, output)
    for page in PAGES
    for number, (script, output) in enumerate(EXAMPLE.findall(page.read_text(encoding="utf-8")))
}
"""A script and its output, by the name of its page."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_script_prints_the_output_below_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, output = EXAMPLES[name]
    exec(compile(script, name, "exec", dont_inherit=True), {"__name__": "__main__"})
    assert capsys.readouterr().out == output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_an_example_and_a_diagram(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert f"{page.stem}-0" in EXAMPLES
    assert len(re.findall(r"^```py$", text, re.MULTILINE)) == len(re.findall(r"^```text$", text, re.MULTILINE))
    assert re.search(r"\]\(\.\./assets/how_\w+\.svg\)\{ \.diagram \}", text)


@pytest.mark.parametrize("name", DIAGRAMS)
def test_the_site_has_the_diagram_that_is_drawn(name: str) -> None:
    assert (ROOT / "docs" / "assets" / f"{name}.svg").read_text(encoding="utf-8") == DIAGRAMS[name]().svg()
    assert any(f"../assets/{name}.svg" in page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("name", DIAGRAMS)
def test_letters_of_a_diagram_are_inside_of_it_and_do_not_collide(name: str) -> None:
    svg = DIAGRAMS[name]().svg()
    found = text_boxes(svg)
    assert len(found) == svg.count("<text")
    assert min(box.left for box in found) >= 0
    assert max(box.right for box in found) <= WIDTH
    assert collisions(svg) == []

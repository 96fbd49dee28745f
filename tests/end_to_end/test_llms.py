"""docs/llms.txt is as the code is, and docs/idioms.md has twelve idioms (test_docs.py runs them)."""

from __future__ import annotations

import re

import gossip_modules
from docs.llms import FILE, first_sentence, rendered, signature
from tests.harness.pages import ROOT, snippets

IDIOMS = ROOT / "docs" / "idioms.md"


def test_the_file_is_current_and_has_every_public_name() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert rendered() == text, "run python docs/llms.py"
    assert [name for name in gossip_modules.__all__ if f"\n- gossip_modules.{name}(" not in text] == []
    assert " at 0x" not in text
    assert len(text.encode()) < 60_000


def test_there_are_twelve_idioms_and_each_is_code() -> None:
    titles = re.findall(r"^## (\d+)\. ", IDIOMS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert titles == [str(number) for number in range(1, 13)]
    assert len(snippets(IDIOMS)) == 12
    assert [block for block in snippets(IDIOMS) if block not in FILE.read_text(encoding="utf-8")] == []


def test_a_signature_is_one_line_without_quotes() -> None:
    def call(x: int | None, *rest: str, flag: bool = True, make: object = first_sentence) -> None:
        """Does. Something else."""

    assert signature(call) == "(x: int | None, *rest: str, flag: bool = True, make: object = ...)"
    assert first_sentence(call) == "Does"

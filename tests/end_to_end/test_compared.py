"""The page that compares this library with others: each cell of ours names a test, and each row a test or a source."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "compared.md"
TEST = r"`(\S+\.py)::(test_\w+)`"


def tables() -> list[list[list[str]]]:
    """The tables of the page: rows of cells, the head first."""
    found: list[list[list[str]]] = []
    lines = ["", *PAGE.read_text(encoding="utf-8").splitlines()]
    for before, line in pairwise(lines):
        if line[:1] == "|":
            if before[:1] != "|":
                found.append([])
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def is_test(path: str, name: str) -> bool:
    """Whether a file below tests/ has a test of that name."""
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_cell_of_ours_names_a_test() -> None:
    header, _, *cells = tables()[0]
    assert header[-1] == "this library"
    assert len(cells) >= 20
    for row in cells:
        found = re.fullmatch(f"yes: {TEST}", row[-1])
        assert found, row[-1]
        assert is_test(*found.groups()), row[-1]


def test_each_row_of_each_table_has_a_test_or_a_source() -> None:
    assert len(tables()) == 3
    for header, _, *rows in tables():
        for row in rows:
            assert len(row) == len(header), row
            text = " ".join(row)
            assert re.search(TEST, text) or re.search(r"\]\([^)]+\)", text), row
            assert all(is_test(path, name) for path, name in re.findall(TEST, text)), row


def test_the_page_states_when_other_tools_were_read() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("November\n2026") + text.count("November 2026") == len(tables())

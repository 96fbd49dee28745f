"""The page that compares this library with other tools: each cell of ours names a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "compared.md"


def test_each_cell_of_ours_names_a_test() -> None:
    table, _, _ = PAGE.read_text(encoding="utf-8").partition("</div>")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:1] == "|"]
    header, _, *cells = rows
    assert header[-1] == "this library"
    assert len(cells) >= 20
    for row in cells:
        assert len(row) == len(header), row
        found = re.fullmatch(r"yes: `(\S+\.py)::(test_\w+)`", row[-1])
        assert found, row[-1]
        path, name = found.groups()
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row[-1]

"""[Note: ...] blocks: each has one definition, and a citation from another file names the class that has it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("gossip_modules", "train", "visualization", "benchmarks", "examples", "tests")
NOTE = re.compile(r"\[Note:\s+([^\]]+)\]")
OWNER = re.compile(r"\s+of\s+`([\w.]+)`")


class Place(NamedTuple):
    """A note in a text.

    Attributes:
        name: of the note.
        path: of the file.
        line: from 1 on.
        is_definition: whether the note begins a paragraph; else it is cited.
        owner: the class, the function or the file that has the paragraph; of a citation, the owner that it names.
    """

    name: str
    path: str
    line: int
    is_definition: bool
    owner: str


def notes_in(text: str, path: str) -> Iterator[Place]:
    """The notes of a text of Python."""
    lines = [line.strip() for line in text.splitlines()]
    bare = [line.lstrip("#").lstrip() if line.startswith("#") else line.removeprefix('"""') for line in lines]
    joined = "\n".join(bare)
    for found in NOTE.finditer(joined):
        line = joined.count("\n", 0, found.start())
        is_first = bare[line - 1] == "" or line == 0 or lines[line].startswith('"""')
        is_first |= lines[line].startswith("#") and not lines[line - 1].startswith("#")
        is_definition = is_first and joined[: found.start()].rpartition("\n")[2] == ""
        named = OWNER.match(joined, found.end())
        owner = owner_of(text, line + 1, path) if is_definition else named.group(1) if named else ""
        yield Place(" ".join(found.group(1).split()), path, line + 1, is_definition, owner)


def owner_of(text: str, line: int, path: str) -> str:
    """The innermost class around a line, or else the function; where it is private, or there is none, the file."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    around = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    around = [node for node in around if node.lineno <= line <= (node.end_lineno or 0)]
    classes = [node for node in around if isinstance(node, ast.ClassDef)]
    found = (classes[-1:] or around[:1] or [None])[0]
    return path.rpartition("/")[2] if found is None or found.name.startswith("_") else found.name


def faults(places: list[Place]) -> list[str]:
    """A sentence for each note without one definition, and for each citation that does not name its owner."""
    definitions = defaultdict[str, list[Place]](list)
    for place in places:
        if place.is_definition:
            definitions[place.name].append(place)
    found = [
        f"[Note: {name}] has definitions in {', '.join(f'{x.path}:{x.line}' for x in several)}: expected one"
        for name, several in definitions.items()
        if len(several) > 1
    ]
    for place in places:
        cited = f"{place.path}:{place.line} cites [Note: {place.name}]"
        if place.name not in definitions:
            found.append(f"{cited}, which no file defines")
        elif place.path not in {definition.path for definition in definitions[place.name]}:
            owner = definitions[place.name][0].owner
            if place.owner != owner:
                found.append(f"{cited}: expected 'of `{owner}`' after it, got {place.owner or 'nothing'!r}")
    return found


def all_notes() -> list[Place]:
    """The notes of all files of Python but this one."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return [place for path, text in texts.items() if "[Note:" in text for place in notes_in(text, path)]


def test_each_note_has_one_definition_and_citations_name_its_owner() -> None:
    assert faults(all_notes()) == []


def test_notes_that_pages_cite_have_a_definition() -> None:
    known = {place.name for place in all_notes() if place.is_definition}
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    cited = {" ".join(name.split()) for text in texts.values() for name in NOTE.findall(text)} - {"..."}
    assert cited <= known


LIBRARY = '''
class Owner:
    """It has a note.

    [Note: order] The first is first. See [Note: order], and [Note: missing].
    """
'''


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# See [Note: order] of `Owner`.", []),
        ("# See [Note:\n# order] of\n# `Owner`.", []),
        ("x = 1  # [Note: order]", ["b.py:1 cites [Note: order]: expected 'of `Owner`' after it, got 'nothing'"]),
        ("x = 1  # [Note: order] of `A`", ["b.py:1 cites [Note: order]: expected 'of `Owner`' after it, got 'A'"]),
        ("# [Note: order] It is another one.", ["[Note: order] has definitions in a.py:5, b.py:1: expected one"]),
    ],
)
def test_faults_are_found(text: str, expected: list[str]) -> None:
    missing = "a.py:5 cites [Note: missing], which no file defines"
    found = faults([*notes_in(LIBRARY, "a.py"), *notes_in(text, "b.py")])
    assert sorted(found) == sorted([missing, *expected])

"""docs/coming_from: the tables are those that the code looks up, and the pages are short."""

from __future__ import annotations

import re

from docs.old_names import PAGES, TABLES, rendered
from tests.harness.pages import blocks

TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}


def test_the_tables_of_the_pages_are_those_of_the_code() -> None:
    assert [stem for stem, text in TEXTS.items() if rendered(text) != text] == [], "run python docs/old_names.py"
    named = re.findall(r"<!-- table: ([\w-]+) -->", "\n".join(TEXTS.values()))
    assert sorted(named) == sorted(TABLES)
    assert min(len(table.splitlines()) for table in TABLES.values()) > 2


def test_a_table_that_has_changed_is_seen() -> None:
    text = "before\n<!-- table: dpwa-options -->\n\n| old |\n\n<!-- end -->\nafter\n"
    assert (
        rendered(text) == f"before\n<!-- table: dpwa-options -->\n\n{TABLES['dpwa-options']}\n\n<!-- end -->\nafter\n"
    )


def test_each_page_shows_old_and_new_and_tells_the_differences() -> None:
    index = TEXTS["index"]
    for page in PAGES:
        if page.stem == "index":
            continue
        headings = re.findall(r"^## (.*)$", TEXTS[page.stem], flags=re.MULTILINE)
        assert headings[:4] == ["What you typed", "What you type now", "What differs", "What has no counterpart"], page
        assert blocks(page, "py"), page
        assert blocks(page, "python"), page
        assert f"]({page.name})" in index

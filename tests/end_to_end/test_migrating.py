"""docs/guides/migrating.md: its tables are those that the code looks up."""

from __future__ import annotations

from docs.migrating import PAGE, TABLES, rendered


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert rendered(text) == text, "run python docs/migrating.py"
    for name, table in TABLES.items():
        assert f"<!-- table: {name} -->\n\n{table}\n" in text
        assert len(table.splitlines()) > 2


def test_a_table_that_has_changed_is_seen() -> None:
    text = "before\n<!-- table: dpwa-options -->\n\n| old |\n\n<!-- end -->\nafter\n"
    assert (
        rendered(text) == f"before\n<!-- table: dpwa-options -->\n\n{TABLES['dpwa-options']}\n\n<!-- end -->\nafter\n"
    )

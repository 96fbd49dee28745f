"""Tables of Markdown, from rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd


def table(rows: pd.DataFrame, columns: Mapping[str, tuple[str, str]]) -> str:
    """The columns as a Markdown table; an empty cell stays empty."""
    lines = [f"| {' | '.join(header for header, _ in columns.values())} |"]
    lines.append(f"|{'|'.join('---' if form == 's' else '---:' for _, form in columns.values())}|")
    for row in rows.to_dict("records"):
        cells = [_cell(row[name], form) for name, (_, form) in columns.items()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def grid(
    rows: pd.DataFrame,
    index: tuple[str, str],
    columns: str,
    values: str,
    form: str,
    heads: str = "{}",
    how: str = "mean",
) -> str:
    """A table with a row for each value of one column and a column for each value of another one.

    Args:
        rows: to show.
        index: name and header of the column that names the rows.
        columns: name of the column that names the columns.
        values: name of the column in the cells.
        form: format of a cell.
        heads: format of a header.
        how: what a cell shows of several rows, by its name in pandas.
    """
    cells = rows.pivot_table(index=index[0], columns=columns, values=values, sort=False, aggfunc=how)
    shown = {name: (heads.format(name), form) for name in cells}
    return table(cells.reset_index(), {index[0]: (index[1], "s"), **shown})


def _cell(value: Any, form: str) -> str:
    if pd.isna(value):
        return ""
    return format(int(value) if form.endswith("d") else value, form)

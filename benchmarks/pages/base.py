"""Page: what a page of docs/benchmarks/ is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pandas as pd

LAST_WITH_SCRIPTS = "bb6c722"
"""The last commit that has the scripts of all studies."""


@dataclass(frozen=True)
class Page:
    """A page and the CSV file it is made of.

    Attributes:
        title: of the page.
        csv: name of the file in benchmarks/results/.
        text: what is measured, and how to read it.
        columns: columns of the table: the name in the CSV file, the header here, and the format of a number.
        summary: makes what stands before the table.
        render: makes the figures of a page that is no plain table.
        also: names of other files there that it reads.
        may_be_missing: whether it is made only when all of these are there.
        script: the script of a finished study, which is in the tree of `LAST_WITH_SCRIPTS` and not in this one.
    """

    title: str
    csv: str
    text: str
    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    summary: Callable[[pd.DataFrame], str] | None = None
    render: Callable[[pd.DataFrame], str] | None = None
    also: tuple[str, ...] = ()
    may_be_missing: bool = False
    script: str = ""

"""Page: what a page of docs/benchmarks/ is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pandas as pd


@dataclass(frozen=True)
class Page:
    """A page and the CSV file it is made of.

    Attributes:
        title: of the page.
        csv: name of the file in benchmarks/results/.
        text: what is measured, and how to read it.
        columns: columns of the table: the name in the CSV file, the header here, and the format of a number.
        render: makes the figures of a page that is no plain table.
        also: names of other files there that it reads.
        script: of a finished study, which is not in the tree any more: a commit that has the script, a colon, its path.
    """

    title: str
    csv: str
    text: str = ""
    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    render: Callable[[pd.DataFrame], str] | None = None
    also: tuple[str, ...] = ()
    script: str = ""

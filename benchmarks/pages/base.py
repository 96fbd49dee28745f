"""Page: what a page of docs/benchmarks/ is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pandas as pd

QUESTIONS = (
    "Is it as accurate?",
    "Is it as fast?",
    "What does a failure cost?",
    "How many rounds and bytes?",
    "Is the Lab right?",
)
"""Headings of the index, in order. Pages without a question come last."""


@dataclass(frozen=True)
class Page:
    """A page and the CSV file it is made of.

    A page shows `text`, `summary`, all rows, `parts`, `sections`, `setup` and the commands, in this order. All rows are
    folded if there is a summary. `render` writes no command: each page ends with the commands of its rows. In `text`,
    `setup` and `result`, `{subject.name}` stands for the text of a claim (`benchmarks.claims`).

    Attributes:
        title: of the page.
        csv: name of the file in benchmarks/results/.
        text: the result with its figures, in two to five sentences.
        columns: columns of the table of all rows: the name in the CSV file, the header here, the format of a number.
        render: writes all rows where they are no plain table.
        also: names of other files there that it reads.
        measures: the files and folders of the library that the figures depend on.
        summary: writes a short table or a picture.
        setup: how it was measured, and what the columns mean.
        parts: related measurements, each folded, with commands of its own.
        sections: other studies by name, each with a heading, its result and its commands (`benchmarks.sections`).
        question: the heading of the index that lists the page, one of QUESTIONS.
        result: the result in one sentence, for the index.
    """

    title: str
    csv: str
    text: str = ""
    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    render: Callable[[pd.DataFrame], str] | None = None
    also: tuple[str, ...] = ()
    measures: tuple[str, ...] = ("gossip_modules",)
    summary: Callable[[pd.DataFrame], str] | None = None
    setup: str = ""
    parts: tuple[Page, ...] = ()
    sections: Mapping[str, Page] = field(default_factory=dict)
    question: str = ""
    result: str = ""

    def measurements(self) -> Iterator[Page]:
        """Yield the page, its parts, and its sections with theirs."""
        yield self
        yield from self.parts
        for section in self.sections.values():
            yield from section.measurements()

    def files(self) -> tuple[str, ...]:
        """The CSV files that the page reads."""
        return tuple(name for own in self.measurements() for name in (own.csv, *own.also))

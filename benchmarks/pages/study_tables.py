"""Pages and tables of the CSV files of `benchmarks.studies`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.record import RESULTS, rows_of
from benchmarks.studies.ends import ends, trainings
from benchmarks.tables import grid, table

Rule: TypeAlias = Callable[[pd.DataFrame], bool]
__all__ = ["all_rows", "ends", "has", "has_trainings", "progress", "study_page", "together", "trainings"]
COLUMNS = {
    "method": ("method", "s"),
    "workers": ("workers", "d"),
    "seed": ("seed", "d"),
    "rate": ("rate", "g"),
    "steps": ("steps", ",d"),
}
"""What names a training, in a table of all of them."""


def together(texts: Sequence[str]) -> str:
    """Return a list of at least one text in words: "a, b and c"."""
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]


def study_page(
    name: str,
    title: str,
    said: Callable[[pd.DataFrame], str],
    is_ready: Rule,
    *,
    planned: int = 0,
    **page: Any,
) -> dict[str, Page]:
    """Return the page of a study by its name; empty: rows that its first sentence compares are missing.

    Args:
        name: of the page and of its CSV file.
        title: of the page.
        said: the result in words, from the rows; the index has its bold sentence.
        is_ready: whether the rows suffice for `said`.
        planned: the number of trainings of the study; 0: it has none.
        page: the other fields of `Page`.
    """
    csv = f"{name}.csv"
    if not (RESULTS / csv).is_file() or not is_ready(rows := rows_of(csv)):
        return {}
    text = said(rows)
    _, result, rest = text.split("**", 2)
    so_far = progress(rows, planned) if planned else ""
    shown = " ".join(filter(None, (f"**{result}**", so_far, rest.strip())))
    return {name: Page(title, csv, shown, result=result, **page)}


def has(columns: tuple[str, ...], *needed: tuple[Any, ...]) -> Rule:
    """Return a rule: the rows have each of these values in these columns."""
    return lambda rows: {*needed} <= set(rows[list(columns)].itertuples(index=False, name=None))


def has_trainings(*needed: tuple[str, int]) -> Rule:
    """Return a rule: a training of each of these methods and numbers of workers has ended."""
    return lambda rows: has(("method", "workers"), *needed)(trainings(rows))


def all_rows(rows: pd.DataFrame, columns: Mapping[str, tuple[str, str]], scores: str, form: str) -> str:
    """Write the end of each training, and the validation scores of the short trainings that chose rates.

    Args:
        rows: of a study.
        columns: of the table of ends, after COLUMNS.
        scores: their name.
        form: their format.
    """
    texts = [table(trainings(rows), {**COLUMNS, **columns})]
    tuning = rows[rows["is_tuning"] & (rows["step"] == rows["steps"])].sort_values("rate", kind="stable")
    if len(tuning):
        texts.append(f"{scores} of the short trainings that chose rates, with the first seed:")
    for workers, own in tuning.groupby("workers"):
        texts.append(f"{workers} workers, {own['steps'].iloc[0]:,} steps")
        texts.append(grid(own, ("method", "method"), "rate", "validation", form, "rate {:g}"))
    return "\n\n".join(texts)


def progress(rows: pd.DataFrame, planned: int) -> str:
    """Return a sentence about the trainings that have rows; "" if all have.

    Args:
        rows: of a study.
        planned: the number of trainings of the study.
    """
    done = len(trainings(rows))
    if done == planned:
        return ""
    return f"The study has {done} of its {planned} trainings."

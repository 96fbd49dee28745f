"""Headline: a figure of a paper, beside the figure of a CSV file of benchmarks/results/."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.record import rows_of

__all__ = ["IN_PART", "NO", "YES", "Headline", "by_effect", "by_limit", "by_ratio", "rows_of"]

YES, IN_PART, NO, OTHER_SCALE = "yes", "in part", "**no**", "not comparable at this scale"
ENOUGH = 0.8
"""The share of a published effect from which on a headline counts as reproduced."""


@dataclass(frozen=True)
class Headline:
    """A claim of a paper, and what was measured here.

    Attributes:
        paper: the method and the paper.
        theirs: the published figure, in words.
        scale: what was trained or timed here.
        csvs: the files in benchmarks/results/ that the figure comes from; the first one leads to the commands.
        page: the name of the page in docs/benchmarks/ that has the rows.
        measure: reads the files, and returns the figure in words and one of YES, IN_PART, NO and OTHER_SCALE.
    """

    paper: str
    theirs: str
    scale: str
    csvs: tuple[str, ...]
    page: str
    measure: Callable[[], tuple[str, str]]


def by_effect(ours: float, theirs: float) -> str:
    """Return whether an effect is reproduced: at least `ENOUGH` of it, its direction only, or not even that.

    Effects are compared before they are rounded. They are differences, or logarithms of ratios.

    >>> by_effect(0.9, 1.0), by_effect(0.5, 1.0), by_effect(-0.5, 1.0)
    ('yes', 'in part', '**no**')
    """
    share = ours / theirs
    return YES if share >= ENOUGH - 1e-9 else IN_PART if share > 0 else NO


def by_ratio(ours: float, theirs: float) -> str:
    """`by_effect` of the logarithms of two ratios."""
    return by_effect(math.log(ours), math.log(theirs))


def by_limit(gap: float, limit: float, most: float) -> str:
    """Return whether a gap is within a limit; IN_PART: it is within `most`.

    >>> by_limit(0.31, 0.3, 1.2)
    'in part'
    """
    return YES if gap <= limit else IN_PART if gap <= most else NO

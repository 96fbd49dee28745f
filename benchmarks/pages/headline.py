"""Headline: a figure of a paper, beside the figure of a CSV file of benchmarks/results/."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.record import rows_of

__all__ = [
    "IN_PART",
    "NO",
    "OTHER_SCALE",
    "YES",
    "Headline",
    "by_effect",
    "by_level",
    "by_limit",
    "by_order",
    "by_ratio",
    "of_all_scales",
    "order_found",
    "rows_of",
    "worst",
]

YES, IN_PART, NO, OTHER_SCALE = "yes", "in part", "**no**", "not comparable at this scale"
ENOUGH = 0.8
"""The share of a published effect from which on a headline counts as reproduced."""
LEVEL, NEAR = 0.5, 1.0
"""Two accuracies that differ by at most LEVEL points are the same, and by at most NEAR points in part."""
EXACT = 1e-5
"""Errors are float32: gaps are compared with thresholds plus this."""
LEAST_SHARE, ENOUGH_ROUNDS = 0.1, 100
"""The share of a published extent that a measurement needs, and a number of rounds that is enough in any case."""


@dataclass(frozen=True)
class Headline:
    """A claim of a paper, and a measurement of it. Headlines with equal `paper` and `theirs` are one published result.

    Attributes:
        paper: the method and the paper.
        theirs: the published figure, in words.
        scale: what was trained or timed here.
        csvs: the files in benchmarks/results/ that the figure comes from; the first one leads to the commands.
        page: the name of the page in docs/benchmarks/ that has the rows.
        measure: reads the files, and returns the figure in words and one of YES, IN_PART and NO.
        extent: what the claim depends on, by name, as (here, in the paper): see `is_comparable`.
    """

    paper: str
    theirs: str
    scale: str
    csvs: tuple[str, ...]
    page: str
    measure: Callable[[], tuple[str, str]]
    extent: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def is_comparable(self) -> bool:
        """Whether each extent is at least a tenth of the published one; a hundred rounds are enough in any case."""
        return all(
            ours >= LEAST_SHARE * theirs or (name == "rounds" and ours >= ENOUGH_ROUNDS)
            for name, (ours, theirs) in self.extent.items()
        )

    def found(self) -> tuple[str, str]:
        """Return the figure in words and the verdict: that of `measure`, or OTHER_SCALE."""
        text, verdict = self.measure()
        return text, verdict if self.is_comparable else OTHER_SCALE


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


def by_level(gap: float) -> str:
    """Return whether an accuracy is the same as another one, given the points by which it is below.

    >>> by_level(-3.0), by_level(0.7), by_level(1.2)
    ('yes', 'in part', '**no**')
    """
    return by_limit(gap, LEVEL + EXACT, NEAR + EXACT)


def by_order(ours: Mapping[str, float], theirs: Mapping[str, float]) -> tuple[int, int, int]:
    """Return of how many pairs the order is the published one, with at least half of the gap, and how many there are.

    A pair counts if its published figures differ by a point or more.
    """
    gaps = [
        (ours[better] - ours[worse], theirs[better] - theirs[worse])
        for better in theirs
        for worse in theirs
        if theirs[better] - theirs[worse] >= 1 - 1e-9
    ]
    return sum(own > 0 for own, _ in gaps), sum(own >= published / 2 for own, published in gaps), len(gaps)


def order_found(num_in_order: int, num_pairs: int) -> str:
    """Return whether an order is reproduced: all of its pairs, or more than half of them."""
    return YES if num_in_order == num_pairs else IN_PART if num_in_order > num_pairs / 2 else NO


def worst(*verdicts: str) -> str:
    """Return the worst verdict of a claim with several parts."""
    return min(verdicts, key=[NO, IN_PART, YES].index)


def of_all_scales(verdicts: Iterable[str]) -> str:
    """Return the verdict of a published result, given those of its measurements.

    It is YES or NO if all comparable measurements say so, and IN_PART if not.

    >>> of_all_scales([YES, OTHER_SCALE]), of_all_scales([YES, NO]), of_all_scales([OTHER_SCALE])
    ('yes', 'in part', 'not comparable at this scale')
    """
    found = {verdict for verdict in verdicts if verdict != OTHER_SCALE}
    return OTHER_SCALE if not found else found.pop() if len(found) == 1 else IN_PART

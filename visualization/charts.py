"""Charts of curves and of ranges as SVG drawings, with the colours and letters of `visualization.diagrams`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from visualization.diagrams import Drawing, Point

LETTER = 12
"""The size of letters: on a phone, where a drawing is 390 pixels wide, they are 11 pixels high."""
LETTER_WIDTH = 0.6
"""The mean width of a letter in sizes of the letters, in DejaVu Sans: a wide font."""
LINE = 14
"""The least distance of two lines of text."""


class Look(NamedTuple):
    """The look of a curve: the name of a colour of `visualization.diagrams`, and whether the line is dashed."""

    color: str
    dashed: bool = False


class Curve(NamedTuple):
    """A line through points.

    label: the text at its end.
    look: its colour and dashes.
    points: (x, y), from left to right.
    """

    label: str
    look: Look
    points: Sequence[Point]


class SeedRange(NamedTuple):
    """A dot for a mean, and a line from the lowest to the highest value, in a row of its own."""

    label: str
    mean: float
    low: float
    high: float
    color: str = "blue"
    note: str = ""


@dataclass(frozen=True)
class Scale:
    """The scale of an axis.

    Args:
        ticks: the numbers at the axis; the first one and the last one are its ends.
        title: says what the numbers are.
        is_log: whether it is logarithmic.
        names: what stands at the ticks in place of the numbers.
    """

    ticks: Sequence[float]
    title: str
    is_log: bool = False
    names: Sequence[str] = ()

    def share(self, value: float) -> float:
        """Return the place of a value: 0 at the first tick and 1 at the last one."""
        low, high, x = (
            math.log(number) if self.is_log else number for number in (self.ticks[0], self.ticks[-1], value)
        )
        return (x - low) / (high - low)

    def labels(self) -> list[tuple[float, str]]:
        """Return the ticks with the letters at them."""
        return list(zip(self.ticks, self.names or [f"{value:,g}" for value in self.ticks], strict=True))


def ticks(values: Iterable[float], count: int = 5) -> list[float]:
    """Return about `count` round numbers in equal steps, from below the least value to above the greatest one.

    >>> ticks([52.3, 56.9])
    [52, 53, 54, 55, 56, 57]
    """
    found = list(values)
    low, high = min(found), max(found)
    rough = max(high - low, 1e-12) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(math.log(size / rough)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.10g}") if step < 1 else int(number * step) for number in range(first, last + 1)]


class Plane:
    """A box of a drawing with two axes.

    Args:
        drawing: gets the lines and letters.
        corner: the upper left corner of the box, without the letters at its axes.
        size: its width and height.
        x, y: the scales.
    """

    def __init__(self, drawing: Drawing, corner: Point, size: Point, x: Scale, y: Scale) -> None:
        self.drawing, self.corner, self.size, self.x, self.y = drawing, corner, size, x, y
        (left, top), (width, height) = corner, size
        for value, label in y.labels():
            at = self.place(x.ticks[0], value)[1]
            drawing.line([(left, at), (left + width, at)], color="pale", width=1)
            drawing.text((left - 6, at + 4), label, color="muted", size=LETTER, anchor="end")
        for value, label in x.labels():
            at = self.place(value, y.ticks[0])[0]
            drawing.line([(at, top + height), (at, top + height + 4)], color="muted", width=1)
            drawing.text((at, top + height + 17), label, color="muted", size=LETTER)
        drawing.line([(left, top), (left, top + height), (left + width, top + height)], color="muted", width=1)
        drawing.text((left + width / 2, top + height + 34), x.title, size=LETTER)
        drawing.text((left - 30, top - 9), y.title, size=LETTER, anchor="start")

    def place(self, x: float, y: float) -> Point:
        """Return the place of a point in the drawing."""
        return (
            self.corner[0] + self.size[0] * self.x.share(x),
            self.corner[1] + self.size[1] * (1 - self.y.share(y)),
        )

    def curves(self, curves: Sequence[Curve]) -> None:
        """Draw curves, each with its label to the right of its end."""
        for curve in curves:
            points = [self.place(*point) for point in curve.points]
            self.drawing.line(points, color=curve.look.color, dashed=curve.look.dashed, width=1.8)
            for point in points if len(points) <= 8 else points[-1:]:
                self.drawing.dot(point, color=curve.look.color, radius=2.8)
        ends = [self.place(*curve.points[-1]) for curve in curves]
        heights = apart([y for _, y in ends], LINE, top=self.corner[1], bottom=self.corner[1] + self.size[1])
        for curve, (x, y), height in zip(curves, ends, heights, strict=True):
            right = self.corner[0] + self.size[0]
            if abs(height - y) > 3 or x < right - 3:
                self.drawing.line([(x + 4, y), (right + 6, height)], color=curve.look.color, width=0.7)
            self.drawing.text((right + 9, height + 4), curve.label, color=curve.look.color, size=LETTER, anchor="start")


def apart(heights: Sequence[float], least: float, *, top: float, bottom: float) -> list[float]:
    """Return heights in their order, moved so that each two differ by at least `least`, as near as that allows.

    >>> apart([10, 12, 40], 14, top=0, bottom=60)
    [4.0, 18.0, 40.0]
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[int]] = [[i] for i in order]

    def middle(group: list[int]) -> float:
        half = least * (len(group) - 1) / 2
        mean = sum(heights[i] for i in group) / len(group)
        return min(max(mean, top + half), bottom - half)

    merged = True
    while merged:
        merged = False
        for k in range(len(groups) - 1):
            lower, upper = groups[k], groups[k + 1]
            needed = least * (len(lower) + len(upper)) / 2
            if middle(upper) - middle(lower) < needed - 1e-9:
                groups[k : k + 2] = [lower + upper]
                merged = True
                break
    found = [0.0] * len(heights)
    for group in groups:
        start = middle(group) - least * (len(group) - 1) / 2
        for k, i in enumerate(group):
            found[i] = start + least * k
    return found


def ranges(drawing: Drawing, top: float, left: float, width: float, x: Scale, rows: Sequence[SeedRange]) -> float:
    """Draw a row for each range, with its label on the left and its note on the right; returns the height below them.

    Args:
        drawing: gets the lines and letters.
        top: the height of the first row.
        left: the place of the first tick.
        width: the distance of the last tick.
        x: the scale.
        rows: from the first to the last.
    """
    pitch, bottom = 20.0, top + 20.0 * len(rows)
    for value, label in x.labels():
        at = left + width * x.share(value)
        drawing.line([(at, top - 4), (at, bottom)], color="pale", width=1)
        drawing.text((at, bottom + 14), label, color="muted", size=LETTER)
    for number, row in enumerate(rows):
        y = top + pitch * number + 8
        low, mean, high = (left + width * x.share(value) for value in (row.low, row.mean, row.high))
        drawing.text((left - 10, y + 4), row.label, size=LETTER, anchor="end")
        if high - low > 1:
            drawing.line([(low, y), (high, y)], color=row.color, width=2)
        drawing.dot((mean, y), color=row.color, radius=4)
        drawing.text((left + width + 10, y + 4), row.note, color="muted", size=LETTER, anchor="start")
    drawing.text((left + width / 2, bottom + 31), x.title, size=LETTER)
    return bottom + 44

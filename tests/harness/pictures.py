"""Where letters of SVG pictures of `visualization.diagrams` stand, in DejaVu Sans: a wide font of Linux desktops."""

from __future__ import annotations

import re
from functools import cache
from html import unescape
from itertools import combinations
from typing import NamedTuple

from matplotlib.font_manager import FontProperties, findfont, get_font

ASCENT, DESCENT = 0.76, 0.24
"""The height of letters above and below the line that they stand on, in sizes of the font."""
TEXT = re.compile(
    r'<text x="([-\d.]+)" y="([\d.]+)" class="f-\w+" font-size="([\d.]+)" text-anchor="(\w+)"([^>]*)>([^<]*)<'
)


class TextBox(NamedTuple):
    """A line of letters and its place in the picture."""

    letters: str
    size: float
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: TextBox) -> bool:
        """Return whether letters of both stand at one place."""
        return (
            min(self.right, other.right) - max(self.left, other.left) > 0.5
            and min(self.bottom, other.bottom) - max(self.top, other.top) > 0.5
        )


@cache
def _width(letters: str, weight: str) -> float:
    """Return the width of letters of the size 100."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans", weight=weight)))
    font.set_size(100, 72)
    font.set_text(letters)
    return font.get_width_height()[0] / 64


def text_boxes(svg: str) -> list[TextBox]:
    """Return all lines of letters of a picture."""
    found = []
    for x, y, size, anchor, attributes, escaped in TEXT.findall(svg):
        letters, height = unescape(escaped), float(size)
        width = _width(letters, "bold" if "bold" in attributes else "normal") * height / 100
        left = float(x) - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        top, bottom = float(y) - ASCENT * height, float(y) + DESCENT * height
        found.append(TextBox(letters, height, left, top, left + width, bottom))
    return found


def collisions(svg: str) -> list[tuple[str, str]]:
    """Return pairs of lines of letters that stand at one place."""
    return [(a.letters, b.letters) for a, b in combinations(text_boxes(svg), 2) if a.meets(b)]

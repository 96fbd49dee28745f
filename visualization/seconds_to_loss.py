"""Seconds to an equal loss: a panel of bars for each speed of the links, a bar for each method."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from visualization.charts import LETTER, LETTER_WIDTH
from visualization.diagrams import WIDTH, Drawing

PITCH, BAR, NUMBER = 20.0, 14.0, 84.0
"""The distance of two bars, the height of a bar, and the width of the number beside the longest one."""
COLORS = (
    ("Overlap SGP", "green"),
    ("AD-PSGD", "muted"),
    ("D-PSGD", "orange"),
    ("Decent-DP", "orange"),
    ("DDP", "ink"),
    ("SGP", "blue"),
)
"""The colour of the first name that a label begins with; others, which communicate less often, are purple."""


def draw(table: pd.DataFrame, labels: Sequence[str], title: str) -> Drawing:
    """Draw the panels.

    Args:
        table: columns label, rate (Gbit/s), seconds (NaN: the loss is not reached) and share (of the first bar's). A
            label without a row was not measured.
        labels: of the bars, from top to bottom.
        title: above the panels.
    """
    rates = sorted(table["rate"].unique())
    panel = 34 + PITCH * len(labels)
    drawing = Drawing(title, 24 + panel * len(rates))
    drawing.text((WIDTH / 2, 18), title, bold=True)
    left = 14 + LETTER_WIDTH * LETTER * max(map(len, labels))
    for number, rate in enumerate(rates):
        top = 24 + panel * number
        drawing.text((left, top + 20), f"links of {rate:g} Gbit/s", size=LETTER, anchor="start", bold=True)
        measured = table[table["rate"] == rate].set_index("label")["seconds"]
        own = measured.reindex(labels)
        longest = float(own.max())
        for place, (label, seconds) in enumerate(own.items()):
            y = top + 30 + PITCH * place
            drawing.text((left - 6, y + BAR - 3), str(label), size=LETTER, anchor="end")
            is_reached = seconds == seconds
            end = left + (WIDTH - NUMBER - left) * seconds / longest if is_reached else left
            if is_reached:
                drawing.box((left, y), (end - left, BAR), color=color_of(str(label)))
            drawing.text(
                (end + 5, y + BAR - 3),
                f"{seconds:.0f} s" if is_reached else "not reached" if label in measured else "not measured",
                color="ink" if is_reached else "muted",
                size=LETTER,
                anchor="start",
            )
    return drawing


def color_of(label: str) -> str:
    """Return the name of the colour of a method.

    >>> color_of("DDP, fp16 hook"), color_of("DiLoCo, H = 30")
    ('ink', 'purple')
    """
    return next((color for name, color in COLORS if label.startswith(name)), "purple")

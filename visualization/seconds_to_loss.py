"""Seconds to an equal loss: a panel of bars for each speed of the links, a bar for each method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from visualization.style import MUTED, method_styles, new_figure, save, styled

WIDTH, BAR = 4.1, 0.19
"""The width of the picture and the height of a bar with its gap, in inches. A phone shows the letters at full size."""
LETTERS = 9.0
"""The size of letters, in points."""


def draw(table: pd.DataFrame, labels: Sequence[str], title: str, output: Path) -> Path:
    """Draw the panels as the file `output`; returns it.

    Args:
        table: columns label, rate (Gbit/s), seconds (NaN: the loss is not reached) and share (of the first bar's).
        labels: of the bars, from top to bottom.
        title: above the panels.
        output: the file.
    """
    rates, looks = sorted(table["rate"].unique()), method_styles(labels)
    with styled():
        figure = new_figure(WIDTH, 0.55 + len(rates) * (0.42 + BAR * len(labels)))
        axes = figure.subplots(len(rates), 1, squeeze=False)[:, 0]
        for axis, rate in zip(axes, rates, strict=True):
            own = table[table["rate"] == rate].set_index("label").reindex(labels)
            seconds = own["seconds"].fillna(0.0)
            axis.barh(labels, seconds, height=0.72, color=[looks[label]["color"] for label in labels])
            for place, row in enumerate(own.itertuples()):
                text = f"{row.seconds:.0f} s" if row.seconds == row.seconds else "not reached"
                axis.annotate(text, (seconds.iloc[place], place), (3, 0), textcoords="offset points", va="center",
                              fontsize=LETTERS, color=MUTED if row.seconds != row.seconds else "black")  # fmt: skip
            axis.set_title(f"links of {rate:g} Gbit/s", fontsize=LETTERS + 0.5, loc="left")
            axis.set(xlim=(0, 1.17 * seconds.max()), xticks=[])
            axis.tick_params(labelsize=LETTERS, left=False)
            axis.invert_yaxis()
            axis.grid(visible=False)
            axis.spines[["bottom", "left"]].set_visible(False)
        figure.suptitle(title, fontsize=LETTERS + 1)
        return save(figure, output)

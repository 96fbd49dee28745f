"""How every picture here looks: legible at the width of a column, and told apart without colour too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend

Format: TypeAlias = Literal["png", "svg", "pdf"]

COLUMN, PAGE = 3.3, 6.9
"""Widths of a column and of a page of two columns, in inches."""
SMALL = 7
"""The smallest letters, in points."""
MUTED = "#767676"
"""Of what is no data: contrast 4.5 to 1 on white."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito, "Color Universal Design", 2008, without the yellow that white paper swallows."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
SETTINGS: Mapping[str, Any] = {
    "font.size": SMALL + 0.5,
    "axes.titlesize": SMALL + 1,
    "axes.labelsize": SMALL + 0.5,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "figure.titlesize": SMALL + 1.5,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.grid.which": "major",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.5,
    "grid.color": "#D8D8D8",
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "legend.frameon": False,
    "legend.handlelength": 2.6,  # a dash pattern needs the room
    "legend.columnspacing": 1.2,
    "figure.constrained_layout.h_pad": 0.04,
    "figure.constrained_layout.w_pad": 0.04,
    "savefig.dpi": 220,
    "svg.hashsalt": "gossip_modules",  # equal data, equal file
    "svg.fonttype": "path",  # looks the same where the fonts are others
    "pdf.fonttype": 42,
}
MAX_MARKERS = 12


@contextmanager
def styled() -> Iterator[None]:
    """Everything drawn and saved within has the look of this module; matplotlib's settings are put back after."""
    settings: Any = SETTINGS  # matplotlib types the names of all its settings
    with mpl.rc_context(settings):
        yield


def new_figure(width: float = COLUMN, height: float = 2.4) -> Figure:
    """A figure of its own, none of pyplot: nothing global, no display needed.

    Args:
        width, height: in inches; COLUMN or PAGE wide.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def line_style(index: int, num_points: int) -> dict[str, Any]:
    """Colour, dashes and markers of the line number `index`: all three differ from those of its neighbours.

    Args:
        index: of the line, from 0.
        num_points: of the line; of many points some carry a marker, other ones on each line.
    """
    every = max(1, -(-num_points // MAX_MARKERS))
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markevery": (index % every, every),
    }


def as_label(name: str) -> str:
    """`name` letter by letter: matplotlib reads mathematics between dollars, and hides what begins with a _."""
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def legend_columns(labels: Sequence[str], width: float) -> int:
    """How many labels fit side by side below a figure.

    Args:
        labels: of the legend.
        width: of the figure, in inches.
    """
    letter = 0.55 * SMALL / 72  # inches: the mean width of a letter
    longest = max(map(len, labels), default=0) * letter + 0.5
    return max(1, min(len(labels), int(width / longest)))


def add_legend(figure: Figure, axes: Iterable[Axes], *, least: int = 2) -> Legend | None:
    """One legend below the figure, where it covers no data: each label of the axes once, in their order.

    Args:
        figure: of the axes.
        axes: whose lines have labels.
        least: so many labels make a legend; one line needs not be told apart.

    Returns:
        None where there are fewer.
    """
    shown: dict[str, Artist] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    if len(shown) < least:
        return None
    columns = legend_columns(list(shown), figure.get_figwidth())
    handles = list(shown.values())
    return figure.legend(handles, list(shown), loc="outside lower center", ncols=columns)


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG, SVG or PDF, as the name ends; returns `path`.

    Files have no date in them, so that equal data make equal files.
    """
    undated: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    figure.savefig(path, metadata=undated.get(path.suffix.lower(), {}))
    return path

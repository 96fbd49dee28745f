"""How every picture here looks: legible at the width of a column, and told apart without colour too."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

Format: TypeAlias = Literal["png", "svg", "pdf"]


class MethodStyle(NamedTuple):
    """How a method looks and what it is called.

    Attributes:
        title: that of gossip_modules.methods.
        color: the color of its lines and bars in every picture.
        words: that name it in labels, in lower case.
    """

    title: str
    color: str
    words: tuple[str, ...]


COLUMN, PAGE, PHONE = 3.3, 5.5, 4.1
"""Widths of a column of two, of the text of a page, and of a picture that a phone shows at its own size, in inches."""
SMALL, LEGIBLE = 7.5, 9.0
"""The smallest letters, and those of pictures for a phone, in points."""
MUTED = "#767676"
"""Of what is no data: contrast 4.5 to 1 on white."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito, "Color Universal Design", 2008, without the yellow that white paper swallows."""
METHOD_STYLES: Mapping[str, MethodStyle] = {
    "none": MethodStyle("no communication", "#767676", ("no communication", "none", "local")),
    "ar": MethodStyle("AllReduce SGD", "#000000", ("allreduce", "all-reduce", "ar", "ddp")),
    "dpsgd": MethodStyle("D-PSGD", "#D55E00", ("d-psgd", "dpsgd", "plain", "bfloat16")),
    "sgp": MethodStyle("SGP", "#0072B2", ("sgp",)),
    "osgp": MethodStyle("Overlap SGP", "#56B4E9", ("osgp", "overlap sgp", "sgp, overlap")),
    "matcha": MethodStyle("MATCHA", "#009E73", ("matcha", "equal p")),
    "choco": MethodStyle("CHOCO-SGD", "#CC79A7", ("choco", "choco-sgd")),
    "deepsqueeze": MethodStyle("DeepSqueeze", "#882255", ("deepsqueeze",)),
    "moniqua": MethodStyle("Moniqua", "#332288", ("moniqua",)),
    "powergossip": MethodStyle("PowerGossip", "#E69F00", ("powergossip", "power")),
    "adpsgd": MethodStyle("AD-PSGD", "#8A7500", ("ad-psgd", "adpsgd")),
    "a2cid2": MethodStyle("A2CiD2", "#BBDD00", ("a2cid2",)),
    "wagma": MethodStyle("WAGMA-SGD", "#7F3B08", ("wagma", "wagma-sgd")),
    "dpwa": MethodStyle("dpwa", "#E7298A", ("dpwa",)),
    "localsgd": MethodStyle("Local SGD", "#66A61E", ("local sgd", "localsgd", "post-local sgd", "local-average")),
    "diloco": MethodStyle("DiLoCo", "#1F78B4", ("diloco",)),
    "streamingdiloco": MethodStyle("Streaming DiLoCo", "#08519C", ("streaming diloco", "streamingdiloco")),
    "eagerdiloco": MethodStyle("Eager DiLoCo", "#6BAED6", ("eager diloco", "eagerdiloco")),
    "muloco": MethodStyle("MuLoCo", "#9900EE", ("muloco",)),
    "isoloco": MethodStyle("IsoLoCo", "#7F7FDD", ("isoloco",)),
    "sparseloco": MethodStyle("SparseLoCo", "#2E7D6B", ("sparseloco",)),
    "pulseloco": MethodStyle("PULSELoCo", "#5B6FB5", ("pulseloco",)),
    "slowmo": MethodStyle("SlowMo", "#A6761D", ("slowmo",)),
    "noloco": MethodStyle("NoLoCo", "#6A3D9A", ("noloco",)),
    "gasloc": MethodStyle("GASLoC", "#B15928", ("gasloc",)),
    "qgdsgdm": MethodStyle("QG-DSGDm", "#00796B", ("qg-dsgdm", "qgdsgdm", "qg-dsgdm-n")),
    "d2": MethodStyle("D2", "#C2185B", ("d2",)),
    "exactdiffusion": MethodStyle("Exact diffusion", "#5D4037", ("exact diffusion", "exactdiffusion")),
    "extra": MethodStyle("EXTRA", "#9C5B00", ("extra",)),
    "gradienttracking": MethodStyle("Gradient tracking", "#3949AB", ("gradient tracking", "gradienttracking")),
    "kgt": MethodStyle("K-GT", "#1E2DB4", ("k-gt", "kgt")),
    "proxskip": MethodStyle("ProxSkip", "#A5004B", ("proxskip", "scaffnew")),
    "relaysgd": MethodStyle("RelaySGD", "#00838F", ("relaysgd", "relaysum")),
    "sparta": MethodStyle("SPARTA", "#9E2A2B", ("sparta",)),
    "clippedgossip": MethodStyle("ClippedGossip", "#455A64", ("clippedgossip",)),
    "trimmedmean": MethodStyle("Trimmed mean", "#145C14", ("trimmedmean", "trimmed mean")),
    "decentlam": MethodStyle("DecentLaM", "#558B2F", ("decentlam",)),
}
"""The one colour of each method in all pictures, by the name of its recipe: see `method_of` and `method_styles`."""
OTHERS = ("#A6A6A6", "#B8A36A", "#7A8FB0", "#B07A7A", "#6FA08B")
"""Colours of what is no method, beside methods."""
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
DARK = "@media (prefers-color-scheme: dark) { svg { filter: invert(1) hue-rotate(180deg) brightness(1.5) } }"
"""For pictures in a page; the page tells an image its colour scheme."""


@contextmanager
def styled(smallest: float = SMALL) -> Iterator[None]:
    """Everything drawn and saved within has the look of this module; matplotlib's settings are put back after.

    Args:
        smallest: the size of the smallest letters, in points.
    """
    sizes = {
        name: size + smallest - SMALL for name, size in SETTINGS.items() if name.endswith("size") and size >= SMALL
    }
    settings: Any = {**SETTINGS, **sizes}  # matplotlib types the names of all its settings
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
        index: the index of the line, from 0.
        num_points: the number of points of the line.
    """
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markevery": mark_every(num_points),
    }


def method_of(label: str) -> str | None:
    """The key of METHOD_STYLES that a label names first: "osgp" of "OSGP, bfloat16 on the wire"; None: no method.

    Args:
        label: title of a line or bar, or the name of a run.
    """
    text = label.lower()
    found = []
    for name, method in METHOD_STYLES.items():
        for word in method.words:
            if match := re.search(rf"(?<![a-z-]){re.escape(word)}(?![a-z])", text):
                found.append((match.start(), -len(word), name))
    return min(found)[2] if found else None


def method_styles(labels: Sequence[str], methods: Sequence[str | None] | None = None) -> dict[str, dict[str, Any]]:
    """Colour, dashes and marker of each label, to be passed to `plot`: the colour is that of its method.

    Variants of a method have other markers, and neighbours other dashes. Labels without a method have colours that no
    method has, or, where no label has a method, COLORS.

    Args:
        labels: the labels of a picture, each once.
        methods: keys of METHOD_STYLES, one per label; where it is None, or left out, the label tells.
    """
    given = methods or [None] * len(labels)
    names = [name if name in METHOD_STYLES else method_of(label) for label, name in zip(labels, given, strict=True)]
    used = {METHOD_STYLES[name].color for name in names if name is not None}
    others = OTHERS if used else COLORS
    order, counts = list(METHOD_STYLES), dict[str | None, int]()
    looks = {}
    for place, (label, name) in enumerate(zip(labels, names, strict=True)):
        variant = counts[name] = counts.get(name, -1) + 1
        color = others[variant % len(others)] if name is None else METHOD_STYLES[name].color
        marker = MARKERS[(variant + (0 if name is None else order.index(name))) % len(MARKERS)]
        looks[label] = {"color": color, "linestyle": DASHES[place % len(DASHES)], "marker": marker}
    return looks


def mark_every(num_points: int) -> list[int]:
    """Each of a few points has a marker; of many only the last one, as a marker looks like a datum; `markevery`."""
    return list(range(num_points)) if num_points <= MAX_MARKERS else [num_points - 1]


def log_scale(axis: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis whose numbers are plain and do not overprint, however few decades it spans."""
    if getattr(axis, f"get_{which}scale")() != "log":
        getattr(axis, f"set_{which}scale")("log")
    low, high = getattr(axis, f"get_{which}lim")()
    decades = np.log10(high / low)
    ticks = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    line = getattr(axis, f"{which}axis")
    # Of 1, 2, 5, 10, ... there might be one number or none in less than 0.8 decades.
    line.set_major_locator(MaxNLocator(4) if decades < 0.8 else LogLocator(subs=ticks))
    if np.log10(low) >= -4 and np.log10(high) <= 5:
        line.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    line.set_minor_formatter(NullFormatter())


def percent_limits(values: Iterable[float]) -> tuple[float, float]:
    """Ends of an axis of percents: whole tens around all values, so that small differences look small."""
    finite = [value for value in values if np.isfinite(value)] or [0.0]
    low = 10 * np.floor(min(finite) / 10)
    return float(min(low, 90.0)), float(min(max(10 * np.ceil(max(finite) / 10), low + 10), 100.0))


def as_label(name: str) -> str:
    """`name` letter by letter: matplotlib reads mathematics between dollars, and hides what begins with a _."""
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def legend_columns(labels: Sequence[str], width: float) -> int:
    """How many labels fit side by side below a figure.

    Args:
        labels: the labels of the legend.
        width: the width of the figure, in inches.
    """
    letter = 0.55 * SMALL / 72  # inches: the mean width of a letter
    longest = max(map(len, labels), default=0) * letter + 0.5
    return max(1, min(len(labels), int(width / longest)))


def add_legend(figure: Figure, axes: Iterable[Axes], *, least: int = 2) -> Legend | None:
    """One legend below the figure, where it covers no data: each label of the axes once, in their order.

    Args:
        figure: the figure of the axes.
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
    """Write the figure as PNG, SVG or PDF, as the name ends; returns `path`. The folder is made if need be.

    Files have no date in them, so that equal data make equal files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".svg":
        path.write_text(as_svg(figure), encoding="utf-8")
    else:
        undated: dict[str, dict[str, Any]] = {".pdf": {"CreationDate": None}}
        figure.savefig(path, metadata=undated.get(path.suffix.lower(), {}))
    return path


def as_svg(figure: Figure) -> str:
    """The figure as an SVG picture that a dark page shows light on dark, with the hues as they are."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    return re.sub(r"(<svg [^>]*>)", rf"\1\n <style>{DARK}</style>", file.getvalue(), count=1)

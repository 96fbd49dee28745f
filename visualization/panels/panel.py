"""Panels: each a plot of one quantity against another, a line per run, of whatever runs have the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from visualization.logs.runs import LoggedRun
from visualization.style import (
    METHOD_STYLES,
    as_label,
    log_scale,
    mark_every,
    method_of,
    method_styles,
    percent_limits,
)

NUM_CLASSES: Mapping[str, int] = {"digits": 10, "cifar10": 10}
"""Of data sets, for the floor of the loss."""
ERROR_TICKS = (0, 0.5, 1, 2, 5, 10, 20, 50, 100)
MAX_NAMES = 3
"""So many runs are named in a title."""
SMALL_ERROR = 10.0
"""Percent; where errors get below, the axis is near to logarithmic."""


class Unit(NamedTuple):
    """So many of a base unit, by this name."""

    size: float
    name: str


UNITS: Mapping[str, tuple[Unit, ...]] = {
    "time_seconds": (Unit(1, "s"), Unit(60, "min"), Unit(3600, "h")),
    "bytes_sent": (Unit(1e6, "MB"), Unit(1e9, "GB"), Unit(1e12, "TB")),
}
"""Of columns, ascending; the largest is taken of which there are ten or more, else the smallest."""


@dataclass(frozen=True)
class Panel:
    """One quantity against another.

    Attributes:
        name: the name of its file.
        title: above it.
        x, y: columns of the tables; x is averaged over ranks.
        xlabel, ylabel: of the axes; where UNITS has x, its unit is added.
        band: column whose range over ranks is shaded around the line; empty: none.
        is_error: draw 100 - y, and so the band.
        floor: returns the lower bound of y for these runs, known beforehand; the picture shows y above it.
        finish: called with the axis and the runs, when all lines are drawn: scales and limits.
    """

    name: str
    title: str
    x: str
    y: str
    xlabel: str
    ylabel: str
    band: str = ""
    is_error: bool = False
    floor: Callable[[Sequence[LoggedRun]], float] = lambda runs: 0.0
    finish: Callable[[Axes, Sequence[LoggedRun]], None] = lambda axis, runs: None

    def runs_with(self, runs: Sequence[LoggedRun]) -> list[LoggedRun]:
        """Those that have something to draw here."""
        return [run for run in runs if self.points(run) is not None]

    def points(self, run: LoggedRun) -> pd.DataFrame | None:
        """The line of a run: x, y, low, high, a row per epoch that has both; None: there is none."""
        if not (run.has(self.x) and run.has(self.y)):
            return None
        rows = run.table[np.isfinite(run.table[[self.x, self.y]]).all(axis=1)]
        if self.x in UNITS:
            rows = rows[rows[self.x] > 0]
        epochs = rows.groupby("epoch")
        points = pd.DataFrame({"x": epochs[self.x].mean(), "y": epochs[self.y].mean()})
        band = self.band if self.band and run.has(self.band) else self.y
        has_band = band == self.band or len(run.seeds) > 1
        points["low"] = epochs[band].min() if has_band else points["y"]
        points["high"] = epochs[band].max() if has_band else points["y"]
        if self.is_error:
            points = points.assign(y=100 - points["y"], low=100 - points["high"], high=100 - points["low"])
        return points if len(points) else None

    def draw(self, axis: Axes, runs: Sequence[LoggedRun]) -> None:
        """Draw the runs that have both quantities, each in the style of its place among all `runs`."""
        lines = {index: points for index, run in enumerate(runs) if (points := self.points(run)) is not None}
        unit = unit_of(self.x, max((points["x"].max() for points in lines.values()), default=0.0))
        looks, floor = run_styles(runs), self.floor(runs)
        for index, points in lines.items():
            points[["y", "low", "high"]] -= floor
            xs = points["x"] / unit.size
            style = looks[index] | {"markevery": mark_every(len(points))}
            axis.plot(xs, points["y"], label=as_label(runs[index].name), **style)
            if (points["high"] > points["low"]).any():
                axis.fill_between(xs, points["low"], points["high"], color=style["color"], alpha=0.18, linewidth=0)
        xlabel = f"{self.xlabel} [{unit.name}]" if unit.name else self.xlabel
        title = f"{self.title}\nabove its floor of {floor:.2f}" if floor else self.title
        axis.set(title=title, xlabel=xlabel, ylabel=self.ylabel)
        if self.x in ("epoch", "step"):
            axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set_xlim(left=0)
        self.finish(axis, runs)


def run_styles(runs: Sequence[LoggedRun]) -> list[dict[str, Any]]:
    """The look of each run: the colour of its method, the recipe of its summary, or what its name says."""
    names = [f"{index} {run.name}" for index, run in enumerate(runs)]
    methods = [run.recipe if run.recipe in METHOD_STYLES else method_of(run.name) for run in runs]
    return list(method_styles(names, methods).values())


def loss_floor(run: LoggedRun) -> float | None:
    """The least training loss that label smoothing allows: the entropy of a smoothed label; None: not known.

    With K classes and smoothing s a label is 1 - s + s / K of its class and s / K of each other one.
    """
    num_classes, smoothing = NUM_CLASSES.get(str(run.config.get("dataset"))), run.config.get("label_smoothing")
    if num_classes is None or not smoothing:
        return None
    shares = np.full(num_classes, smoothing / num_classes)
    shares[0] += 1 - smoothing
    return float(-(shares * np.log(shares)).sum())


def unit_of(column: str, largest: float) -> Unit:
    """The unit in which `largest` of a column is a handy number; no name for columns without one."""
    units = UNITS.get(column, (Unit(1, ""),))
    return next((unit for unit in reversed(units) if largest >= 10 * unit.size), units[0])


def finish_error(axis: Axes, runs: Sequence[LoggedRun]) -> None:
    """An error axis: from 0; logarithmic where errors are small, so that the end shows next to the start.

    Zero has a place below the smallest error, in a part of the axis that is linear and has no other point.
    """
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axis.get_lines()] or [np.zeros(1)])
    bands = [float(np.asarray(path.vertices)[:, 1].max()) for band in axis.collections for path in band.get_paths()]
    top = min(100.0, 1.15 * max(float(values.max()), *bands, 0.0) or 1.0)
    if values.min() < SMALL_ERROR and (positive := values[values > 0]).size:
        axis.set_yscale("symlog", linthresh=float(positive.min()), linscale=0.3)
        axis.yaxis.set_major_locator(FixedLocator([tick for tick in ERROR_TICKS if not 0 < tick < positive.min()]))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_ylabel(f"{axis.get_ylabel().rstrip(']')}, log scale]")
    axis.set_ylim(0, top)


def finish_log(axis: Axes, runs: Sequence[LoggedRun]) -> None:
    """A logarithmic axis where something is above 0; runs that are 0 throughout, which have no place there, are named.

    AllReduce is such a run: it keeps ranks equal.
    """
    zeros = [line for line in axis.get_lines() if not (np.asarray(line.get_ydata()) > 0).any()]
    if len(zeros) < len(axis.get_lines()):
        axis.set_yscale("log", nonpositive="mask")
        axis.autoscale_view()
        log_scale(axis, "y")
        axis.set_ylabel(f"{axis.get_ylabel()} [log scale]")
    if zeros:
        names = [str(line.get_label()) for line in zeros]
        shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if names[MAX_NAMES:] else "")
        axis.set_title(f"{axis.get_title()}\n0 throughout: {shown}")


def common_floor(runs: Sequence[LoggedRun]) -> float:
    """The floor of the loss if it is known and the same for all runs, else 0."""
    floors = {loss_floor(run) for run in runs}
    return (floors.pop() or 0.0) if len(floors) == 1 else 0.0


def finish_loss(axis: Axes, runs: Sequence[LoggedRun]) -> None:
    """A logarithmic axis, if something is above 0."""
    if any((np.asarray(line.get_ydata()) > 0).any() for line in axis.get_lines()):
        axis.set_yscale("log", nonpositive="mask")
        axis.autoscale_view()
        log_scale(axis, "y")
        axis.set_ylabel(f"{axis.get_ylabel().rstrip(']')}, log scale]")


def finish_zero(axis: Axes, runs: Sequence[LoggedRun]) -> None:
    """From 0, so that small differences look small."""
    axis.set_ylim(bottom=0)


def finish_bytes(axis: Axes, runs: Sequence[LoggedRun]) -> None:
    """Bytes from 0, or on a logarithmic axis where they differ by orders of magnitude between recipes."""
    xs = np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in axis.get_lines()])
    if xs.max() > 20 * xs.min() and len(axis.get_lines()) > 1:
        axis.set_xlim(0.8 * xs.min(), 1.25 * xs.max())
        log_scale(axis, "x")
        axis.set_xlabel(f"{axis.get_xlabel().rstrip(']')}, log scale]")


def finish_accuracy_bytes(axis: Axes, runs: Sequence[LoggedRun]) -> None:
    """Accuracies by whole tens of percents."""
    axis.set_ylim(percent_limits(value for line in axis.get_lines() for value in np.asarray(line.get_ydata(), float)))
    finish_bytes(axis, runs)


def finish_bleu_bytes(axis: Axes, runs: Sequence[LoggedRun]) -> None:
    """BLEU from 0."""
    finish_zero(axis, runs)
    finish_bytes(axis, runs)


_EPOCH, _STEP, _TIME, _SENT = "epoch", "optimizer step", "training time", "sent per rank"
_ACCURACY, _OWN_ACCURACY = "averaged_test_accuracy_percent", "own_test_accuracy_percent"

ERROR_EPOCHS = Panel(
    "error_epochs",
    "Test error by epoch",
    "epoch",
    _ACCURACY,
    _EPOCH,
    "error [%]",
    _OWN_ACCURACY,
    True,
    finish=finish_error,
)
ERROR_TIME = Panel(
    *("error_time", "Test error by time", "time_seconds", _ACCURACY, _TIME, "error [%]", _OWN_ACCURACY, True),
    finish=finish_error,
)
_LOSS: dict[str, Any] = {
    "y": "loss",
    "ylabel": "loss [nat]",
    "band": "loss",
    "floor": common_floor,
    "finish": finish_loss,
}
LOSS_EPOCHS = Panel("loss_epochs", "Training loss by epoch", "epoch", xlabel=_EPOCH, **_LOSS)
LOSS_TIME = Panel("loss_time", "Training loss by time", "time_seconds", xlabel=_TIME, **_LOSS)
CONSENSUS = Panel(
    *("consensus", "Distance of ranks from average", "epoch", "consensus_distance", _EPOCH, "consensus distance"),
    finish=finish_log,
)
NLL_STEPS = Panel(
    *("nll_steps", "Test negative log-likelihood", "step", "averaged_test_nll", _STEP, "NLL per token [nat]"),
    *("own_test_nll", False),
    finish=finish_zero,
)
BLEU_STEPS = Panel("bleu_steps", "Test BLEU", "step", "averaged_test_bleu", _STEP, "BLEU", finish=finish_zero)
ACCURACY_BYTES = Panel(
    *("accuracy_bytes", "Test accuracy against traffic", "bytes_sent", _ACCURACY, _SENT, "accuracy [%]"),
    finish=finish_accuracy_bytes,
)
BLEU_BYTES = Panel(
    *("bleu_bytes", "Test BLEU against traffic", "bytes_sent", "averaged_test_bleu", _SENT, "BLEU"),
    finish=finish_bleu_bytes,
)
PANELS = (
    *(ERROR_EPOCHS, ERROR_TIME, LOSS_EPOCHS, LOSS_TIME, ACCURACY_BYTES, CONSENSUS, NLL_STEPS, BLEU_STEPS, BLEU_BYTES),
)
CAPTION = (
    "Lines: averaged model, or mean over ranks; mean over seeds.\n"
    "Bands: ranks of all seeds, from the lowest to the highest."
)

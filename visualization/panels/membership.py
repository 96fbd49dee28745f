"""Members over time, and the slowest step of any worker meanwhile, of an elastic run."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from visualization.logs.membership import LoggedMembership
from visualization.style import COLORS, MUTED, PAGE, add_legend, log_scale, new_figure

_JOINED, _LEFT = COLORS[2], COLORS[1]


def draw_membership(membership: LoggedMembership) -> Figure:
    """Who took part, and what it cost the others; to be called within `styled`."""
    figure = new_figure(PAGE, 4.0)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.3))
    _draw_members(above, membership)
    _draw_steps(below, membership)
    add_legend(figure, (above, below))
    return figure


def _draw_members(axis: Axes, membership: LoggedMembership) -> None:
    """Workers in the generation that trains; a mark for each that has joined, or left, at their number afterwards."""
    found = membership.generations
    seconds, sizes = [one.seconds for one in found], [len(one.members) for one in found]
    end = max([*membership.steps["seconds"], *seconds])
    axis.step([*seconds, end], [*sizes, sizes[-1]], where="post", color=COLORS[0], label="workers that train together")
    for label, color, marker, at in (
        ("joined", _JOINED, "^", [one for one in found[1:] if one.joined]),
        ("left", _LEFT, "X", [one for one in found[1:] if one.left]),
    ):
        if at:
            places = [one.seconds for one in at], [len(one.members) for one in at]
            axis.plot(*places, color=color, marker=marker, linestyle="", markersize=5, label=label)
    axis.set(ylabel="workers", ylim=(0, max(sizes) + 1))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_steps(axis: Axes, membership: LoggedMembership) -> None:
    """For each second the slowest and the median step of any worker, and the deadline after which one is left out."""
    steps = membership.steps
    if len(steps):
        seconds = steps.groupby(np.floor(steps["seconds"]))
        for column, how, color, line, label in (
            ("slowest_seconds", "max", COLORS[0], "-", "slowest step"),
            ("median_seconds", "median", MUTED, "-", "median step"),
            ("deadline_seconds", "max", COLORS[3], ":", "deadline for a silent worker"),
        ):
            values = 1000 * seconds[column].agg(how)
            values = values[values > 0]
            axis.plot(values.index, values, color=color, linestyle=line, linewidth=1.0, label=label)
        log_scale(axis, "y")
    for one in membership.generations[1:]:
        axis.axvline(one.seconds, color=_LEFT if one.left else _JOINED, linewidth=0.6, zorder=0)
    axis.set(xlabel="seconds since the start", ylabel="a step [ms]")
    axis.set_xlim(left=0)

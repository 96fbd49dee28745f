"""The figures of the papers, from the CSVs of any number of runs: each as a file, a column wide.

    python -m visualization.plot runs/compare                     # every run below that folder
    python -m visualization.plot runs/ar runs/sgp --out-dir figures --format pdf
    python -m visualization.plot runs/* --figures error_time scaling

Draws what the runs have data for, and says what not and why: error and loss against epochs and
wall time, time per iteration against ranks, accuracy or BLEU against bytes sent, consensus
distance, NLL and BLEU against steps. Logs that are missing, cut off or mixed up are named by file
and line, the rest is drawn, and the exit code is 1; it is 2 where there is no run at all.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from visualization.command import read_arguments, run_command
from visualization.logs.runs import LoggedRun, read_runs, seeds_together
from visualization.panels import scaling
from visualization.panels.panel import CAPTION, PANELS, Panel
from visualization.style import Format, add_legend, new_figure, save, styled

FIGURES = (*(panel.name for panel in PANELS), scaling.NAME)
LEGEND_LINE = 0.14
"""Inches that a line of the legend adds to a figure."""


@dataclass(frozen=True)
class Plot:
    """Which runs to draw, and how."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, or folders with runs below them."""
    out_dir: Path = Path("figures")
    """Folder of the pictures."""
    format: Format = "png"
    """Of the pictures; pdf and svg have no pixels."""
    figures: tuple[str, ...] = FIGURES
    """Names of the pictures to draw."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("got no run, expected folders of runs; e.g. runs/compare")
        if unknown := [name for name in self.figures if name not in FIGURES]:
            raise ValueError(f"got figures={unknown}, expected some of {', '.join(FIGURES)}")


def draw_figures(
    runs: Sequence[LoggedRun], out_dir: Path, *, ending: Format = "png", figures: Collection[str] = FIGURES
) -> tuple[list[Path], dict[str, str]]:
    """Draw the figures that the runs have data for.

    Args:
        runs: as read.
        out_dir: the folder of the files, made if need be.
        ending: the ending of their names.
        figures: names of those that are wanted.

    Returns:
        The files, and why the others were not drawn, by name.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    paths, left_out = [], {}
    lines = seeds_together(runs)
    with styled():
        for panel in PANELS:
            if panel.name not in figures:
                continue
            if panel.runs_with(lines):
                paths.append(_draw_panel(panel, lines, out_dir / f"{panel.name}.{ending}"))
            else:
                left_out[panel.name] = f"no run has both {panel.x} and {panel.y}"
        if scaling.NAME in figures:
            points = scaling.scaling_points(runs)
            if reason := scaling.why_not(points):
                left_out[scaling.NAME] = reason
            else:
                figure = new_figure()
                axis = figure.subplots()
                scaling.draw_scaling(axis, points)
                add_legend(figure, [axis])
                paths.append(save(figure, out_dir / f"{scaling.NAME}.{ending}"))
    return paths, left_out


def _draw_panel(panel: Panel, runs: Sequence[LoggedRun], path: Path) -> Path:
    # Legends below take room from the axes, of which a figure of many runs has none to spare.
    figure = new_figure(height=2.3 + LEGEND_LINE * max(0, len(runs) - 2))
    axis = figure.subplots()
    panel.draw(axis, runs)
    add_legend(figure, [axis])
    return save(figure, path)


def main(plot: Plot) -> int:
    """Draw; the exit code."""
    runs, problems = read_runs(plot.runs)
    paths: list[Path] = []
    if runs:
        paths, left_out = draw_figures(runs, plot.out_dir, ending=plot.format, figures=plot.figures)
        for path in paths:
            print(f"drew {path}")
        for name, reason in left_out.items():
            print(f"not drawn: {name}: {reason}")
        print(CAPTION)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not runs:
        return 2
    return 1 if problems or not paths else 0


if __name__ == "__main__":
    run_command(lambda: main(read_arguments(Plot, description=__doc__)))

"""The emulated cluster: time per step by method, its parts, scaling over hosts, share of line rate.

python -m visualization.cluster runs/cluster/cluster.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from visualization.command import run_command
from visualization.logs.tables import read_columns
from visualization.style import MUTED, PAGE, add_legend, method_styles, new_figure, save, styled

PARTS = ("compute", "encode", "wire", "mix", "wait", "rest")
HIDDEN = ("encode", "wire", "mix")
"""Parts that an overlapped method does beside its training."""
PART_COLORS = ("#9EB5C4", "#E8C07D", "#B5651D", "#E3D6BC", "#CFCFCF", "#6E6E6E")
"""Of PARTS: none is that of a method."""
HATCHES = ("", "////", "", "xxxx", "....", "\\\\\\\\")
LINE_SHARE = 0.957
"""What TCP/IP leaves of a link for payload."""
COLUMNS = (
    *(
        "hosts",
        "rate_gbit",
        "method",
        "title",
        "repeat",
        "step_ms",
        "fleet_step_ms",
        "is_hidden",
        "line_share",
        "error",
    ),
    *(f"{part}_ms" for part in PARTS),
)


SETTINGS: Mapping[str, Callable[[Any], str]] = {
    "hosts": lambda hosts: f"{hosts} hosts",
    "rate_gbit": lambda rate: f"{rate:g} Gbit/s" if rate else "links not shaped",
    "num_parameters": lambda number: f"{number / 1e6:g} million parameters",
    "planned_ms": lambda ms: f"{ms:g} ms of computation",
    "planned_steps": lambda steps: f"{steps} steps",
    "spread": lambda spread: f"computation varies by {spread:g}" if spread else "",
    "straggle_chance": lambda chance: f"{chance:.0%} of steps straggle" if chance else "no stragglers",
    "slow_factor": lambda factor: f"stragglers {factor:g} x slower",
    "slow_host": lambda factor: f"one host {factor:g} x slower" if factor != 1 else "",
    "slow_link_share": lambda share: f"one link at {share:.0%}" if share else "",
    "congestion_control": str,
}
"""Columns of settings: rows that differ in one of them are of different cells; what a cell is called by each."""


def settings_of(table: pd.DataFrame) -> list[str]:
    """The columns of settings that the table has values of."""
    return [name for name in SETTINGS if name in table and table[name].notna().all()]


def cells_of(table: pd.DataFrame, *, without: str = "") -> list[tuple[str, pd.DataFrame]]:
    """The cells of a table by a title each: hosts and rate, and every setting that differs between cells.

    Args:
        table: of `medians`.
        without: a setting that may differ inside a cell.
    """
    own = [name for name in settings_of(table) if name != without]
    shown = [name for name in own if name in ("hosts", "rate_gbit") or table[name].nunique() > 1]
    cells = []
    for _, cell in table.groupby(own, sort=False):
        texts = [SETTINGS[name](cell[name].iloc[0]) for name in shown]
        cells.append((", ".join(text for text in texts if text), cell))
    return cells


def facts_of(table: pd.DataFrame) -> str:
    """The settings that all cells share, and how many repeats there are, in a line."""
    own = [name for name in settings_of(table) if name not in ("hosts", "rate_gbit", "congestion_control")]
    if "straggle_chance" in own and not table["straggle_chance"].any():
        own = [name for name in own if name != "slow_factor"]
    texts = [SETTINGS[name](table[name].iloc[0]) for name in own if table[name].nunique() == 1]
    return ", ".join([*(text for text in texts if text), f"repeats: {table['repeats'].max()}"])


def medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians over repeats of the mean over ranks, a row per cell and method that has results."""
    done = rows[rows["error"].isna()]
    numbers = ["step_ms", "fleet_step_ms", "line_share", *(f"{part}_ms" for part in PARTS)]
    key = [*settings_of(rows), "title", "is_hidden"]
    per_repeat = done.groupby([*key, "repeat"], sort=False)[numbers].mean().reset_index()
    cells = per_repeat.groupby(key, sort=False)
    return cells[numbers].median().assign(repeats=cells.size()).reset_index()


def draw_parts(axis: Axes, cell: pd.DataFrame) -> None:
    """A bar per method, the shortest on top: its mean step by parts, and as a mark the step of all ranks together.

    Ranks that wait for each other take turns in being slow, so that the mark is right of the bar where they do.

    Args:
        axis: where to draw.
        cell: the rows of `medians` of one cell.
    """
    widths = pd.DataFrame({part: cell[f"{part}_ms"].fillna(0.0).clip(lower=0.0) for part in PARTS})
    widths.loc[cell["is_hidden"].astype(bool), list(HIDDEN)] = 0.0
    order = widths.sum(axis=1).sort_values().index
    cell, widths = cell.loc[order], widths.loc[order]
    places = range(len(cell))
    left = pd.Series(0.0, index=cell.index)
    for part, color, hatch in zip(PARTS, PART_COLORS, HATCHES):
        label = "rest (other libraries: all but compute)" if part == "rest" else part
        axis.barh(
            places, widths[part], 0.8, left=left, label=label, facecolor=color, hatch=hatch, edgecolor="white", lw=0
        )
        left += widths[part]
    axis.plot(cell["fleet_step_ms"], places, "|", color="black", markersize=8, label="a step of all ranks together")
    axis.set_yticks(places, cell["title"])
    axis.invert_yaxis()
    axis.set(xlabel="ms per step")
    axis.grid(visible=False, axis="y")


def draw_line_shares(axis: Axes, cell: pd.DataFrame) -> None:
    """A bar per method whose rounds are known: the share of its link that a round uses."""
    cell = cell[cell["line_share"].notna()].sort_values("line_share", ascending=False)
    looks = method_styles(list(cell["title"]))
    colors = [looks[title]["color"] for title in cell["title"]]
    axis.barh(range(len(cell)), cell["line_share"], 0.8, color=colors)
    axis.axvline(LINE_SHARE, color=MUTED, lw=0.8)
    axis.set_yticks(range(len(cell)), cell["title"])
    axis.invert_yaxis()
    axis.set(xlabel=f"share of the link's rate (TCP/IP leaves {LINE_SHARE})", xlim=(0, 1))
    axis.grid(visible=False, axis="y")


def _per_cell(table: pd.DataFrame, draw_cell: Callable[[Axes, pd.DataFrame], None]) -> Figure:
    cells = cells_of(table)
    heights = [0.8 + 0.16 * len(cell) for _, cell in cells]
    figure = new_figure(PAGE, sum(heights) + 0.8)
    axes = figure.subplots(len(cells), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, cell) in zip(axes, cells):
        draw_cell(axis, cell)
        axis.set(title=title)
    figure.suptitle(f"Emulated cluster: {facts_of(table)}", wrap=True)
    add_legend(figure, axes)
    return figure


def _scaling(table: pd.DataFrame) -> Figure:
    """Time per step against hosts, a line per method, a panel per rate and other setting."""
    panels = cells_of(table, without="hosts")
    looks = method_styles(list(dict.fromkeys(table["title"])))
    figure = new_figure(PAGE, 3.2 + 0.12 * len(looks))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, rows) in zip(axes, panels):
        for title, points in rows.groupby("title", sort=False):
            points = points.sort_values("hosts")
            axis.plot(points["hosts"], points["step_ms"], label=title, **looks[title])
        hosts = sorted(rows["hosts"].unique())
        axis.set_xscale("log", base=2)
        axis.set_xticks(hosts, [str(x) for x in hosts])
        axis.set(title=name, xlabel="hosts [log scale]", ylim=(0, None))
    axes[0].set(ylabel="ms per step, slowest rank")
    figure.suptitle(f"Emulated cluster: {facts_of(table)}", wrap=True)
    add_legend(figure, axes)
    return figure


def draw(csv: Path, folder: Path) -> list[Path]:
    """Draw the CSV of benchmarks/cluster into the folder; the files that were written.

    steps.png and line.png always, where there is what they show; scaling.png with more than one number of hosts.

    Raises:
        ValueError: a column is missing, or there are no rows.
    """
    table = medians(read_columns(csv, COLUMNS, source="benchmarks/cluster"))
    if table.empty:
        return []
    written = []
    with styled():
        written.append(save(_per_cell(table, draw_parts), folder / "steps.png"))
        if table["line_share"].notna().any():
            shown = table[table["line_share"].notna()]
            written.append(save(_per_cell(shown, draw_line_shares), folder / "line.png"))
        if table["hosts"].nunique() > 1:
            written.append(save(_scaling(table), folder / "scaling.png"))
    return written


def main() -> None:
    """Draw the CSV named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="cluster.csv")
    parser.add_argument("--output", type=Path, help="folder to write to; default: beside the CSV")
    options = parser.parse_args()
    for path in draw(options.csv, options.output or options.csv.parent):
        print(path)


if __name__ == "__main__":
    run_command(main)

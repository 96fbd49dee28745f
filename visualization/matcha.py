"""A MATCHA plan as a picture: how often each link is used, and what a budget buys.

python -m gossip_modules.matcha --graph 0 --budget 0.5 --output plan.json
python -m visualization.matcha plan.json --output matcha.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import networkx as nx
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize

from visualization.command import run_command
from visualization.graphs import circle
from visualization.style import COLUMN, DASHES, METHOD_STYLES, PAGE, SMALL, add_legend, new_figure, save, styled

MAX_LABELS = 64
"""Up to so many ranks carry their number."""
MAX_CIRCLE = 32
"""Up to so many ranks without a place stand in a circle, where no link runs through a third rank."""
NEVER = "darkgray"
COLORS = mpl.colormaps["viridis_r"]
LOOKS: Mapping[str, dict[str, Any]] = {
    "MATCHA": {"color": METHOD_STYLES["matcha"].color, "linestyle": DASHES[0]},
    "MATCHA, p and alpha jointly": {"color": "#CC79A7", "linestyle": DASHES[1]},
    "equal p": {"color": "#56B4E9", "linestyle": DASHES[3]},
    "periodic D-PSGD": {"color": METHOD_STYLES["dpsgd"].color, "linestyle": DASHES[1]},
    "D-PSGD": {"color": "black", "linestyle": DASHES[0]},
}
"""Colour and dashes of each line of rho; lines that lie close have different colours."""


def read_plan(path: Path) -> dict[str, Any]:
    """A plan that `python -m gossip_modules.matcha --output` wrote.

    Raises:
        ValueError: another file.
    """
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        plan = None
    if not isinstance(plan, dict) or not {"matchings", "probabilities", "rhos"} <= set(plan):
        raise ValueError(
            f"got {path}, expected what python -m gossip_modules.matcha --output {path.name} writes; write it again"
        )
    return plan


def draw(plan: Mapping[str, Any], path: Path) -> Path:
    """Draw the base graph, and rho against budget where the plan has it, as the file `path`; returns it."""
    has_curve = bool(plan["budgets"])
    with styled():
        figure = new_figure(PAGE if has_curve else COLUMN, 3.4 if has_curve else 2.9)
        axes = list(figure.subplots(1, 1 + has_curve, squeeze=False).flat)
        draw_graph(axes[0], plan)
        bar = figure.colorbar(ScalarMappable(Normalize(0, 1), COLORS), ax=axes[0], fraction=0.046, pad=0.02)
        bar.set_label("probability that a round uses the link")
        if has_curve:
            draw_rhos(axes[1], plan)
        add_legend(figure, axes, least=1)
        return save(figure, path)


def draw_graph(axis: Axes, plan: Mapping[str, Any]) -> None:
    """The base graph, links coloured and as wide as their probability; links that are never used are dotted."""
    edges = [(u, v, p) for m, p in zip(plan["matchings"], plan["probabilities"], strict=True) for u, v in m]
    graph = nx.Graph()
    graph.add_nodes_from(range(1 + max(v for _, v, _ in edges)))
    graph.add_edges_from((u, v) for u, v, _ in edges)
    num_ranks = graph.number_of_nodes()
    if plan["positions"] is not None:
        places = dict(enumerate(plan["positions"]))
    elif num_ranks <= MAX_CIRCLE:
        places = dict(enumerate(circle(num_ranks)))
    else:
        places = nx.spring_layout(graph, seed=0)
    positions = [(float(places[rank][0]), float(places[rank][1])) for rank in range(num_ranks)]
    scale = min(1.0, 16 / num_ranks)
    edges.sort(key=lambda edge: edge[2])  # the often used ones on top
    lines = LineCollection(
        [(positions[u], positions[v]) for u, v, _ in edges],
        colors=[COLORS(p) if p > 0 else NEVER for _, _, p in edges],
        linewidths=[0.2 + (0.6 + 2.4 * p) * max(scale, 0.25) for _, _, p in edges],
        linestyles=["solid" if p > 0 else "dotted" for _, _, p in edges],
        zorder=1,
    )
    axis.add_collection(lines)
    xs, ys = zip(*positions)
    axis.scatter(xs, ys, s=150 * scale, color="white", edgecolors="black", linewidths=scale, zorder=2)
    if num_ranks <= MAX_LABELS:
        for rank, (x, y) in enumerate(positions):
            axis.text(x, y, str(rank), ha="center", va="center", fontsize=SMALL * max(scale**0.5, 0.6), zorder=3)
    axis.set_aspect("equal", adjustable="datalim")
    axis.margins(0.08)
    axis.set_axis_off()
    if any(p == 0 for _, _, p in edges):
        axis.plot([], [], color=NEVER, linestyle="dotted", label="link never used")
    axis.set_title(f"{plan['name']}\nbudget {plan['budget']:.3g}, rho {plan['rho']:.4f}")


def draw_rhos(axis: Axes, plan: Mapping[str, Any]) -> None:
    """rho of every method against the budget, D-PSGD as a line, and this plan as a star."""
    for name, rhos in plan["rhos"].items():
        axis.plot(plan["budgets"], rhos, label=name, **LOOKS[name])
    axis.axhline(plan["dpsgd"]["rho"], label="D-PSGD, budget 1", **LOOKS["D-PSGD"])
    axis.plot([plan["budget"]], [plan["rho"]], "*", color="black", markersize=9, zorder=3, label="this plan")
    axis.set(
        title="Squared distance after a round",
        xlabel="budget [share of the full schedule]",
        ylabel="rho: expected factor (lower is better)",
        xlim=(0, 1.02),
        ylim=(0, 1.02),
    )


def main() -> None:
    """Draw the plan named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="JSON file written by python -m gossip_modules.matcha --output")
    parser.add_argument("--output", type=Path, help="file to write; default: beside the plan")
    arguments = parser.parse_args()
    print(draw(read_plan(arguments.plan), arguments.output or arguments.plan.with_suffix(".png")))


if __name__ == "__main__":
    run_command(main)

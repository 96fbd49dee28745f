"""Who sends to whom in each round, with what mixing weight: ranks on a circle, a panel per round.

    python -m visualization.topology --graph ring --num-nodes 8
    python -m visualization.topology --graph npeer-exponential --num-nodes 16 --peers 2
    python -m visualization.topology --graph matcha0 --num-nodes 8 --budget 0.5 --format svg
    python -m visualization.topology --graph all --num-nodes 8  # every graph of so many ranks

A line is a link whose two ends give each other the same weight, an arrow points from sender to
receiver. Of a graph that changes the first rounds are drawn, and the title says of how many; of a
random one the first rounds that differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

import gossip_modules as gm
from gossip_modules.graph_manager.named_graphs import GRAPHS, PREDEFINED_GRAPHS, named_graph
from visualization.command import read_arguments, run_command
from visualization.graphs import Matrix, MatrixRounds, circle, make_mixing
from visualization.style import COLORS, COLUMN, DASHES, MUTED, PAGE, Format, legend_columns, new_figure, save, styled

MAX_ROUNDS, MAX_COLUMNS = 8, 4
MAX_LOOKED_AT = 100
"""So many rounds of a random graph are looked at for different ones."""
MAX_WEIGHTS = 6
"""Distinct weights of links that have a look of their own; more share looks by range."""
SAME = 1e-9
MANY_RANKS, MANY_LINKS = 10, 40
"""From there on circles are smaller, and lines are thinner."""
Looks: TypeAlias = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Topology:
    """Which graph to draw."""

    graph: str = "ring"
    """By its name in gossip_modules/graph_manager/named_graphs.py; all."""
    num_nodes: int = 8
    """Ranks; up to 16 are legible."""
    peers: int | None = None
    """Peers per round; none: all neighbours on ring, torus, hypercube, complete and matcha0 to matcha5, else one."""
    budget: float | None = None
    """Draw MATCHA's rounds on an undirected static graph with this share of its links in use, not the graph itself."""
    rounds: int = MAX_ROUNDS
    """At most so many panels."""
    out_dir: Path = Path("figures")
    """Folder of the pictures."""
    format: Format = "png"
    """Of the pictures."""

    def __post_init__(self) -> None:
        if self.graph not in ("all", *GRAPHS, *PREDEFINED_GRAPHS):
            raise ValueError(
                f"got graph={self.graph!r}, expected all or one of {', '.join([*GRAPHS, *PREDEFINED_GRAPHS])}"
            )
        if self.num_nodes < 2 or self.rounds < 1:
            raise ValueError(f"got num_nodes={self.num_nodes} and rounds={self.rounds}, expected at least 2 and 1")


class Link(NamedTuple):
    """From `sender` to `receiver`; `is_mutual` if the other way has the same weight, and this stands for both."""

    sender: int
    receiver: int
    weight: float
    is_mutual: bool


def links_of(matrix: Matrix) -> list[Link]:
    """The links of one round, pairs of equal weight as one.

    Args:
        matrix: W(t), row i the weights that rank i gives.
    """
    links = []
    for receiver, sender in np.argwhere(np.abs(matrix) > SAME).tolist():
        weight = float(matrix[receiver, sender])
        is_mutual = abs(matrix[sender, receiver] - weight) < SAME
        if receiver != sender and not (is_mutual and sender > receiver):
            links.append(Link(sender, receiver, weight, is_mutual))
    return links


def as_text(weight: float) -> str:
    """A weight as a fraction where it is one of a small denominator: 1/3, else 0.293."""
    fraction = Fraction(weight).limit_denominator(32)
    return str(fraction) if abs(float(fraction) - weight) < SAME else f"{weight:.3f}"


def draw_rounds(rounds: MatrixRounds, *, max_rounds: int = MAX_ROUNDS) -> Figure:
    """The first rounds as panels, one legend of all weights; to be called within `styled`."""
    shown = first_rounds(rounds, max_rounds)
    matrices = list(shown.values())
    links = [links_of(matrix) for matrix in matrices]
    looks = _looks([link.weight for each in links for link in each], max(map(len, links)))
    own = {as_text(weight) for matrix in matrices for weight in np.diag(matrix).tolist()}
    most = MAX_COLUMNS - (rounds.num_ranks > MANY_RANKS) - (len(own) > 1)
    num_rows = -(-len(matrices) // most)
    num_columns = -(-len(matrices) // num_rows)
    width = COLUMN if num_columns == 1 else PAGE
    panel = min(width / num_columns, COLUMN)
    figure = new_figure(width, num_rows * (panel + 0.15) + 0.8)
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axis, (t, matrix) in zip(axes, shown.items()):
        draw_round(axis, matrix, looks, has_own=len(own) > 1, width=panel)
        if rounds.period != 1:
            axis.set_title(f"round {t}")
    for axis in axes[len(matrices) :]:
        axis.set_axis_off()
    title = _title(rounds, len(matrices))
    figure.suptitle(title.replace(": ", ":\n") if width == COLUMN else title)
    handles = [Line2D([], [], **look, label=f"weight {text}") for text, look in looks.items()]
    mark = {"marker": "$w$", "color": MUTED, "mew": 0.3} if len(own) > 1 else {"marker": "o", "mfc": "w", "mec": "k"}
    label = "own weight" if len(own) > 1 else f"own weight {own.pop()}"
    if any((np.diag(matrix) < 0).any() for matrix in matrices):
        label += " (negative where the links of a rank weigh more than 1 together)"
    handles.append(Line2D([], [], linestyle="none", ms=6, label=label, **mark))
    if len({link.is_mutual for each in links for link in each}) > 1:
        handles.append(Line2D([], [], color=MUTED, label="line: both ways"))
        handles.append(Line2D([], [], color=MUTED, marker=">", markevery=[1], label="arrow: one way"))
    labels = [str(handle.get_label()) for handle in handles]
    figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns(labels, width))
    return figure


def first_rounds(rounds: MatrixRounds, max_rounds: int) -> dict[int, Matrix]:
    """W(t) of the first rounds, by t; of rounds without a period, which are random, those that differ from all before.

    Args:
        rounds: rounds of a graph.
        max_rounds: at most so many.
    """
    if rounds.period:
        return {t: rounds.matrix(t) for t in range(min(rounds.period, max_rounds))}
    found: dict[bytes, tuple[int, Matrix]] = {}
    for t in range(MAX_LOOKED_AT):
        matrix = rounds.matrix(t)
        found.setdefault(matrix.tobytes(), (t, matrix))
        if len(found) == max_rounds:
            break
    return dict(found.values())


def draw_round(axis: Axes, matrix: Matrix, looks: Looks, *, has_own: bool, width: float) -> None:
    """One round: ranks on a circle, the first on top, and links between them.

    Args:
        axis: where to draw.
        matrix: W(t).
        looks: the styles of links, by weight.
        has_own: write the own weight beside each rank.
        width: the width of the panel, in inches.
    """
    n = len(matrix)
    # Points of the page, not data: circles that hold two digits, whatever the number of ranks.
    size = 13.0 if n <= MANY_RANKS else 11.0 if n <= 16 else 8.0
    places = circle(n)
    for link in links_of(matrix):
        arrow = FancyArrowPatch(
            places[link.sender],
            places[link.receiver],
            arrowstyle="-" if link.is_mutual else "-|>",
            connectionstyle="arc3,rad=0" if link.is_mutual else "arc3,rad=0.12",
            mutation_scale=6,
            shrinkA=size / 2,
            shrinkB=size / 2,
            zorder=1,
            **_look(looks, link.weight),
        )
        axis.add_patch(arrow)
    xs, ys = zip(*places)
    axis.scatter(xs, ys, s=size**2, color="white", edgecolors="black", linewidths=0.8, zorder=2)
    for rank, (x, y) in enumerate(places):
        axis.text(x, y, str(rank), ha="center", va="center_baseline", fontsize=7 if n <= 16 else 5, zorder=3)
        if has_own:
            offset = (x * (size / 2 + 13), y * (size / 2 + 7))
            text = axis.annotate(as_text(matrix[rank, rank]), (x, y), offset, textcoords="offset points", fontsize=7)
            text.set(color=MUTED, ha="center", va="center")
    margin = size / 2 + (28 if has_own else 2)
    half = 72 * width / 2 - 4
    limit = half / (half - margin)
    axis.set(aspect="equal", xlim=(-limit, limit), ylim=(-limit, limit))
    axis.set_axis_off()


def _looks(weights: Sequence[float], num_links: int) -> Looks:
    """Line styles by weight as text, the heaviest first: of another colour, width and dashes each."""
    texts = list(dict.fromkeys(as_text(weight) for weight in sorted(weights, reverse=True)))
    if len(texts) > MAX_WEIGHTS:
        low, high = min(weights), max(weights)
        texts = [f"up to {high - (high - low) * k / MAX_WEIGHTS:.3f}" for k in range(MAX_WEIGHTS)]
    scale = min(1.0, (MANY_LINKS / max(num_links, 1)) ** 0.5)
    return {
        text: {
            "color": COLORS[index % len(COLORS)],
            "linestyle": DASHES[index % len(DASHES)],
            "linewidth": scale * (1.2 if len(texts) == 1 else 1.7 - 0.8 * index / (len(texts) - 1)),
        }
        for index, text in enumerate(texts)
    }


def _look(looks: Looks, weight: float) -> dict[str, Any]:
    if look := looks.get(as_text(weight)):
        return look
    above = [text for text in looks if float(text.removeprefix("up to ")) >= weight - 5e-4]
    return looks[above[-1]]


def _title(rounds: MatrixRounds, num_panels: int) -> str:
    title = f"{rounds.title}, {rounds.num_ranks} ranks"
    if rounds.period == 1:
        return f"{title}: every round"
    if rounds.period == 0:
        return f"{title}: {num_panels} different rounds of a random sequence"
    if num_panels < rounds.period:
        return f"{title}: {num_panels} of the {rounds.period} rounds of a period"
    return f"{title}: a period of {rounds.period} rounds"


def rounds_named(name: str, topology: Topology) -> MatrixRounds:
    """The rounds of the graph of that name.

    Raises:
        ValueError: there is no such graph of that size, or MATCHA cannot take it apart.
    """
    graph = named_graph(name, topology.num_nodes, topology.peers)
    if topology.budget is None:
        peers = graph.num_peers(0)
        return MatrixRounds.of(make_mixing(graph), f"{name}, {peers} peer{'s' if peers > 1 else ''} per round")
    if graph.is_dynamic or not graph.is_symmetric:
        raise ValueError(f"got budget={topology.budget} for {name}, expected an undirected graph that never changes")
    base = nx.Graph([(i, j) for i in range(graph.world_size) for j in graph.phone_book(i)])
    matcha = gm.MatchaGraph(base, budget=topology.budget)
    return MatrixRounds.of(make_mixing(matcha), f"MATCHA on {name}, budget {topology.budget:g}")


def main(topology: Topology) -> int:
    """Draw; the exit code."""
    topology.out_dir.mkdir(parents=True, exist_ok=True)
    is_all = topology.graph == "all"
    for name in [*GRAPHS, *PREDEFINED_GRAPHS] if is_all else [topology.graph]:
        try:
            rounds = rounds_named(name, topology)
        except ValueError as error:
            print(f"not drawn: {name}: {error}", file=sys.stdout if is_all else sys.stderr)
            if not is_all:
                return 1
            continue
        with styled():
            figure = draw_rounds(rounds, max_rounds=topology.rounds)
            print(f"drew {save(figure, topology.out_dir / f'topology_{name}_{topology.num_nodes}.{topology.format}')}")
    return 0


if __name__ == "__main__":
    run_command(lambda: main(read_arguments(Topology, description=__doc__)))

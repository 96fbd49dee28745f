"""How fast ranks agree on every graph: spectral gap, rounds to consensus, by the number of ranks.

    python -m visualization.spectra                               # writes figures/spectra.png
    python -m visualization.spectra --sizes 4 8 16 --graphs ring torus --format pdf

By dense linear algebra on the mixing matrices that training uses. Of graphs that change, over a
whole period. Rounds to consensus count from round 0 until the distance from the average is at most
--error times that of the worst start; the spectral gap says how it shrinks per round in the long
run. A gap of 1: the average is exact after some rounds. More peers do not always help: one peer per
round of npeer-exponential gives the exact average of 2^k ranks after k rounds; two peers, with
weights of 1/3, never do.

Random graphs have no period. Their figures are expectations, and say so: with rho, the factor
by which a round shrinks the squared distance in expectation (E[W^T W], for the worst start), the
gap is 1 - sqrt(rho), and the rounds are the least T with rho^T <= --error^2. Messages are those
of the first T rounds, as they are drawn.

Trees have two lines: their links with Metropolis-Hastings weights, and "relayed", as RelaySGD uses
them. Relaying has no matrix W(t), hence no gap; its rounds are those until every rank has a model
of each rank, the most links between two ranks of a tree.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import ceil, log, nan, sqrt
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from gossip_modules.graph_manager import DoubleBinaryTreeGraph, GraphManager, RandomGraph, networkx_graph
from gossip_modules.graph_manager.named_graphs import DIRECTED_STATIC_GRAPHS, GRAPHS, STATIC_GRAPHS, TREES, named_graph
from gossip_modules.mixing_manager import MixingManager
from visualization.command import read_arguments, run_command
from visualization.graphs import MatrixRounds, make_mixing
from visualization.style import COLORS, DASHES, MUTED, PAGE, Format, add_legend, new_figure, save, styled

CASES: dict[str, tuple[str, int | None]] = {
    # One shift of equi-static is a ring in another order, and one of static-exponential is npeer-exponential.
    **{name: (name, 1) for name in GRAPHS if name not in (*DIRECTED_STATIC_GRAPHS, "equi-static-undirected")},
    "npeer-exponential, 2 peers": ("npeer-exponential", 2),
    **{f"{name}, all neighbours": (name, None) for name in (*STATIC_GRAPHS, *DIRECTED_STATIC_GRAPHS, *TREES)},
    **{f"{name}, relayed": (name, None) for name in TREES},
}
"""Lines of the picture: a graph of GRAPHS or TREES, and its peers per round; None: all neighbours."""
QUANTITIES = {
    "gap": "spectral gap",
    "rounds": "rounds to error {error:g}",
    "messages": "messages in these",
}
COLUMNS = ["graph", "num_ranks", "peers", *QUANTITIES, "basis"]
PERIOD, EXPECTATION, RELAY = "period", "expectation", "relay"
"""What figures are of: a period of the graph, the law by which its rounds are drawn, or relays through its trees."""


LOOKS: dict[str, tuple[str, str, Any]] = {
    "one peer per round": (COLORS[0], "o", "-"),
    "2 peers": (COLORS[1], "s", DASHES[1]),
    "all neighbours": (COLORS[2], "^", DASHES[2]),
    "relayed": (COLORS[3], "D", DASHES[3]),
}
"""Colour, marker and dashes by what follows the name of a graph in CASES."""
ROW_HEIGHT, BEHIND = 0.95, "#D0D0D0"


@dataclass(frozen=True)
class Spectra:
    """Which graphs to compare, and where."""

    graphs: tuple[str, ...] = (*GRAPHS, *TREES)
    """Names of graphs, as `named_graph` knows them; each with one peer per round, and with all where it may. Trees with
    all neighbours, and relayed."""
    sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 6, 12, 24, 48)
    """Numbers of ranks; a graph is left out where it has none of that size."""
    error: float = 1e-6
    """What rounds to consensus leave of the distance from the average."""
    out_dir: Path = Path("figures")
    """Folder of the picture, and of the numbers in spectra.csv."""
    format: Format = "png"
    """Of the picture."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.graphs if name not in (*GRAPHS, *TREES)]:
            raise ValueError(f"got graphs={unknown}, expected some of {', '.join((*GRAPHS, *TREES))}")
        if not self.sizes or min(self.sizes) < 2 or not 0 < self.error < 1:
            raise ValueError(f"got sizes={self.sizes} and error={self.error}, expected n >= 2 and 0 < error < 1")


def rounds_to_consensus(rounds: MatrixRounds, *, error: float) -> int:
    """The least T with ||W(T-1) ... W(0) - J|| <= error, in the spectral norm; J = 1 1^T / n.

    Periods are doubled until they are enough and then halved back, so it costs O((period + log T) n^3).

    Args:
        rounds: doubly stochastic, of a period; their error never grows.
        error: the error of the worst start, relative to it.

    Raises:
        ValueError: rounds without a period, or that never get there.
    """
    if rounds.period < 1:
        raise ValueError(f"got {rounds.title} without a period, expected rounds that repeat")
    n = rounds.num_ranks
    # W - J instead of W: the product of the differences is the difference of the products.
    steps = [rounds.matrix(t) - 1 / n for t in range(rounds.period)]
    period = np.linalg.multi_dot([np.eye(n), *reversed(steps), np.eye(n)])
    powers = [period]
    while np.linalg.norm(powers[-1], 2) > error:
        if len(powers) > 40:
            raise ValueError(f"got {rounds.title}, whose ranks never agree, expected a spectral gap above 0")
        powers.append(powers[-1] @ powers[-1])
    left, num_rounds = np.eye(n), 0
    for exponent, power in reversed(list(enumerate(powers))):
        if np.linalg.norm(further := power @ left, 2) > error:
            left, num_rounds = further, num_rounds + rounds.period * 2**exponent
    for step in steps:
        left, num_rounds = step @ left, num_rounds + 1
        if np.linalg.norm(left, 2) <= error:
            break
    return num_rounds


def measure(spectra: Spectra) -> pd.DataFrame:
    """Gap and rounds of each case and size: columns graph, num_ranks, peers, gap, rounds, messages, basis.

    `messages` are those of a rank in so many rounds, on average over the ranks; `basis` is PERIOD, EXPECTATION
    or RELAY, where `gap` is NaN.
    """
    rows = []
    for title, (name, peers) in CASES.items():
        if name not in spectra.graphs:
            continue
        for n in sorted(set(spectra.sizes)):
            try:
                mixing = make_mixing(named_graph(name, n, peers))
            except ValueError:
                continue  # the graph has no such size, or fewer peers
            if title == f"{name}, relayed":
                gap, num_rounds, basis = nan, relay_rounds(mixing.graph), RELAY
            else:
                gap, num_rounds, basis = gap_and_rounds(mixing, title, error=spectra.error)
            messages = messages_in(mixing.graph, num_rounds)
            rows.append((title, n, mixing.graph.num_peers(0), gap, num_rounds, messages, basis))
    return pd.DataFrame(rows, columns=COLUMNS)


def gap_and_rounds(mixing: MixingManager, title: str, *, error: float) -> tuple[float, int, str]:
    """The spectral gap, the rounds to consensus, and what they are of."""
    graph = mixing.graph
    if isinstance(graph, RandomGraph) and graph.period == 0:
        rho = graph.rho
        num_rounds = ceil(2 * log(error) / log(rho)) if rho > 0 else 1
        return 1 - sqrt(rho), num_rounds, EXPECTATION
    return mixing.spectral_gap(), rounds_to_consensus(MatrixRounds.of(mixing, title), error=error), PERIOD


def relay_rounds(graph: GraphManager) -> int:
    """After how many rounds of RelaySGD every rank has a model of each rank: a message goes over one link in a round.

    Args:
        graph: a tree, or a `DoubleBinaryTreeGraph`, whose trees relay half a model each.
    """
    trees = graph.trees if isinstance(graph, DoubleBinaryTreeGraph) else (networkx_graph(graph).edges,)
    return max(nx.diameter(nx.Graph(tree)) for tree in trees)


def messages_in(graph: GraphManager, num_rounds: int) -> float:
    """How many messages a rank sends in so many rounds, on average over the ranks."""
    ranks = range(graph.world_size)
    num_counted = graph.period or num_rounds  # without a period each round is counted
    each_round = [sum(graph.out_degree(rank, t) for rank in ranks) / graph.world_size for t in range(num_counted)]
    num_periods, rest = divmod(num_rounds, num_counted)
    return num_periods * sum(each_round) + sum(each_round[:rest])


def draw_spectra(table: pd.DataFrame, *, error: float) -> Figure:
    """Small multiples: a row per graph, a column per quantity, all other graphs in grey; to be called within `styled`.

    Lines go through powers of two, for which several graphs are exact; other sizes are hollow markers, since lines
    through all sizes would zigzag. A graph whose figures are expectations says so in its title.

    Args:
        table: of `measure`.
        error: that the rounds lead to.
    """
    graphs = list(dict.fromkeys(CASES[case][0] for case in table["graph"]))
    figure = new_figure(PAGE, ROW_HEIGHT * len(graphs) + 0.8)
    axes = figure.subplots(len(graphs), len(QUANTITIES), squeeze=False, sharex=True, sharey="col")
    sizes = sorted(set(table["num_ranks"]))
    powers = [n for n in sizes if n & (n - 1) == 0] or sizes
    for graph, row in zip(graphs, axes, strict=True):
        for axis, column in zip(row, QUANTITIES, strict=True):
            _draw_cases(axis, table, graph, column)
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(powers, list(map(str, powers)))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_minor_locator(NullLocator())
        is_expected = (table["basis"][table["graph"].map(lambda case: CASES[case][0]) == graph] == EXPECTATION).any()
        row[0].set_title(f"{graph}, in expectation" if is_expected else graph, loc="left")
    for axis, title in zip(axes[0], QUANTITIES.values(), strict=True):
        text, place, above = title.format(error=error), (0.5, 1), (0, 16)
        axis.annotate(text, place, above, "axes fraction", "offset points", ha="center", color=MUTED)
    for axis in axes[-1]:
        axis.set(xlabel="ranks [log scale]")
    add_legend(figure, axes.flat, least=1)
    return figure


def _draw_cases(axis: Axes, table: pd.DataFrame, graph: str, column: str) -> None:
    """The lines of one graph, one for each number of peers, before those of all others in grey."""
    is_power = table["num_ranks"].map(lambda n: n & (n - 1) == 0)
    for case, rows in table.groupby("graph", sort=False):
        lined = rows[is_power[rows.index]]
        if CASES[case][0] != graph:
            axis.plot(lined["num_ranks"], lined[column], color=BEHIND, linewidth=0.7, zorder=1)
            continue
        label = case.removeprefix(graph).lstrip(", ") or "one peer per round"
        color, marker, dashes = LOOKS[label]
        axis.plot(lined["num_ranks"], lined[column], color=color, marker=marker, linestyle=dashes, label=label)
        others = rows[~is_power[rows.index]]
        axis.plot(others["num_ranks"], others[column], color=color, marker=marker, linestyle="none", mfc="white")


def main(spectra: Spectra) -> int:
    """Measure and draw; the exit code."""
    spectra.out_dir.mkdir(parents=True, exist_ok=True)
    table = measure(spectra)
    if table.empty:
        print(f"got no graph of {', '.join(spectra.graphs)} with {spectra.sizes} ranks", file=sys.stderr)
        return 1
    table.to_csv(spectra.out_dir / "spectra.csv", index=False)
    print(table.to_string(index=False))
    with styled():
        figure = draw_spectra(table, error=spectra.error)
        print(f"drew {save(figure, spectra.out_dir / f'spectra.{spectra.format}')}")
    return 0


if __name__ == "__main__":
    run_command(lambda: main(read_arguments(Spectra, description=__doc__)))

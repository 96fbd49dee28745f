"""How long a MATCHA plan takes: matchings, probabilities and alpha of random geometric graphs.

    OMP_NUM_THREADS=2 python -m benchmarks.matcha_planning
    OMP_NUM_THREADS=2 python -m benchmarks.matcha_planning --sizes 16 --repeats 20

Ranks lie at random in the unit square and are linked below a radius that gives them `--degree` links on average; the
first seed whose graph is connected is taken. Per budget: the edge colouring, the probabilities that make lambda_2 of
the expected Laplacian largest, and the weight of a link; beside them the joint optimum over both, up to --joint-ranks.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import networkx as nx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, Python looks beside this file only

from benchmarks.record import write_rows
from gossip_modules.matcha import activation_probabilities, decompose, joint_probabilities, mixing_weight

T = TypeVar("T")
COLUMNS = (
    *("ranks", "links", "matchings", "budget", "coloring_seconds", "probabilities_seconds", "alpha_seconds"),
    *("plan_seconds", "rho", "joint_seconds", "joint_rho"),
)


def geometric(num_ranks: int, degree: float) -> nx.Graph:
    """A connected random geometric graph whose ranks have about `degree` links; at the border they have fewer."""
    radius = math.sqrt(degree / (math.pi * num_ranks))
    for seed in itertools.count():
        graph = nx.random_geometric_graph(num_ranks, radius, seed=seed)
        if nx.is_connected(graph):
            return graph
        if seed % 20 == 19:
            radius *= 1.05
    raise AssertionError("unreachable: the radius grows until the graph is connected")


def timed(action: Callable[[], T], repeats: int) -> tuple[T, float]:
    """The result, and the least seconds of `repeats`: the rest is what else the machine does."""
    least = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        result = action()
        least = min(least, time.perf_counter() - start)
    return result, least


def row(graph: nx.Graph, budget: float, *, repeats: int, has_joint: bool) -> dict[str, Any]:
    """The line of the table for this graph and budget."""
    matchings, coloring = timed(lambda: decompose(graph), repeats)
    p, activation = timed(lambda: activation_probabilities(matchings, budget), repeats)
    weight, alpha = timed(lambda: mixing_weight(matchings, p), repeats)
    best, seconds = timed(lambda: joint_probabilities(matchings, budget), repeats) if has_joint else (None, None)
    sizes = (graph.number_of_nodes(), graph.number_of_edges(), len(matchings), budget)
    planned = (coloring, activation, alpha, coloring + activation + alpha, weight.rho)
    return dict(zip(COLUMNS, (*sizes, *planned, seconds, best and best.rho), strict=True))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 1000], help="numbers of ranks")
    parser.add_argument("--degree", type=float, default=12.0, help="average links of a rank that is not at the border")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.5], help="shares of the full schedule")
    parser.add_argument("--repeats", type=int, default=1, help="the least time of so many is reported")
    parser.add_argument("--joint-ranks", type=int, default=64, help="most ranks that the joint optimum is found for")
    parser.add_argument("--output", type=Path, help="a CSV file to write as well")
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---:' * len(COLUMNS)}|")
    rows = []
    for n in arguments.sizes:
        graph = geometric(n, arguments.degree)
        for budget in arguments.budgets:
            figures = row(graph, budget, repeats=arguments.repeats, has_joint=n <= arguments.joint_ranks)
            figures = {key: round(value, 5) if isinstance(value, float) else value for key, value in figures.items()}
            print(f"| {' | '.join('' if value is None else f'{value}' for value in figures.values())} |", flush=True)
            rows.append(figures)
    if arguments.output:
        write_rows(arguments.output, rows, seed=0)


if __name__ == "__main__":
    main()

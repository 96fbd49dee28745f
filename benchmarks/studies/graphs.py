"""Graphs: how fast ranks agree, the cost of a graph with up to a million ranks, and plans of MATCHA.

    python -m benchmarks.studies default_graphs --output benchmarks/results/default_graphs.csv
    python -m benchmarks.studies graph_scaling --output benchmarks/results/graph_scaling.csv
    python -m benchmarks.studies matcha_planning --output benchmarks/results/matcha_planning.csv

The first is linear algebra on the mixing matrices W(t) of training, for numbers of ranks that are no powers of two. The
second asks a graph for the peers of one rank in a round, and for its mixing weights. The third plans MATCHA on random
geometric graphs. Times are the least processor time of one thread over several repeats.
"""

from __future__ import annotations

import itertools
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import networkx as nx
import numpy as np

from benchmarks.studies.computed import Cell, Computed
from gossip_modules.graph_manager import (
    BaseGraph,
    CompleteGraph,
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    EquiDynGraph,
    GraphManager,
    HypercubeGraph,
    NetworkXGraph,
    NPeerDynamicDirectedExponentialGraph,
    RandomMatchingGraph,
    RingGraph,
    TorusGraph,
    default_graph,
)
from gossip_modules.graph_manager.named_graphs import undirected_ring
from gossip_modules.matcha import activation_probabilities, decompose, joint_probabilities, mixing_weight
from gossip_modules.mixing_manager import MixingManager, UniformMixing
from visualization.graphs import make_mixing
from visualization.spectra import gap_and_rounds, messages_in

T = TypeVar("T")


def cpu_time(action: Callable[[], T], repeats: int) -> tuple[T, float]:
    """Return the result, and the least processor time of this thread over `repeats`, in seconds."""
    least = math.inf
    for _ in range(repeats):
        start = time.thread_time()
        result = action()
        least = min(least, time.thread_time() - start)
    return result, least


# How fast ranks agree, and how far training keeps them apart.

SIZES = (3, 5, 6, 7, 9, 10, 12, 15, 25, 49)
GRAPHS: Mapping[str, Callable[[int], GraphManager]] = {
    "default, push-sum": partial(default_graph, push_sum=True),
    "default, undirected": partial(default_graph, push_sum=False),
    "ring, both neighbours": undirected_ring,
    "bipartite-complete": DynamicBipartiteCompleteGraph,
    "base, 1 peer": BaseGraph,
    "exponential, 2 peers": partial(NPeerDynamicDirectedExponentialGraph, peers_per_itr=2),
    "base, 2 peers": lambda n: BaseGraph(n, 2),
    "random matching": RandomMatchingGraph,
    "equi-dyn, directed": EquiDynGraph,
}
ERROR = 1e-6
"""The share of the distance from the average that `rounds` and `messages` leave, for the worst start."""
NUM_ROUNDS = 2000
"""Rounds over which noise and drift are averaged, after half as many that forget the start."""


def agreement_cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each number of ranks and graph."""
    for n in SIZES:
        for name, make in GRAPHS.items():
            yield {"ranks": n, "role": name}, partial(agreement, name, partial(make, n))


def agreement(name: str, make: Callable[[], GraphManager]) -> Mapping[str, Any]:
    """Return how fast ranks agree on a graph, and how far training keeps them apart: see `disagreement`."""
    graph = make()
    mixing = make_mixing(graph)
    gap, num_rounds, basis = gap_and_rounds(mixing, name, error=ERROR)
    per_round = messages_in(graph, NUM_ROUNDS) / NUM_ROUNDS
    noise, drift = disagreement(mixing)
    numbers = {
        "messages_per_round": per_round,
        "contraction_per_round": 1 - gap,
        "contraction_per_message": (1 - gap) ** (1 / per_round),
        "rounds": num_rounds,
        "messages": messages_in(graph, num_rounds),
        "noise": noise,
        "drift": drift,
    }
    return {
        "graph": type(graph).__name__,
        "basis": basis,
        **{key: round(value, 4) for key, value in numbers.items()},
    }


def disagreement(mixing: MixingManager) -> tuple[float, float]:
    """Return the noise and the drift of training by x <- W(t) (x + u).

    Noise: u is independent in all steps and ranks, with variance 1; the figure is the variance of a rank around the
    mean. Drift: u is the same in all steps, and the vector of all u has length 1; the figure is the length of the
    vector of all distances from the mean, for the worst u. Both are means over NUM_ROUNDS rounds.
    """
    n = mixing.graph.world_size
    matrices = [np.asarray(mixing.matrix(t)) for t in range(mixing.period or NUM_ROUNDS * 3 // 2)]
    apart = np.eye(n) - 1 / n
    covariance, drift = np.zeros((n, n)), np.zeros((n, n))
    variances, distances = [], []
    for t in range(NUM_ROUNDS * 3 // 2):
        W = matrices[t % len(matrices)]
        covariance, drift = W @ (covariance + apart) @ W.T, W @ (drift + apart)
        if t >= NUM_ROUNDS // 2:
            variances.append(np.trace(covariance) / n)
            distances.append(np.linalg.norm(drift, 2))
    return float(np.mean(variances)), float(np.mean(distances))


# The cost of a graph with many ranks.

MANY = (1_000, 100_000, 1_000_000)
MOST_EDGES = 100_000
"""Ranks of a graph that is given edge by edge, at most."""
ROUND, REPEATS, LOOPS = 123_456_789, 20, 100
"""The round that is asked for, the repeats of a measurement, and the queries in one repeat."""


def power_of_two(n: int) -> int:
    """Return the power of two nearest to n."""
    return min((1 << n.bit_length() - 1, 1 << n.bit_length()), key=lambda power: abs(power - n))


def makers(n: int) -> Mapping[str, Callable[[], GraphManager]]:
    """Return how to make each graph of about n ranks, by name."""
    graphs: dict[str, Callable[[], GraphManager]] = {
        "DynamicDirectedExponentialGraph": lambda: DynamicDirectedExponentialGraph(n),
        "NPeerDynamicDirectedExponentialGraph": lambda: NPeerDynamicDirectedExponentialGraph(n),
        "DynamicBipartiteExponentialGraph": lambda: DynamicBipartiteExponentialGraph(n + n % 2),
        "DynamicDirectedLinearGraph": lambda: DynamicDirectedLinearGraph(n),
        "DynamicBipartiteLinearGraph": lambda: DynamicBipartiteLinearGraph(n + n % 2),
        "RingGraph": lambda: RingGraph(n),
        "TorusGraph": lambda: TorusGraph(n + n % 2),
        "HypercubeGraph": lambda: HypercubeGraph(power_of_two(n)),
        "CompleteGraph": lambda: CompleteGraph(n),
    }
    if n <= MOST_EDGES:
        cycle = nx.cycle_graph(n)
        graphs["NetworkXGraph (cycle)"] = lambda: NetworkXGraph(cycle)
    return graphs


def scaling_cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each number of ranks and graph."""
    for n in MANY:
        for name, make in makers(n).items():
            repeats = 1 if name.startswith("NetworkX") else REPEATS
            yield {"graph": name, "about": n}, partial(scaling, make, repeats)


def scaling(make: Callable[[], GraphManager], repeats: int) -> Mapping[str, Any]:
    """Return the milliseconds to make a graph, to ask for the peers of a rank, and to make its weights; the memory.

    Args:
        make: makes the graph.
        repeats: of each measurement.
    """
    graph, construction = cpu_time(make, repeats)
    rank = graph.world_size // 2

    def query() -> None:
        for _ in range(LOOPS):
            graph.out_peers(rank, ROUND)
            graph.in_peers(rank, ROUND)

    def mix() -> None:
        mixing = UniformMixing(make())
        mixing.is_doubly_stochastic, mixing.is_symmetric  # noqa: B018 (a wrapper asks for both)
        mixing.weights(rank, ROUND)

    seconds = (construction, cpu_time(query, repeats)[1] / LOOPS, cpu_time(mix, repeats)[1])
    names = ("construction_ms", "query_ms", "mixing_ms")
    tracemalloc.start()
    try:
        mix()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return {
        "ranks": graph.world_size,
        **{name: round(1e3 * value, 4) for name, value in zip(names, seconds, strict=True)},
        "peak_bytes": peak,
    }


# Plans of MATCHA.

PLANNED = (16, 64, 256)
BUDGETS, DEGREE, MOST_JOINT = (0.1, 0.5), 12.0, 64
"""Shares of the full schedule, links of a rank away from the border, and the most ranks of a joint optimum."""


def geometric(num_ranks: int) -> nx.Graph:
    """Return a connected graph of points in the unit square, with links between near ones."""
    radius = math.sqrt(DEGREE / (math.pi * num_ranks))
    for seed in itertools.count():
        graph = nx.random_geometric_graph(num_ranks, radius, seed=seed)
        if nx.is_connected(graph):
            return graph
        if seed % 20 == 19:
            radius *= 1.05
    raise AssertionError("unreachable: the radius grows until the graph is connected")


def planning_cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each number of ranks and budget."""
    for n in PLANNED:
        for budget in BUDGETS:
            yield {"ranks": n, "budget": budget}, partial(planning, n, budget)


def planning(num_ranks: int, budget: float, repeats: int = 1) -> Mapping[str, Any]:
    """Return rho of a plan and its times, in seconds; beside it the joint optimum of p and alpha.

    Args:
        num_ranks: of the graph.
        budget: the share of the full schedule.
        repeats: of each measurement.
    """
    graph = geometric(num_ranks)
    matchings, coloring = cpu_time(lambda: decompose(graph), repeats)
    p, activation = cpu_time(lambda: activation_probabilities(matchings, budget), repeats)
    weight, alpha = cpu_time(lambda: mixing_weight(matchings, p), repeats)
    joint, seconds = None, math.nan
    if num_ranks <= MOST_JOINT:
        joint, seconds = cpu_time(lambda: joint_probabilities(matchings, budget), repeats)
    return {
        "links": graph.number_of_edges(),
        "matchings": len(matchings),
        "coloring_seconds": round(coloring, 5),
        "probabilities_seconds": round(activation, 5),
        "alpha_seconds": round(alpha, 5),
        "plan_seconds": round(coloring + activation + alpha, 5),
        "rho": round(weight.rho, 5),
        "joint_seconds": round(seconds, 5),
        "joint_rho": math.nan if joint is None else round(joint.rho, 5),
    }


GRAPH_STUDIES: Mapping[str, Computed] = {
    "default_graphs": Computed(
        agreement_cells,
        (
            *("ranks", "role", "graph", "basis", "messages_per_round", "contraction_per_round"),
            *("contraction_per_message", "rounds", "messages", "noise", "drift"),
        ),
    ),
    "graph_scaling": Computed(
        scaling_cells, ("graph", "about", "ranks", "construction_ms", "query_ms", "mixing_ms", "peak_bytes")
    ),
    "matcha_planning": Computed(
        planning_cells,
        (
            *("ranks", "budget", "links", "matchings", "coloring_seconds", "probabilities_seconds", "alpha_seconds"),
            *("plan_seconds", "rho", "joint_seconds", "joint_rho"),
        ),
    ),
}
"""The studies by name."""

"""Which graph where the number of ranks is no power of two: how fast ranks agree, how far training keeps them apart.

    OMP_NUM_THREADS=1 python -m benchmarks.default_graphs
    OMP_NUM_THREADS=1 python -m benchmarks.default_graphs --sizes 3 5 9 --output benchmarks/results/default_graphs.csv

The defaults are those of `default_graph`: one for push-sum, one for undirected gossip. Beside them the ring, the
default of AD-PSGD for an odd number of ranks, `BaseGraph`, and random graphs of one peer. Everything is linear algebra
on the mixing matrices W(t) of training.

Contraction is by what factor the distance from the average shrinks per round in the long run, of random graphs in
expectation (`visualization.spectra` has the definitions), and by what factor per message that a rank sends, on average
over the ranks; a message is a whole model. Rounds and messages lead to --error of the worst start.

In training every step moves the models apart again, x <- W(t) (x + u). Two columns say how far apart they stay, on
average over many rounds. Noise: u is random and independent, of variance 1 in every rank and step; the figure is the
variance of a rank around the mean. Drift: u is the same in all steps, as from data that differ between ranks, and the
vector of all u has length 1; the figure is the length of the vector of all distances from the mean, for the worst u.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, Python looks beside this file only

from benchmarks.record import write_rows
from gossip_modules.graph_manager import (
    BaseGraph,
    DynamicBipartiteCompleteGraph,
    EquiDynGraph,
    GraphManager,
    NPeerDynamicDirectedExponentialGraph,
    RandomMatchingGraph,
    default_graph,
)
from gossip_modules.graph_manager.named_graphs import undirected_ring
from gossip_modules.mixing_manager import MixingManager
from visualization.graphs import make_mixing
from visualization.spectra import gap_and_rounds, messages_in

SIZES = (3, 5, 6, 7, 9, 10, 12, 15, 25, 49)
NUM_ROUNDS = 2000  # that noise and drift are averaged over, after half as many that forget the start


def graphs(num_ranks: int) -> Mapping[str, GraphManager]:
    """The default graphs by whose they are, then the others."""
    return {
        "default, push-sum": default_graph(num_ranks, push_sum=True),
        "default, undirected": default_graph(num_ranks, push_sum=False),
        "ring, both neighbours": undirected_ring(num_ranks),
        "bipartite-complete": DynamicBipartiteCompleteGraph(num_ranks),
        "base, 1 peer": BaseGraph(num_ranks),
        "exponential, 2 peers": NPeerDynamicDirectedExponentialGraph(num_ranks, peers_per_itr=2),
        "base, 2 peers": BaseGraph(num_ranks, 2),
        "random matching": RandomMatchingGraph(num_ranks),
        "equi-dyn, directed": EquiDynGraph(num_ranks),
    }


def disagreement(mixing: MixingManager) -> tuple[float, float]:
    """How far apart models stay under noise and under drift, see above."""
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


def rows_of(num_ranks: int, *, error: float) -> list[dict[str, Any]]:
    """A row per graph."""
    rows = []
    for name, graph in graphs(num_ranks).items():
        mixing = make_mixing(graph)
        gap, num_rounds, basis = gap_and_rounds(mixing, name, error=error)
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
        rounded = {key: round(value, 4) for key, value in numbers.items()}
        rows.append({"ranks": num_ranks, "role": name, "graph": type(graph).__name__, "basis": basis, **rounded})
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of ranks")
    parser.add_argument("--error", type=float, default=1e-6, help="what rounds and messages leave of the distance")
    parser.add_argument("--output", type=Path, help="a CSV file to write as well")
    arguments = parser.parse_args()
    rows = []
    for n in arguments.sizes:
        for row in rows_of(n, error=arguments.error):
            print(" | ".join(map(str, row.values())), flush=True)
            rows.append(row)
    if arguments.output:
        write_rows(arguments.output, rows, seed=0)


if __name__ == "__main__":
    main()

"""What graphs, mixing weights and groups cost at 1,000 to 1,000,000 ranks: time and memory of what one rank does.

    python -m benchmarks.graph_scaling
    python -m benchmarks.graph_scaling --sizes 1000 10000 --repeats 50

Per graph and size: construction, the peers of one rank in one round (out_peers and in_peers, one peer per round), its
mixing weights there (built, asked whether they are doubly stochastic and symmetric, as the wrappers do, and for one
row), and the peak of Python's memory over all of it. Mixing is uniform, on symmetric graphs Metropolis-Hastings too.
ButterflyGroups are WAGMA's: the phases of one rank's round. A graph that exists only for some sizes is measured at the
nearest one.
NetworkXGraph stands for graphs that are given edge by edge: it keeps them all, so it is O(n), and is measured up to
100,000 ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, Python looks beside this file only

from benchmarks.record import write_rows
from gossip_modules import RingGraph
from gossip_modules.graph_manager import (
    CompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    GraphManager,
    HypercubeGraph,
    NetworkXGraph,
    NPeerDynamicDirectedExponentialGraph,
    TorusGraph,
)
from gossip_modules.graph_manager.butterfly_groups import ButterflyGroups
from gossip_modules.mixing_manager import MetropolisHastingsMixing, MixingManager, UniformMixing

MAX_NETWORKX_RANKS = 100_000
COLUMNS = ("graph", "ranks", "construction_ms", "query_ms", "uniform_mixing_ms", "metropolis_mixing_ms", "peak_bytes")


def power_of_two(n: int) -> int:
    """The power of two nearest below or above n."""
    return min((1 << n.bit_length() - 1, 1 << n.bit_length()), key=lambda power: abs(power - n))


def makers(n: int) -> dict[str, Callable[[], GraphManager]]:
    """How to build every graph of about n ranks."""
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
    if n <= MAX_NETWORKX_RANKS:
        network = nx.cycle_graph(n)
        graphs["NetworkXGraph (cycle)"] = lambda: NetworkXGraph(network)
    return graphs


def query(graph: GraphManager) -> None:
    """The peers of a rank in the middle, in a late round."""
    graph.out_peers(graph.world_size // 2, 123_456_789)
    graph.in_peers(graph.world_size // 2, 123_456_789)


def mix(kind: Callable[[GraphManager], MixingManager], make: Callable[[], GraphManager]) -> None:
    """What a wrapper asks of the mixing of a new graph, and a row."""
    mixing = kind(make())
    mixing.is_doubly_stochastic, mixing.is_symmetric  # noqa: B018 (both are worked out when asked for)
    mixing.weights(mixing.graph.world_size // 2, 123_456_789)


def everything(make: Callable[[], GraphManager], kinds: Sequence[Callable[[GraphManager], MixingManager]]) -> None:
    """All that is measured, once."""
    query(make())
    for kind in kinds:
        mix(kind, make)


def group(n: int) -> None:
    """A rank's phases in a round of WAGMA."""
    ButterflyGroups(n).phases(n // 2, 123_456_789)


def milliseconds(action: Callable[[], object], repeats: int) -> float:
    """The least time of `repeats`: the rest is what else the machine does."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def peak_bytes(action: Callable[[], object]) -> int:
    """The peak of Python's memory meanwhile."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure(n: int, repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of all graphs of about n ranks."""
    for name, make in makers(n).items():
        times = 1 if name.startswith("NetworkX") else repeats
        graph = make()
        kinds = [UniformMixing, *([MetropolisHastingsMixing] if graph.is_symmetric else [])]
        mixing = [milliseconds(partial(mix, kind, make), times) for kind in kinds]
        figures = (milliseconds(make, times), milliseconds(partial(query, graph), times), *mixing, None)
        values = (name, graph.world_size, *figures[:4], peak_bytes(partial(everything, make, kinds)))
        yield dict(zip(COLUMNS, values, strict=True))
    phases = milliseconds(partial(group, n), repeats)
    values = ("ButterflyGroups", n, None, phases, None, None, peak_bytes(partial(group, n)))
    yield dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6], help="numbers of ranks")
    parser.add_argument("--repeats", type=int, default=20, help="the least time of so many is reported")
    parser.add_argument("--output", type=Path, help="a CSV file to write as well")
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|---{'|---:' * (len(COLUMNS) - 1)}|")
    rows = []
    for n in arguments.sizes:
        for row in measure(n, arguments.repeats):
            row = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            print(f"| {' | '.join('' if value is None else f'{value}' for value in row.values())} |", flush=True)
            rows.append(row)
    if arguments.output:
        write_rows(arguments.output, rows, seed=0)


if __name__ == "__main__":
    main()

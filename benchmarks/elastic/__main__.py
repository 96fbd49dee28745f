"""What workers that die and join cost the others, and what a membership costs where nobody does.

    python -m benchmarks.elastic                    # kills: benchmarks/results/elastic.csv
    python -m benchmarks.elastic --figure cost      # elastic_cost.csv
    python -m benchmarks.elastic --figure joins     # elastic_joins.csv
    python -m benchmarks.elastic --figure network   # elastic_network.csv

Workers train a small network on this machine, each a process of its own, with the store in another one.

kills: when all of eight have taken 100 steps some are killed (SIGKILL) at once, the first among them; one is started
again 100 steps later. cost: steps with and without a membership take turns in four processes. joins: workers come one
after the other to a job of four with a larger network. network: each worker is a host of its own, a network namespace
behind a router; one of them is stopped or cut off, or packets to and from it are late or lost. It needs root.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import tyro

from benchmarks.elastic import cost, joins, kills, network
from benchmarks.elastic.worker import METHODS, ElasticJob, store, train
from benchmarks.record import RESULTS, provenance


@dataclass
class ElasticBenchmark:
    """What is run."""

    figure: Literal["kills", "cost", "joins", "network"] = "kills"
    methods: tuple[str, ...] = tuple(METHODS)
    kills: tuple[int, ...] = (1, 2, 3)
    """How many of eight workers are killed."""
    faults: tuple[str, ...] = tuple(network.FAULTS)
    """Of the network, and of a worker on it."""
    num_hosts: int = 8
    step_ms: float = 50.0
    """Of computation, which is slept: the workers share the cores of one machine."""
    num_joins: int = 4
    widths: tuple[int, ...] = (128, 8192)
    """Of the networks whose steps are compared."""
    turns: int = 60
    seed: int = 1
    folder: Path = RESULTS


def rows(options: ElasticBenchmark, method: str, address: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Of one method; each run has a store of its own."""
    if options.figure == "kills":
        for count in options.kills:
            with store() as own:
                yield kills.measure(ElasticJob(method, own, 8, options.step_ms, options.seed), count, folder)
    elif options.figure == "joins":
        large = ElasticJob(method, address, 4, options.step_ms, options.seed, width=1 << 14)
        yield from joins.measure(large, options.num_joins, folder)
    elif options.figure == "network":
        for fault in options.faults:
            yield network.measure(network.FaultTraining(method, options.num_hosts, options.step_ms, 400), fault)
    else:
        for width in options.widths:
            size: dict[str, Any] = {"num_workers": 4, "width": width, "step_ms": options.step_ms}
            with store() as own:
                yield cost.measure(method, address=own, turns=options.turns, **size)


def main() -> None:
    """Rows appended as they come."""
    if sys.argv[1:2] == ["worker"]:
        train(ElasticJob(**json.loads(sys.argv[2])))
        return
    if sys.argv[1:2] == ["cost-worker"]:
        cost.run(*json.loads(sys.argv[2]))
        return
    options = tyro.cli(ElasticBenchmark)
    output = options.folder / ("elastic.csv" if options.figure == "kills" else f"elastic_{options.figure}.csv")
    output.parent.mkdir(parents=True, exist_ok=True)
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder, store() as address:
            for figures in rows(options, method, address, Path(folder)):
                row = {**provenance(options.seed), **figures}
                print(row, flush=True)
                pd.DataFrame([row]).to_csv(output, mode="a", header=not output.exists(), index=False)


if __name__ == "__main__":
    main()

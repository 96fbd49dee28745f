"""What workers that die and join cost the others, and what a membership costs where nobody does.

    python -m benchmarks.elastic                    # kills: benchmarks/results/elastic.csv
    python -m benchmarks.elastic --figure cost      # elastic_cost.csv
    python -m benchmarks.elastic --figure joins     # elastic_joins.csv
    python -m benchmarks.elastic --figure network   # elastic_network.csv
    python -m benchmarks.elastic --figure scale --methods SGP "torchft, all-reduce" --step-ms 250    # elastic_scale.csv

Workers train a small network on this machine, each a process of its own, with the store in another one.

kills: when all of eight have taken 100 steps some are killed (SIGKILL) at once, rank 0 among them, alone or with the
store; 100 steps later one is started again, with the store. torchft's all-reduce is beside the methods of the library
if it is installed: `make cluster-venv`, and run with .venv-cluster/bin/python. cost: steps with and without a
membership take turns in four processes. joins: workers come one after the other to a job of four with a larger network.
scale: one of 8, 16 and 32 workers is killed, and started again; each is a host of the emulated cluster, with 1 Gbit/s.
network: each worker is a host of its own, a network namespace behind a router; one of them is stopped or cut off, or
packets to and from it are late or lost. scale and network need root.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.cluster.network.namespaces import or_exit
from benchmarks.elastic import cost, joins, kills, network, scale, torchft_worker
from benchmarks.elastic.methods import METHODS
from benchmarks.elastic.worker import ElasticJob, StoreProcess
from benchmarks.record import RESULTS, append_row


@dataclass
class ElasticBenchmark:
    """What is run."""

    figure: Literal["kills", "cost", "joins", "network", "scale"] = "kills"
    methods: tuple[str, ...] = (*METHODS, torchft_worker.NAME)
    """torchft has no figures but kills and scale."""
    kills: tuple[int, ...] = (1, 2, 3)
    """How many of eight workers are killed."""
    store: tuple[Literal["lives", "killed"], ...] = ("lives", "killed")
    """What becomes of the store when they are."""
    faults: tuple[str, ...] = tuple(network.FAULTS)
    """Of the network, and of a worker on it."""
    num_hosts: int = 8
    step_ms: float = 50.0
    """Of computation, which is slept: the workers share the cores of one machine."""
    sizes: tuple[int, ...] = (8, 16, 32)
    """Numbers of workers, for the figure of scale."""
    num_joins: int = 4
    widths: tuple[int, ...] = (128, 8192)
    """Of the networks whose steps are compared."""
    turns: int = 60
    seed: int = 1
    folder: Path = RESULTS


def rows(options: ElasticBenchmark, method: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Of one method; each run has a store of its own."""
    if options.figure == "kills":
        for state in options.store:
            for count in options.kills:
                with contextlib.closing(kills.start_store(method)) as own:
                    job = ElasticJob(method, own.address, 8, options.step_ms, options.seed)
                    yield kills.measure(job, count, own, folder, with_store=state == "killed")
    elif options.figure == "scale":
        for size in options.sizes:
            yield scale.measure(method, size, folder, step_ms=options.step_ms, seed=options.seed)
    elif options.figure == "joins":
        with contextlib.closing(StoreProcess()) as own:
            large = ElasticJob(method, own.address, 4, options.step_ms, options.seed, width=1 << 14)
            yield from joins.measure(large, options.num_joins, folder)
    elif options.figure == "network":
        for fault in options.faults:
            yield network.measure(network.FaultTraining(method, options.num_hosts, options.step_ms, 400), fault)
    else:
        for width in options.widths:
            model: dict[str, Any] = {"num_workers": 4, "width": width, "step_ms": options.step_ms}
            with contextlib.closing(StoreProcess()) as own:
                yield cost.measure(method, address=own.address, turns=options.turns, **model)


def measured(options: ElasticBenchmark) -> Iterator[str]:
    """The methods, without torchft where it is not installed or has no such figure."""
    for method in options.methods:
        if method != torchft_worker.NAME:
            yield method
        elif options.figure not in ("kills", "scale"):
            continue
        elif importlib.util.find_spec("torchft") is None:
            print(f"{method}: left out, as torchft is not installed; {torchft_worker.REMEDY}", file=sys.stderr)
        else:
            yield method


def main() -> None:
    """Rows appended as they come."""
    if sys.argv[1:2] == ["cost-worker"]:
        cost.run(*json.loads(sys.argv[2]))
        return
    options = tyro.cli(ElasticBenchmark)
    output = options.folder / ("elastic.csv" if options.figure == "kills" else f"elastic_{options.figure}.csv")
    for method in measured(options):
        with tempfile.TemporaryDirectory() as folder, or_exit():
            for figures in rows(options, method, Path(folder)):
                print(figures, flush=True)
                append_row(output, figures, seed=options.seed)


if __name__ == "__main__":
    main()

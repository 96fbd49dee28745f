"""What workers that die and join cost the others, and what a membership costs where nobody does.

    python -m benchmarks.elastic                    # kills: benchmarks/results/elastic.csv
    python -m benchmarks.elastic --figure cost      # elastic_cost.csv
    python -m benchmarks.elastic --figure network   # elastic_network.csv
    python -m benchmarks.elastic --figure scale --methods SGP "torchft, all-reduce" --step-ms 250    # elastic_scale.csv

Workers train a small network on this machine, each a process of its own, with the store in another one.

kills: when all of eight have taken 100 steps some are killed (SIGKILL) at once, rank 0 among them, alone or with the
store; 100 steps later one is started again, with the store. torchft's all-reduce is beside the methods of the library
if it is installed: `make cluster-venv`, and run with .venv-cluster/bin/python. cost: the
processor time of steps with and without a membership, which take turns; nothing is slept, and half of the processes
wait. scale: one of 8, 16 and 32 workers is killed, and started again; each is a host
of the emulated cluster, with 1 Gbit/s. network: each worker is a host of its own, a network namespace behind a router;
one of them is stopped or cut off, or packets to and from it are late or lost. scale and network need root.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.cluster.network.links import EmulatedNetwork, LinkRates
from benchmarks.cluster.network.namespaces import or_exit
from benchmarks.elastic import cost, network, torchft_worker
from benchmarks.elastic.job import Job
from benchmarks.elastic.kills import figures, kill, scale_figures
from benchmarks.elastic.methods import METHODS
from benchmarks.elastic.training import Training
from benchmarks.record import RESULTS, append_row

RATE = 1e9
"""Of each link of the emulated cluster, in bit/s."""


@dataclass
class ElasticBenchmark:
    """What is run."""

    figure: Literal["kills", "cost", "network", "scale"] = "kills"
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
    widths: tuple[int, ...] = (128, 131_072)
    """Of the networks whose steps are compared."""
    turns: int = 60
    seed: int = 1
    folder: Path = RESULTS


def rows(options: ElasticBenchmark, method: str) -> Iterator[dict[str, Any]]:
    """Of one method; each run has a store of its own."""

    kind = torchft_worker.TorchFTTraining if method == torchft_worker.NAME else Training
    shared: dict[str, Any] = {"method": method, "step_ms": options.step_ms, "seed": options.seed, **of_width(128)}
    if options.figure == "kills":
        for state in options.store:
            for count in options.kills:
                with Job(kind(num_workers=8, **shared)) as job:
                    run = kill(job, count, with_store=state == "killed")
                yield {"method": method, "num_workers": 8, "killed": count, "store": state, **figures(run)}
    elif options.figure == "scale":
        for size in options.sizes:
            with EmulatedNetwork(size, LinkRates(RATE)) as hosts, Job(kind(num_workers=size, **shared), hosts) as job:
                row = {"method": method, "num_workers": size, "rate_gbit": RATE / 1e9, "slept_ms": options.step_ms}
                yield {**row, **scale_figures(kill(job, 1, num_steps=40))}
    elif options.figure == "network":
        for fault in options.faults:
            yield network.measure(Training(num_workers=options.num_hosts, min_deadline=1.0, **shared), fault)
    else:
        for width in options.widths:
            own = {**shared, **of_width(width), "num_workers": 4, "min_deadline": 10.0, "turns": options.turns}
            own["step_ms"] = 0.0
            yield cost.measure(cost.CostTraining(**own))


def of_width(width: int) -> dict[str, Any]:
    """The network of a training, by the width of its hidden layer."""
    return {"layers": (64, width, 8), "learning_rate": 1 / width}


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
    options = tyro.cli(ElasticBenchmark, description=__doc__)
    output = options.folder / ("elastic.csv" if options.figure == "kills" else f"elastic_{options.figure}.csv")
    with or_exit():
        for method in measured(options):
            for row in rows(options, method):
                print(row, flush=True)
                append_row(output, row, seed=options.seed)


if __name__ == "__main__":
    main()

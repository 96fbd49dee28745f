"""Accuracy on uneven data, and with numbers of workers that are no power of two.

    GOSSIP_DATA=/path/to/folder OMP_NUM_THREADS=1 python -m benchmarks.uneven --figure data
    GOSSIP_DATA=/path/to/folder OMP_NUM_THREADS=1 python -m benchmarks.uneven --figure workers --seeds 1 2 3

data: 16 workers by all methods, with and without momentum, on shards whose classes are drawn from Dirichlet(alpha):
Table 2 of Vogels et al., "RelaySum for Decentralized Deep Learning on Heterogeneous Data", NeurIPS 2021, arXiv
2110.04175, at small scale. workers: D-PSGD on `BaseGraph` beside all-reduce and the one-peer exponential graph.

Images are those of CIFAR-10 at 16 pixels, read from cifar10-jpeg.tar.gz in GOSSIP_DATA and kept in --cache. All workers
are in one process (`replicas.py` says how). Accuracy is that of the averaged model on all test images.

The learning rate is tuned for each method, number of workers, alpha and momentum with the first seed: the rates of
--rates, divided by 1 - momentum in effect, and, while the best is the lowest or the highest that was tried, a third or
three times of it, three times at most (or --extra-rates). Other seeds use the best rate of the first.

Rows are appended to --output as they come, and a training whose row is there is not repeated: start again to go on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import tyro

from benchmarks.cluster.tuning import next_rate, rounded
from benchmarks.record import RESULTS, append_row
from benchmarks.uneven.images import decoded, default_cache
from benchmarks.uneven.methods import METHODS
from benchmarks.uneven.trial import UnevenTrial


@dataclass
class UnevenBenchmark:
    """What is trained."""

    figure: Literal["data", "workers"] = "data"
    methods: tuple[str, ...] = ()
    """By default all of the figure."""
    alphas: tuple[float, ...] = ()
    """Of the Dirichlet distribution; 0: shards are alike. By default 0.1, 0.01, 1 (data) or 0.1 (workers)."""
    momenta: tuple[float, ...] = ()
    """Of SGD; by default 0.9 and 0 (data) or 0.9 (workers)."""
    workers: tuple[int, ...] = ()
    """By default 16 (data) or 3, 5, 6, 7, 10, 12, 25 (workers)."""
    rates: tuple[float, ...] = (0.3, 1.0)
    """Learning rates divided by 1 - momentum, from the lowest to the highest."""
    extra_rates: int = 3
    """How many more are tried at most."""
    steps: int = 800
    """Of each worker."""
    batch_size: int = 8
    """Of each worker."""
    seeds: tuple[int, ...] = (1,)
    """The first one is that of the learning rates."""
    minutes: float = 0.0
    """No training begins after so many; 0: all are done."""
    cache: Path = field(default_factory=default_cache)
    """Folder of the decoded images."""
    output: Path | None = None
    """CSV file; by default benchmarks/results/uneven_<figure>.csv."""

    def __post_init__(self) -> None:
        of_data = self.figure == "data"
        self.methods = self.methods or (tuple(METHODS) if of_data else ("ar", "base", "sgp"))
        self.alphas = self.alphas or ((0.1, 0.01, 1.0) if of_data else (0.1,))
        self.momenta = self.momenta or ((0.9, 0.0) if of_data else (0.9,))
        self.workers = self.workers or ((16,) if of_data else (3, 5, 6, 7, 10, 12, 25))
        self.output = self.output or RESULTS / f"uneven_{self.figure}.csv"
        if unknown := set(self.methods) - set(METHODS):
            raise ValueError(f"got the methods {', '.join(sorted(unknown))}, expected some of {', '.join(METHODS)}")
        if not self.seeds:
            raise ValueError("got no seeds, expected one or more")
        if not self.rates or list(self.rates) != sorted(set(self.rates)) or self.rates[0] <= 0:
            raise ValueError(f"got rates={self.rates}, expected some above 0, each once, the lowest first")

    def trials(self) -> Iterator[Mapping[str, Any]]:
        """All settings, a seed after the other; only the learning rate is left open."""
        for seed, momentum, alpha, workers, method in product(
            self.seeds, self.momenta, self.alphas, self.workers, self.methods
        ):
            if momentum or not METHODS[method].needs_momentum:
                yield {
                    "method": method,
                    "workers": workers,
                    "alpha": alpha,
                    "momentum": momentum,
                    "steps": self.steps,
                    "batch_size": self.batch_size,
                    "seed": seed,
                }

    def rates_of(self, momentum: float) -> tuple[float, ...]:
        """Learning rates of SGD with this momentum."""
        return tuple(rounded(rate * (1 - momentum)) for rate in self.rates)


def accuracies(rows: Iterable[Mapping[str, Any]], setting: Mapping[str, Any]) -> dict[float, float]:
    """By the learning rates that were tried in this setting; a training that diverged counts as 0."""
    return {
        row["learning_rate"]: 0.0 if pd.isna(row["accuracy_percent"]) else row["accuracy_percent"]
        for row in rows
        if all(row[name] == value for name, value in setting.items())
    }


def missing(options: UnevenBenchmark, rows: Sequence[Mapping[str, Any]]) -> UnevenTrial | None:
    """The first training of which there is no row."""
    for setting in options.trials():
        if setting["seed"] == options.seeds[0]:
            rates = options.rates_of(setting["momentum"])
            rate = next_rate(accuracies(rows, setting), rates, options.extra_rates)
        else:
            tuned = accuracies(rows, {**setting, "seed": options.seeds[0]})
            best = max(tuned, key=lambda one: tuned[one])
            rate = None if best in accuracies(rows, setting) else best
        if rate is not None:
            return UnevenTrial(**setting, learning_rate=rate)
    return None


def main(options: UnevenBenchmark) -> int:
    """Train what has no row yet; the exit code: 3 where the time was over before the work."""
    assert options.output is not None
    start = time.monotonic()
    folder = decoded(options.cache)
    rows = pd.read_csv(options.output).to_dict("records") if options.output.is_file() else []
    while (trial := missing(options, rows)) is not None:
        if options.minutes and time.monotonic() - start > 60 * options.minutes:
            return 3
        row = {name: value for name, value in asdict(trial).items() if name != "seed"} | trial.run(folder)
        append_row(options.output, row, seed=trial.seed)
        rows.append({**row, "seed": trial.seed})
        print(*rows[-1].values(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(UnevenBenchmark, description=__doc__)))

"""The score by step of the methods of the cluster: the other half of the time to a fixed accuracy, or to a fixed loss.

    sudo .venv-cluster/bin/python -m benchmarks.cluster.curves --data /path/to/cifar10 --output runs/curves/images.csv
    sudo .venv-cluster/bin/python -m benchmarks.cluster.curves --task language --batch-size 8 --steps 400 --seeds 1 2 3
    sudo .venv-cluster/bin/python -m benchmarks.cluster.curves --data /path/to/cifar10 --methods adpsgd dpwa \
        --rate 0.1 --parameters 1.12e6 --compute 150 --straggle-chance 0.05

Every rank trains a small network, every epoch on another share of the data, with the methods and the processes of
`python -m benchmarks.cluster`. images: convolutions on images scaled to 16 pixels, by SGD with momentum; the score is
the accuracy. language: a decoder of two layers on bytes of text, by AdamW; the score is the validation loss. It is
that of each rank's own model on its share of what is evaluated on, so disagreement costs.

The learning rate rises in the first tenth of the steps (language), and falls linearly to zero over --steps. It is tuned
for each method alike with the first of --seeds, which is the lowest, by the score at the end: the rates of
--learning-rates, and, while the best is the lowest or the highest that was tried, a third or three times of it
(--extra-rates). Other seeds use the best rate of the first.

What lockstep methods compute does not depend on links and pace: they train as fast as they can over links that are not
shaped, and that counts for every cell. What asynchronous methods compute does: on slow links they skip exchanges. So
each cell needs a training of theirs, with its links, its delays, its compute time (waited in the forward pass) and as
many parameters, most of them ballast; it must run alone on its machine. For cells with a spread, a slow host or a slow
link there is none yet.

--data is a folder with train/ and test/, in each a folder per class (images), or one of text, UTF-8 (language; by
default the sources of Python's own standard library). --output gets a row per evaluation, or one that says why there
is none. A training that has a row is not repeated: start again to go on, after removing the rows of those that are to
be tried again. The exit code is 3 where --minutes were over before the work.
`python -m benchmarks.cluster.time_to_target` joins it with seconds per step.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import tyro

from benchmarks.cluster.curve_table import (
    COLUMNS,
    SETTING,
    best_rate,
    curve,
    digest,
    goodness_by_rate,
    rows_in,
    rows_of_setting,
)
from benchmarks.cluster.methods import CLUSTER_METHODS, require_methods
from benchmarks.cluster.network.links import MAX_HOSTS, MIN_HOSTS, EmulatedNetwork, LinkRates
from benchmarks.cluster.network.namespaces import or_exit
from benchmarks.cluster.processes import Fleet, TrialError
from benchmarks.cluster.tuning import next_rate
from benchmarks.cluster.workload.delays import Delays
from benchmarks.cluster.workload.images import decode
from benchmarks.cluster.workload.tasks import TASKS
from benchmarks.cluster.workload.text import encode
from benchmarks.cluster.workload.training import Training
from benchmarks.record import append_rows

EVALUATE_EVERY = 40
"""Steps; a multiple of all periods, so that methods that average now and then have just done so."""
DEFAULT_RATES: Mapping[str, tuple[float, ...]] = {"images": (0.05,), "language": (0.003, 0.01)}


@dataclass(frozen=True)
class Curves:
    """What is trained."""

    data: Path | None = None
    """Folder of images or of text, see above; language: by default Python's standard library."""
    task: Literal["images", "language"] = "images"
    """What is learnt."""
    methods: tuple[str, ...] = tuple(CLUSTER_METHODS)
    """To train."""
    learning_rates: tuple[float, ...] = ()
    """From the lowest to the highest; by default 0.05 (images) or 0.003 0.01 (language)."""
    extra_rates: int = 2
    """How many more are tried at most."""
    hosts: int = 8
    """A rank each."""
    steps: int = 600
    """Of each rank; rounded up to a multiple of 40."""
    batch_size: int = 32
    """Of each rank: images, or sequences of 64 bytes."""
    seeds: tuple[int, ...] = (1,)
    """From the lowest, with which learning rates are tuned: of the first parameters, of the data's order, of delays."""
    rate: float = 0.0
    """Of each link, both ways, in Gbit/s; 0: not shaped."""
    parameters: float = 0.0
    """Of the model at least, with ballast; 0: no ballast."""
    compute: float = 0.0
    """What a forward pass is made to take, in ms; 0: what it takes."""
    straggle_chance: float = 0.0
    """How often a rank is a straggler in a step,"""
    slow_factor: float = 10.0
    """and how much longer it computes then."""
    minutes: float = 0.0
    """No training begins after so many; 0: all are done."""
    out: Path = Path("runs/curves")
    """Folder of the arrays and of what ranks print."""
    output: Path | None = None
    """CSV file to append to; by default that of the task in --out."""

    def __post_init__(self) -> None:
        require_methods(self.methods)
        if not MIN_HOSTS <= self.hosts <= MAX_HOSTS:
            raise ValueError(f"got hosts={self.hosts}, expected {MIN_HOSTS} to {MAX_HOSTS}; see --help")
        if min(self.steps, self.batch_size) < 1 or not 0 <= self.compute < math.inf:
            raise ValueError(f"got {self}, expected steps and batch_size >= 1, compute >= 0; see --help")
        if not self.seeds or list(self.seeds) != sorted(set(self.seeds)) or min(self.seeds) < 0:
            raise ValueError(f"got seeds={self.seeds}, expected some of at least 0, each once, the lowest first")
        rates = self.rates
        if list(rates) != sorted(set(rates)) or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"got learning_rates={rates}, expected some above 0, each once, the lowest first")
        if self.straggle_chance and not self.compute:
            raise ValueError(f"got straggle_chance={self.straggle_chance} and compute=0, of which there is no multiple")
        least = TASKS[self.task].num_parameters
        if not (self.parameters == 0 or least <= self.parameters < math.inf):
            raise ValueError(f"got parameters={self.parameters}, expected 0 or at least {least}: so many learn")
        if self.data is None and self.task == "images":
            raise ValueError("got no data, expected a folder of images; see --data")
        self._delays(0)
        LinkRates(self.rate * 1e9)

    @property
    def rates(self) -> tuple[float, ...]:
        """Learning rates that are tried with the first seed."""
        return self.learning_rates or DEFAULT_RATES[self.task]

    @property
    def csv(self) -> Path:
        """The file of the rows."""
        return self.output or self.out / f"{self.task}.csv"

    @property
    def num_steps(self) -> int:
        """Of each rank."""
        return -(-self.steps // EVALUATE_EVERY) * EVALUATE_EVERY

    def _delays(self, seed: int) -> Delays:
        return Delays(straggle_chance=self.straggle_chance, slow_factor=self.slow_factor, seed=seed)

    def settings(self, data: str) -> Iterator[dict[str, Any]]:
        """All trainings, a seed after the other; only the learning rate is left open.

        Args:
            data: the hash of the arrays.
        """
        for seed, method in product(self.seeds, self.methods):
            values = (self.task, data, method, self.hosts, self.rate, self.parameters, self.compute, 0.0)
            more = (self.straggle_chance, self.slow_factor, 1.0, 0.0, self.batch_size, self.num_steps)
            yield {**dict(zip(SETTING, (*values, *more), strict=True)), "seed": seed}

    def missing(self, rows: pd.DataFrame, data: str) -> dict[str, Any] | None:
        """The first training of which there are no rows, with its learning rate.

        Args:
            rows: that are there.
            data: the hash of the arrays.
        """
        score = TASKS[self.task].score
        for setting in self.settings(data):
            tuned = goodness_by_rate(rows_of_setting(rows, {**setting, "seed": self.seeds[0]}), score)
            if setting["seed"] == self.seeds[0]:
                rate = next_rate(tuned, self.rates, self.extra_rates)
            else:
                best = best_rate(tuned)
                rate = None if best in set(rows_of_setting(rows, setting)["learning_rate"]) else best
            if rate is not None:
                return {**setting, "learning_rate": rate}
        return None

    def _check_seeds(self, rows: pd.DataFrame, data: str) -> None:
        """Raise where there are rows of a lower seed: learning rates were tuned with that one."""
        for setting in self.settings(data):
            del setting["seed"]
            lowest = rows_of_setting(rows, setting)["seed"].min()
            if lowest < self.seeds[0]:
                raise ValueError(
                    f"got seeds={self.seeds} where {self.csv} has {setting['method']} with seed {lowest}, expected "
                    "that too, as learning rates are tuned with the lowest seed; add it, or choose another --output"
                )

    def training(self, setting: Mapping[str, Any], number: int, arrays: Path) -> Training:
        """One of the trainings."""
        return Training(
            method=setting["method"],
            number=number,
            num_steps=self.num_steps,
            num_parameters=self.parameters,
            compute_seconds=self.compute / 1e3,
            delays=self._delays(setting["seed"]),
            learning_rate=setting["learning_rate"],
            limit_seconds=120.0 + self.num_steps * self._most_seconds(),
            task=self.task,
            data=str(arrays),
            batch_size=self.batch_size,
            evaluate_every=EVALUATE_EVERY,
            seed=setting["seed"],
        )

    def _most_seconds(self) -> float:
        """Several times what a step of the slowest method should take, all ranks on one core."""
        wire = 8 * 32 * self.parameters / (self.rate * 1e9) if self.rate else 0.0
        return 0.02 * self.hosts * self.batch_size + 3 * self.compute / 1e3 * self.slow_factor + wire

    def main(self) -> int:
        """Run the trainings that have no rows yet, and append theirs; the exit code.

        Raises:
            ValueError: there is too little data, or the CSV file has other columns or rows of a lower seed.
        """
        start, arrays = time.monotonic(), self.out / self.task
        self._prepare(arrays)
        TASKS[self.task](arrays).check_sizes(self.hosts, self.batch_size)
        data = digest(arrays)
        rows, numbers = rows_in(self.csv), count()
        self._check_seeds(rows, data)
        if self.missing(rows, data) is None:
            return 0
        with (
            EmulatedNetwork(self.hosts, LinkRates(self.rate * 1e9)) as network,
            closing(Fleet(network, self.out / "logs")) as fleet,
        ):
            if self.compute and network.has_neighbours():
                print("another cluster runs on this machine: asynchronous methods get another pace", flush=True)
            while (setting := self.missing(rows, data)) is not None:
                if self.minutes and time.monotonic() - start > 60 * self.minutes:
                    return 3
                append_rows(self.csv, self._trained(setting, fleet, next(numbers), arrays), seed=setting["seed"])
                rows = rows_in(self.csv)
        print(self.csv)
        return 0

    def _prepare(self, arrays: Path) -> None:
        """Write the arrays of the task."""
        if self.task == "language":
            encode(self.data, arrays)
        else:
            assert self.data is not None, "as __post_init__ has checked"
            decode(self.data, arrays)

    def _trained(self, setting: Mapping[str, Any], fleet: Fleet, number: int, arrays: Path) -> list[dict[str, Any]]:
        """The rows of one training: of all its evaluations, or one that says why there is none."""
        key = {name: value for name, value in setting.items() if name != "seed"}
        what, begin = f"{setting['method']}, learning rate {setting['learning_rate']:g}", time.monotonic()
        nothing = dict.fromkeys(COLUMNS[len(SETTING) + 2 :])
        score = TASKS[self.task].score
        try:
            points = curve(fleet.run(self.training(setting, number, arrays)), score)
        except TrialError as error:
            print(f"{what}: {error}", flush=True)
            return [{**key, **nothing, "error": str(error)}]
        seconds = time.monotonic() - begin
        print(f"{what}: {points[-1]['score']:.4g} {score.unit} ({seconds:.0f} s)", flush=True)
        return [{**key, **nothing, **point} for point in points]


def main() -> int:
    """Run the command line; exit code 2 where this machine or user cannot have a cluster."""
    curves = tyro.cli(Curves, description=__doc__)
    with or_exit():
        return curves.main()


if __name__ == "__main__":
    sys.exit(main())

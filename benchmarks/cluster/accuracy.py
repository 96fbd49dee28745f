"""Accuracy by step of the methods of the cluster, on real images: the other half of the time to a fixed accuracy.

    sudo .venv-cluster/bin/python -m benchmarks.cluster.accuracy --data /path/to/cifar10
    sudo .venv-cluster/bin/python -m benchmarks.cluster.accuracy --data /path/to/cifar10 --methods adpsgd dpwa \
        --rate 0.1 --parameters 1.12e6 --compute 150 --straggle-chance 0.05

Every rank trains a small convolutional network on images scaled to 16 pixels, every epoch on another share of them,
with the methods and the processes of `python -m benchmarks.cluster`, with every learning rate, which falls linearly to
zero over --steps. Accuracy is that of each rank's own model on its share of the test images, so disagreement costs.

What lockstep methods compute does not depend on links and pace: they train as fast as they can over links that are not
shaped, and that counts for every cell. What asynchronous methods compute does: on slow links they skip exchanges. So
each cell needs a training of theirs, with its links, its delays, its compute time (waited in the forward pass) and as
many parameters, most of them ballast; it must run alone on its machine. For cells with a spread, a slow host or a slow
link there is none yet.

--data is a folder with train/ and test/, in each a folder per class. --out gets accuracy.csv, a row per evaluation;
`python -m benchmarks.cluster.time_to_accuracy` joins it with seconds per step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

import pandas as pd
import tyro

from benchmarks.cluster.methods import CLUSTER_METHODS, require_methods
from benchmarks.cluster.network.links import MAX_HOSTS, MIN_HOSTS, EmulatedNetwork, LinkRates
from benchmarks.cluster.network.namespaces import or_exit
from benchmarks.cluster.processes import Fleet, TrialError
from benchmarks.cluster.workload.delays import Delays
from benchmarks.cluster.workload.images import decode
from benchmarks.cluster.workload.training import SPLITS, SmallNetwork, SplitImages, Training

EVALUATE_EVERY = 40
"""Steps; a multiple of all periods, so that methods that average now and then have just done so."""
COLUMNS = (
    *("method", "title", "hosts", "rate_gbit", "num_parameters", "planned_ms", "spread", "straggle_chance"),
    *("slow_factor", "slow_host", "slow_link_share", "batch_size", "planned_steps", "learning_rate", "repeat", "seed"),
    *("num_steps", "accuracy", "worst_accuracy", "mean_loss", "mean_step_ms", "error"),
)
"""Of the CSV. num_steps: mean over ranks; accuracy: per cent, of all ranks' own models; worst_accuracy: of the rank
with the lowest, on its share; mean_loss and mean_step_ms: over the steps since the row before."""


@dataclass(frozen=True)
class Accuracy:
    """What is trained: all methods with all learning rates."""

    data: Path
    """Folder with train/ and test/, in each a folder per class, ten of them at most."""
    methods: tuple[str, ...] = tuple(CLUSTER_METHODS)
    """To train."""
    learning_rates: tuple[float, ...] = (0.05,)
    """Of SGD with momentum 0.9."""
    hosts: int = 8
    """A rank each."""
    steps: int = 600
    """Of each rank; rounded up to a multiple of 40."""
    batch_size: int = 32
    """Of each rank."""
    repeats: int = 1
    """Of everything, each with another seed."""
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
    seed: int = 0
    """Of the first parameters, of the order of images, and of stragglers."""
    out: Path = Path("runs/accuracy")
    """Folder of everything this writes."""

    def __post_init__(self) -> None:
        require_methods(self.methods)
        if not MIN_HOSTS <= self.hosts <= MAX_HOSTS:
            raise ValueError(f"got hosts={self.hosts}, expected {MIN_HOSTS} to {MAX_HOSTS}; see --help")
        if min(self.steps, self.batch_size, self.repeats) < 1 or not 0 <= self.compute < math.inf:
            raise ValueError(f"got {self}, expected steps, batch_size and repeats >= 1, compute >= 0; see --help")
        rates = self.learning_rates
        if not rates or len(set(rates)) < len(rates) or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"got learning_rates={rates}, expected some above 0, each once; see --help")
        if self.straggle_chance and not self.compute:
            raise ValueError(f"got straggle_chance={self.straggle_chance} and compute=0, of which there is no multiple")
        if not (self.parameters == 0 or SmallNetwork.NUM_PARAMETERS <= self.parameters < math.inf):
            raise ValueError(
                f"got parameters={self.parameters}, expected 0 or at least {SmallNetwork.NUM_PARAMETERS}: so many learn"
            )
        self._delays(0)
        LinkRates(self.rate * 1e9)

    def _delays(self, repeat: int) -> Delays:
        return Delays(
            straggle_chance=self.straggle_chance, slow_factor=self.slow_factor, seed=1000 * self.seed + repeat
        )

    def training(self, method: str, learning_rate: float, number: int, repeat: int, images: Path) -> Training:
        """One of the trainings."""
        num_steps = -(-self.steps // EVALUATE_EVERY) * EVALUATE_EVERY
        return Training(
            method=method,
            number=number,
            num_steps=num_steps,
            num_parameters=self.parameters,
            compute_seconds=self.compute / 1e3,
            delays=self._delays(repeat),
            learning_rate=learning_rate,
            limit_seconds=120.0 + num_steps * self._most_seconds(),
            images=str(images),
            batch_size=self.batch_size,
            evaluate_every=EVALUATE_EVERY,
            seed=1000 * self.seed + repeat,
        )

    def _most_seconds(self) -> float:
        """Several times what a step of the slowest method should take, all ranks on one core."""
        wire = 8 * 32 * self.parameters / (self.rate * 1e9) if self.rate else 0.0
        return 0.02 * self.hosts * self.batch_size + 3 * self.compute / 1e3 * self.slow_factor + wire

    def main(self) -> None:
        """Run all trainings; write accuracy.csv after each.

        Raises:
            ValueError: the images are too few.
        """
        images = self.out / "images"
        decode(self.data, images)
        num_train, num_test = (len(SplitImages(images, split)) for split in SPLITS)
        batch = self.hosts * self.batch_size
        if num_train < batch or num_test < self.hosts:
            raise ValueError(
                f"got {num_train} training and {num_test} test images, expected at least {batch} and {self.hosts}, for "
                f"{self.hosts} hosts; lower --batch-size, or see --data"
            )
        rows: list[dict[str, Any]] = []
        numbers = count()
        with (
            EmulatedNetwork(self.hosts, LinkRates(self.rate * 1e9)) as network,
            closing(Fleet(network, self.out / "logs")) as fleet,
        ):
            if self.compute and network.has_neighbours():
                print("another cluster runs on this machine: asynchronous methods get another pace", flush=True)
            for repeat, method, rate in product(range(self.repeats), self.methods, self.learning_rates):
                training = self.training(method, rate, next(numbers), repeat, images)
                key = {
                    **asdict(self._delays(repeat)),
                    "method": method,
                    "title": CLUSTER_METHODS[method].title,
                    "hosts": self.hosts,
                    "rate_gbit": self.rate,
                    "num_parameters": self.parameters,
                    "planned_ms": self.compute,
                    "slow_link_share": 0.0,
                    "batch_size": self.batch_size,
                    "planned_steps": training.num_steps,
                    "learning_rate": rate,
                    "repeat": repeat,
                    "seed": self.seed,
                }
                try:
                    rows += [{**key, **point} for point in curve(fleet.run(training))]
                    print(f"{method}, learning rate {rate:g}: {rows[-1]['accuracy']:.1f} %", flush=True)
                except TrialError as error:
                    rows.append({**key, "error": str(error)})
                    print(f"{method}, learning rate {rate:g}: {error}", flush=True)
                pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(self.out / "accuracy.csv", index=False)
        print(self.out / "accuracy.csv")


def curve(answers: Sequence[dict[str, list[float]]]) -> list[dict[str, float]]:
    """Of the answers of all ranks, as `training.train` gives them: a point per evaluation."""
    points = []
    for index in range(min(len(answer["num_steps"]) for answer in answers)):
        correct = [answer["num_correct"][index] for answer in answers]
        tested = [answer["num_tested"][index] for answer in answers]
        points.append(
            {
                "num_steps": sum(answer["num_steps"][index] for answer in answers) / len(answers),
                "accuracy": 100 * sum(correct) / sum(tested),
                "worst_accuracy": 100 * min(c / t for c, t in zip(correct, tested)),
                "mean_loss": sum(answer["mean_loss"][index] for answer in answers) / len(answers),
                "mean_step_ms": 1e3 * sum(answer["mean_seconds"][index] for answer in answers) / len(answers),
            }
        )
    return points


def main() -> None:
    """Run the command line; exit code 2 where this machine or user cannot have a cluster."""
    accuracy = tyro.cli(Accuracy, description=__doc__)
    with or_exit():
        accuracy.main()


if __name__ == "__main__":
    main()

"""Accuracy by step of the methods of the cluster, on real images: the other half of the time to a fixed accuracy.

    sudo .venv-cluster/bin/python -m benchmarks.cluster.accuracy --data /path/to/cifar10
    sudo .venv-cluster/bin/python -m benchmarks.cluster.accuracy --data /path/to/cifar10 --straggle-chance 0.05 \
        --methods adpsgd wagma owagma dpwa

Every rank trains a small convolutional network on its share of the images, scaled to 16 pixels, with the methods and
the processes of `python -m benchmarks.cluster`, over links that are not shaped: how many steps a method takes does not
depend on them. Where it depends on how fast each rank is, the stragglers are the same as there. Every method is trained
with every learning rate, which falls linearly to zero over --steps. Accuracy is that of each rank's own model on its
share of the test images, so disagreement costs.

--data is a folder with train/ and test/, in each a folder per class. --out gets accuracy.csv, a row per evaluation;
`python -m benchmarks.cluster.time_to_accuracy` joins it with seconds per step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import tyro

from benchmarks.cluster.delays import Delays
from benchmarks.cluster.images import decode
from benchmarks.cluster.methods import METHODS, require_methods
from benchmarks.cluster.namespaces import ClusterUnavailableError
from benchmarks.cluster.network import MAX_HOSTS, MIN_HOSTS, Links, Network
from benchmarks.cluster.processes import Fleet, TrialError
from benchmarks.cluster.training import Training

EVALUATE_EVERY = 40
"""Steps; a multiple of all periods, so that methods that average now and then have just done so."""
COLUMNS = (
    *("method", "title", "hosts", "batch_size", "learning_rate", "straggle_chance", "slow_factor", "repeat", "seed"),
    *("num_steps", "accuracy", "worst_accuracy", "mean_loss", "error"),
)
"""Of the CSV. num_steps: mean over ranks; accuracy: per cent, of all ranks' own models; worst_accuracy: of the rank
with the lowest, on its share; mean_loss: over the steps since the row before."""


@dataclass(frozen=True)
class Accuracy:
    """What is trained: all methods with all learning rates."""

    data: Path
    """Folder with train/ and test/, in each a folder per class, ten of them at most."""
    methods: tuple[str, ...] = tuple(METHODS)
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
    straggle_chance: float = 0.0
    """How often a rank is a straggler in a step,"""
    slow_factor: float = 10.0
    """and how much longer it computes then."""
    compute: float = 100.0
    """What a step is taken to compute then, in ms."""
    seed: int = 0
    """Of the first parameters, of the order of images, and of stragglers."""
    out: Path = Path("runs/accuracy")
    """Folder of everything this writes."""

    def __post_init__(self) -> None:
        require_methods(self.methods)
        if not MIN_HOSTS <= self.hosts <= MAX_HOSTS:
            raise ValueError(f"got hosts={self.hosts}, expected {MIN_HOSTS} to {MAX_HOSTS}; see --help")
        if min(self.steps, self.batch_size, self.repeats) < 1 or self.compute < 0:
            raise ValueError(f"got {self}, expected steps, batch_size and repeats >= 1, compute >= 0; see --help")
        if not self.learning_rates or min(self.learning_rates) <= 0:
            raise ValueError(f"got learning_rates={self.learning_rates}, expected one > 0 at least; see --help")
        self._delays(0)

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
            compute_seconds=self.compute / 1e3,
            delays=self._delays(repeat),
            learning_rate=learning_rate,
            limit_seconds=120.0 + 2.0 * num_steps * (1.0 + self.compute / 1e3 * self.slow_factor),
            images=str(images),
            batch_size=self.batch_size,
            evaluate_every=EVALUATE_EVERY,
            seed=self.seed + repeat,
        )

    def main(self) -> None:
        """Run all trainings; write accuracy.csv after each."""
        self.out.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        numbers = count()
        with (
            TemporaryDirectory() as images,
            Network(self.hosts, Links(0.0)) as network,
            Fleet(network, self.out / "logs") as fleet,
        ):
            decode(self.data, Path(images))
            for repeat, method, rate in product(range(self.repeats), self.methods, self.learning_rates):
                training = self.training(method, rate, next(numbers), repeat, Path(images))
                key = {
                    "method": method,
                    "title": METHODS[method].title,
                    "hosts": self.hosts,
                    "batch_size": self.batch_size,
                    "learning_rate": rate,
                    "straggle_chance": self.straggle_chance,
                    "slow_factor": self.slow_factor,
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
            }
        )
    return points


def main() -> None:
    """Run the command line; exit code 2 where this machine or user cannot have a cluster."""
    accuracy = tyro.cli(Accuracy, description=__doc__)
    try:
        accuracy.main()
    except ClusterUnavailableError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

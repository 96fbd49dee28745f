"""The consensus experiment: how fast workers in a ring agree on the mean of their matrices, in
steps and in bits sent.

    python -m train.consensus  # a table and a picture, two minutes
    python -m train.consensus --methods power-r1-i1 plain --steps 1500  # to an error of 1e-4
    python -m train.consensus --data sparse --methods choco-topk --step-sizes 0.01 0.03 0.1 0.3

There is no training: every worker holds one matrix and only gossips. The error is the mean over
workers of the squared distance to the true mean, relative to the start. The matrices of all workers
are the rows of one tensor, which the rounds of the library mix in one process as ranks do; bits are
those that ranks send, headers included, mean over workers. A run ends when its error has grown
tenfold or the method has refused to go on (it diverges, and the message says how), has fallen below
1e-5, or after --steps. Vogels, Karimireddy, Jaggi, "Practical
Low-Rank Communication Compression in Decentralized Deep Learning", NeurIPS 2020, arXiv 2008.01425,
section 5.1.

Writes consensus.csv, after every run, and consensus.png to --out-dir.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

# Run by path, Python looks for modules beside this file; they are one level up, where gossip_modules is as well.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gossip_modules as gm
from gossip_modules.mixing_manager import best_step_size
from train.consensus_experiment.data import DATA, make_matrices
from train.consensus_experiment.methods import VARIANTS, Variant
from train.job.errors import UsageError, refuse, usage_errors
from train.training.report import table
from visualization.command import read_arguments
from visualization.consensus import THRESHOLDS, best_runs, draw

DIVERGED = 10.0
SETTLED = 1e-5


@dataclass(frozen=True)
class Experiment:
    """Which runs to make."""

    methods: tuple[str, ...] = (
        *("plain", "bfloat16", "choco-sign", "choco-topk", "choco-qsgd", "deepsqueeze-sign", "moniqua-8"),
        *("power-r1-i1", "power-r1-i2", "power-r2-i1", "power-r1-i1-cold"),
    )
    """plain, bfloat16, float16; choco- and deepsqueeze- with sign, topk, randomk, qsgd, bfloat16, float16; moniqua-8,
    -4 and -2; power-r<rank>-i<iterations> of 1 and 2, and the same with -cold; or all."""
    step_sizes: tuple[float, ...] = ()
    """Of consensus, for every method; none: the best one of plain gossip, and for tuned methods `num_step_sizes` from
    0.01 to it, evenly in the logarithm."""
    num_step_sizes: int = 4
    """Step sizes of tuned methods, 2 or more; for a single one there is step_sizes."""
    steps: int = 600
    """Rounds of a run, at most."""
    data: str = "random"
    """random, offset, sparse, lognormal, faces: see train/consensus_experiment/data.py."""
    data_dir: Path = Path("data")
    """Folder that may hold scikit_learn/ with the faces."""
    num_workers: int = 8
    """Workers in the ring."""
    matrix_size: int = 0
    """Rows and columns of a matrix; 0: 100, or the 64 of faces."""
    seed: int = 0
    """Of the matrices and of all that is random in a method."""
    out_dir: Path = Path("runs/consensus")
    """Folder of what is written."""
    overwrite: bool = False
    """Write over the results that out_dir has; otherwise they are an error."""

    def __post_init__(self) -> None:
        for name, got, choices in (("data", (self.data,), DATA), ("methods", self.methods, ("all", *VARIANTS))):
            if unknown := [item for item in got if item not in choices]:
                raise ValueError(f"got {name}={', '.join(unknown)}, expected {', '.join(choices)}; see --help")
        for name, least in (("steps", 1), ("num_step_sizes", 2), ("num_workers", 2), ("seed", 0), ("matrix_size", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"got {name}={getattr(self, name)}, expected {least} or more; see --help")
        if not all(0 < step_size < float("inf") for step_size in self.step_sizes):
            raise ValueError(f"got step_sizes={self.step_sizes}, expected positive numbers; leave them out for a grid")

    @property
    def names(self) -> tuple[str, ...]:
        """Methods to run, each once."""
        return tuple(VARIANTS) if "all" in self.methods else tuple(dict.fromkeys(self.methods))

    def step_sizes_of(self, method: str, best: float) -> list[float]:
        """The step sizes to run a method with, each once; `best` is that of plain gossip."""
        if self.step_sizes or not VARIANTS[method].is_tuned:
            return list(dict.fromkeys(self.step_sizes)) or [best]
        return np.geomspace(min(0.01, best), best, self.num_step_sizes).round(6).tolist()


class Watch:
    """Sees the matrices of all workers between two rounds, and decides when a run ends.

    Args:
        x: the matrices, one in each row.
        steps: rounds, at most.

    Attributes:
        points: what is written of the run.
    """

    def __init__(self, x: Tensor, steps: int) -> None:
        self.steps = steps
        self.points: list[dict[str, Any]] = []
        self._mean = x.double().mean(0)
        self._start = 0.0
        self._best = float("inf")

    def sees(self, x: Tensor, step: int, sent_bytes: float) -> bool:
        """Between two rounds: whether to go on."""
        distance = float((x.double() - self._mean).square().sum(1).mean())
        self._start = self._start or distance
        error = distance / self._start if self._start else 0.0
        has_diverged = not error < DIVERGED  # NaN as well
        is_over = has_diverged or error < SETTLED or step == self.steps
        has_passed = any(error <= threshold < self._best for threshold in THRESHOLDS)
        self._best = min(self._best, error)
        if is_logged(step) or has_passed or is_over:
            self.add_point(step, error, sent_bytes, diverged=has_diverged)
        return not is_over

    def add_point(self, step: int, error: float, sent_bytes: float, *, diverged: bool, message: str = "") -> None:
        """What is known after so many rounds."""
        megabits = 8 * sent_bytes / 1e6
        self.points.append(
            {"step": step, "error": error, "megabits": megabits, "diverged": diverged, "message": message}
        )


def is_logged(step: int) -> bool:
    """Every step below 10, every tenth to 100, then every hundredth."""
    return step < 10 or step % (10 if step < 100 else 100) == 0


def run(method: Variant, step_size: float, matrices: list[Tensor], *, steps: int, seed: int) -> list[dict[str, Any]]:
    """One run of one method: its points (step, error, megabits sent per worker, diverged, message).

    A method that raises ends its run as diverged, with the error's message at the last point, in the round that failed.

    Args:
        method: how to gossip, on a ring.
        step_size: the consensus step size.
        matrices: one per worker, float32; not changed.
        steps: rounds, at most.
        seed: the seed of the method's random numbers.
    """
    mixing = ring(len(matrices))
    theta = 2 * largest_difference(matrices, mixing)
    if method.mixes:
        eye = torch.eye(len(matrices), dtype=torch.float64, device="cpu")
        mixing = gm.mixing_manager.MatrixMixing(mixing.graph, eye - step_size * (eye - mixing.matrix(0)))
    driver = method.make(mixing, step_size, theta, seed, shape=tuple(matrices[0].shape))
    x = torch.stack(matrices).flatten(1)
    watch = Watch(x, steps)
    for t in range(steps + 1):
        if not watch.sees(x, t, driver.sent_bytes):
            break
        try:
            driver.step(x, t)
        except (RuntimeError, ValueError) as error:
            # What the library says of a run: a bound that was exceeded, a number that is none.
            message = " ".join(str(error).split())
            watch.add_point(t + 1, float("nan"), driver.sent_bytes, diverged=True, message=message)
            break
    return watch.points


def ring(num_workers: int) -> gm.mixing_manager.MixingManager:
    """Equal weights for a worker and its neighbours in a ring."""
    return gm.mixing_manager.MetropolisHastingsMixing(
        gm.RingGraph(num_workers, peers_per_itr=min(2, max(1, num_workers - 1)))
    )


def largest_difference(matrices: list[Tensor], mixing: gm.mixing_manager.MixingManager) -> float:
    """max |x_i - x_j| over entries and neighbours; 1 where all are equal."""
    links = [(i, j) for i in range(len(matrices)) for j in mixing.graph.out_peers(i, 0)]
    return max((float((matrices[i] - matrices[j]).abs().max()) for i, j in links), default=0.0) or 1.0


def summarize(points: pd.DataFrame) -> str:
    """The best run of each method as a table: steps and megabits to each threshold."""
    rows = []
    for method, best in best_runs(points).items():
        row = {"method": method, "step size": f"{best['step_size'].iloc[0]:.4g}"}
        for threshold in THRESHOLDS:
            reached = best[best["error"] <= threshold].head(1)
            row[f"steps to {threshold:g}"] = "".join(map(str, reached["step"]))
            row[f"Mbit to {threshold:g}"] = "".join(significant(megabits) for megabits in reached["megabits"])
        runs = points[points["method"] == method].groupby("step_size")["diverged"].any()
        row |= {"last error": f"{best['error'].iloc[-1]:.2g}", "diverged": f"{int(runs.sum())} of {len(runs)}"}
        rows.append(row)
    return table(rows)


def significant(value: float) -> str:
    """A number above 0 with three significant digits, without an exponent: 0.00123, 1.20, 1230."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{round(value, digits):.{max(digits, 0)}f}"


def main(experiment: Experiment) -> None:
    """Make the runs, then write, draw and print them.

    Raises:
        UsageError: there are results of an earlier experiment, or no data.
    """
    torch.set_num_threads(1)
    csv = experiment.out_dir / "consensus.csv"
    if csv.exists() and not experiment.overwrite:
        raise UsageError(
            f"got an --out-dir with earlier results ({csv}), expected a new folder; pass another --out-dir, "
            "or --overwrite"
        )
    with usage_errors():
        matrices = make_matrices(
            experiment.data,
            num_workers=experiment.num_workers,
            size=experiment.matrix_size,
            seed=experiment.seed,
            data_dir=experiment.data_dir,
        )
    best = best_step_size(ring(experiment.num_workers))
    points: list[dict[str, Any]] = []
    run_here = partial(run, matrices=matrices, steps=experiment.steps, seed=experiment.seed)
    experiment.out_dir.mkdir(parents=True, exist_ok=True)
    for name in experiment.names:
        for step_size in experiment.step_sizes_of(name, best):
            curve = run_here(VARIANTS[name], step_size)
            points += [{"data": experiment.data, "method": name, "step_size": step_size, **point} for point in curve]
            pd.DataFrame(points).to_csv(csv, index=False)
            last = curve[-1]
            end = "diverged" if last["diverged"] else f"error {last['error']:.2g}"
            why = f": {last['message']}" if last["message"] else ""
            print(f"{name}, step size {step_size:.4g}: {end} after {last['step']} steps{why}", flush=True)
    picture = draw(csv, experiment.out_dir / "consensus.png")
    print(f"\n{summarize(pd.DataFrame(points))}\n\ncurves in {picture}")


if __name__ == "__main__":
    try:
        main(read_arguments(Experiment, description=__doc__))
    except UsageError as error:
        refuse(error, 0)

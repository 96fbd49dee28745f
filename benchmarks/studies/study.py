"""Study: a table of trainings in the Lab. They run one after another, and a CSV file gets their rows as they end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.record import append_rows, matching, provenance, rows_in
from gossip_modules import MixedMomentum
from gossip_modules.lab import Compute, Network, compare

KEY = ("method", "workers", "rate", "steps", "is_tuning")
COLUMNS = (
    *KEY, "plan", "step", "seconds", "megabytes", "loss", "validation", "test", "consensus", "waiting", "by", "data",
    "cpu_seconds",
)  # fmt: skip
TUNING_SEED = 1
"""The seed of the trainings that choose a rate."""
MORE_RATES = 2
"""The number of rates that are tried beyond the ends of the grid, at most."""
QUICK_STEPS = 8
"""The steps of the trainings of `Study.quick`."""
MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter], float], Optimizer]
"""Makes an optimizer from the parameters and the highest rate of the schedule."""
WARM_UP = 0.1
"""The share of the steps in which the rate rises; it falls linearly to zero in the others."""


class StudyTask(Protocol):
    """The model, the data and the optimizer of a study.

    Attributes:
        data: the first digits of the SHA-256 of the data.
    """

    data: str

    def model(self) -> nn.Module:
        """Make the model."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, a scalar."""

    def batch(self, worker: int, step: int, generator: Any) -> Any:
        """Draw the batch of a worker in a step."""

    def optimizer(self, parameters: list[nn.Parameter], rate: float) -> Optimizer:
        """Make the optimizer with the highest rate of the schedule."""

    def score(self, model: nn.Module) -> tuple[float, float]:
        """Measure the averaged model on the validation split and on the test split; lower is better."""


@dataclass(frozen=True)
class Study:
    """A table of trainings.

    A training is one method with one number of workers and one seed. Its rate is the best one of short trainings on the
    validation split, which have the first seed: all rates of the grid, and further ones while the best is at an end.

    Args:
        task: makes the task.
        methods: makes the methods of `compare` by name, from the number of workers.
        cells: (workers, steps, seed) of the trainings of all methods, in their order.
        rates: the grid of learning rates; a single one is not tuned.
        tuning: the share of the steps in a training that chooses a rate; 0: none does, and all methods train with all
            rates. With 1 the training at the best rate is also that of the first seed: it has its rows twice, with and
            without `is_tuning`.
        points: the number of points of a curve.
        compute, network, num_parameters: see `compare`.
        by: see `compare`; on the CPU only.
        has_device: whether `task` has the argument `device`.
        candidates: the methods of which only the one with the best short training is trained to the end.
        optimizers: makes the optimizers of methods by their names, from the number of workers; a method without an
            entry has the task's.
        mixes_momentum: the names of the methods whose models have a `MixedMomentum`.
        train: trains once, by (study, task, values of `KEY`, seed), and returns the points of the curve by `COLUMNS`.
            A column may be missing. None: by `compare`.
        more: further columns of the points, after `COLUMNS`.
    """

    task: Callable[..., StudyTask]
    methods: Callable[[int], Mapping[str, Any]]
    cells: tuple[tuple[int, int, int], ...]
    rates: tuple[float, ...]
    tuning: float = 0.1
    points: int = 20
    compute: Compute = field(default_factory=lambda: Compute(0.1))
    network: Network = field(default_factory=lambda: Network("1 Gbit/s"))
    num_parameters: int | None = None
    by: str = ""
    has_device: bool = False
    candidates: frozenset[str] = frozenset()
    optimizers: Callable[[int], Mapping[str, MakeOptimizer]] = lambda workers: {}
    mixes_momentum: Collection[str] = ()
    train: Callable[[Study, StudyTask, Mapping[str, Any], int], list[dict[str, Any]]] | None = None
    more: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows, after those of `record.PROVENANCE`."""
        return (*COLUMNS, *self.more)

    def of(self, workers: Sequence[int]) -> Study:
        """Return the study with the cells of these numbers of workers only."""
        return replace(self, cells=tuple(cell for cell in self.cells if cell[0] in workers))

    def seeded(self, seeds: Sequence[int]) -> Study:
        """Return the study with the cells of these seeds only."""
        return replace(self, cells=tuple(cell for cell in self.cells if cell[2] in seeds))

    def only(self, names: Collection[str]) -> Study:
        """Return the study with these methods only.

        Raises:
            ValueError: no number of workers has a method of such a name.
        """
        every = {name for workers, _, _ in self.cells for name in self.methods(workers)}
        if unknown := sorted({*names} - every):
            raise ValueError(f"got methods {unknown}, expected some of {sorted(every)}")
        methods = self.methods

        def chosen(workers: int) -> Mapping[str, Any]:
            return {name: each for name, each in methods(workers).items() if name in names}

        return replace(self, methods=chosen)

    def quick(self) -> Study:
        """Return the study with one training of a few steps for each method with the fewest workers."""
        workers, _, seed = min(self.cells)
        cells = ((workers, QUICK_STEPS, seed),)
        return replace(self, cells=cells, rates=self.rates[:1], candidates=frozenset(), points=2, by="")

    def next_rate(self, found: Mapping[float, float]) -> float | None:
        """Return the next rate to try; None: the best is known.

        Args:
            found: the validation score of each rate so far.
        """
        if left := [rate for rate in self.rates if rate not in found]:
            return left[0]
        tried, best = sorted(found), best_rate(found)
        if len(tried) >= len(self.rates) + MORE_RATES or best not in (tried[0], tried[-1]):
            return None
        return best / 2 if best == tried[0] else 2 * best


def rate_factor(k: int, steps: int) -> float:
    """Return the rate of the step k of `steps`, as a share of the highest one."""
    return min((k + 1) / (WARM_UP * steps), (steps - k) / (steps - WARM_UP * steps))


def best_rate(found: Mapping[float, float]) -> float:
    """Return the rate with the lowest score, of which some may be NaN."""
    return min(found, key=lambda rate: found[rate] if math.isfinite(found[rate]) else math.inf)


class Trainings:
    """The trainings of a study, with the rows of those that have ended.

    Args:
        study: the study.
        path: the CSV file.
        minutes: no training begins after them.
        device: the device of the models, as torch names it.
    """

    def __init__(self, study: Study, path: Path, minutes: float, device: str = "cpu") -> None:
        self.study, self.path, self.end = study, path, time.monotonic() + 60 * minutes
        self.rows, self.task = (
            rows_in(path, study.columns),
            study.task(device=device) if study.has_device else study.task(),
        )
        self.made = {name: value for name, value in provenance(0).items() if name in ("commit", "command")}
        if device != "cpu":
            self.study, self.made["machine"] = replace(study, by=""), torch.cuda.get_device_name(device)

    def run(self) -> bool:
        """Run the trainings that have no rows; returns whether all have rows now."""
        for workers, steps, seed in self.study.cells:
            found = dict[str, tuple[float, float]]()
            for method in self.study.methods(workers):
                for rate, score in self._rates(method, workers, steps):
                    if math.isnan(score):
                        return False
                    if method in self.study.candidates:
                        found[method] = (score, rate)
                    elif math.isnan(self._score(method, workers, rate, steps, seed)):
                        return False
            if found:
                best = min(found, key=lambda method: found[method])
                if math.isnan(self._score(best, workers, found[best][1], steps, seed)):
                    return False
        return True

    def _rates(self, method: str, workers: int, steps: int) -> list[tuple[float, float]]:
        """Return the rates to train with, and the score of each one's short training, NaN if there is no time left.

        The score of a rate without a short training is 0.
        """
        study, found = self.study, dict[float, float]()
        if len(study.rates) == 1 or not study.tuning:
            return [(rate, 0.0) for rate in study.rates]
        while (rate := study.next_rate(found)) is not None:
            short = round(study.tuning * steps)
            found[rate] = self._score(method, workers, rate, short, TUNING_SEED, is_tuning=True)
            if math.isnan(found[rate]):
                return [(rate, math.nan)]
        best = best_rate(found)
        return [(best, found[best])]

    def _score(
        self, method: str, workers: int, rate: float, steps: int, seed: int, *, is_tuning: bool = False
    ) -> float:
        """Return the last validation score of a training, which runs if it has no rows; NaN if there is no time left.

        The score of models with parameters that are not finite is infinite.
        """
        key = dict(zip(KEY, (method, workers, rate, steps, is_tuning), strict=True))
        end = {**key, "seed": seed, "step": steps}  # a curve that was cut off has no such row
        rows = matching(self.rows, end)
        if rows.empty:
            if time.monotonic() > self.end:
                return math.nan
            found = self._twin(end) or self._train(key, seed)
            append_rows(self.path, found, seed=seed)
            print({name: found[-1][name] for name in (*KEY, "validation", "test", "cpu_seconds")}, flush=True)
            self.rows = rows_in(self.path, self.study.columns)
            rows = matching(self.rows, end)
        score = float(rows["validation"].iloc[-1])
        return score if math.isfinite(score) else math.inf

    def _twin(self, end: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of an equal training that was, or was not, for the choice of a rate; none: there is none."""
        twin = {**end, "is_tuning": not end["is_tuning"]}
        if matching(self.rows, twin).empty:
            return []
        rows = matching(self.rows, {name: value for name, value in twin.items() if name != "step"})
        return [{**row, "is_tuning": end["is_tuning"]} for row in rows.to_dict("records")]

    def _train(self, key: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
        """Train once; returns the rows of its curve."""
        began = time.process_time()
        found = (self.study.train or by_compare)(self.study, self.task, key, seed)
        own = {"data": self.task.data, "cpu_seconds": round(time.process_time() - began, 1)}
        return [{**self.made, **dict.fromkeys(self.study.columns), **row, **key, **own} for row in found]


def by_compare(study: Study, task: StudyTask, key: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """Train by `compare`: see `Study.train`."""
    steps = key["steps"]
    optimizer = study.optimizers(key["workers"]).get(key["method"], task.optimizer)
    scores: list[tuple[float, float]] = []

    def evaluate(model: nn.Module) -> float:
        scores.append(task.score(model))
        return scores[-1][1]

    found = compare(
        {key["method"]: study.methods(key["workers"])[key["method"]]},
        model=partial(_with_momentum, task) if key["method"] in study.mixes_momentum else task.model,
        loss=task.loss,
        data=task.batch,
        optimizer=lambda parameters: optimizer(parameters, key["rate"]),
        scheduler=lambda optimizer: LambdaLR(optimizer, partial(rate_factor, steps=steps)),
        evaluate=evaluate,
        workers=[key["workers"]],
        steps=steps,
        seeds=[seed],
        network=study.network,
        compute=study.compute,
        num_parameters=study.num_parameters,
        by=study.by,
        every=steps if key["is_tuning"] and study.tuning < 1 else max(steps // study.points, 1),
        progress=False,
    )
    rows = [
        {**{name: row[name] for name in COLUMNS if name in row}, "validation": validation, "test": test}
        for row, (validation, test) in zip(found.rows, scores, strict=True)
    ]
    return rows[1:]  # without the first step, before which all methods are alike


def _with_momentum(task: StudyTask) -> nn.Module:
    model = task.model()
    MixedMomentum(model)
    return model

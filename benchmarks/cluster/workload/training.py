"""One training: a method, on all ranks at once, of a task, until so many steps are done."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cluster.job import Job
from benchmarks.cluster.methods import CLUSTER_METHODS
from benchmarks.cluster.network.place import Place
from benchmarks.cluster.workload.task import PacedNetwork
from benchmarks.cluster.workload.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class Training(Job):
    """A method that learns, at a rate that rises in the warm-up of the task, if it has one, and falls linearly to zero.

    Args:
        num_steps: of each rank, or rounds, where a method counts those.
        compute_seconds: that a forward pass is made to take, times the step's delay, as the whole of a step's compute
            is waited there; the real backward pass comes on top. 0: as long as it takes, without delays.
        task: a key of TASKS.
        data: folder of its arrays.
        batch_size: of each rank.
        num_parameters: of the model at least, most of which are ballast then: so much travels.
        evaluate_every: steps from one evaluation to the next.
        seed: of the first parameters and of the order of the data.
    """

    task: str
    data: str
    batch_size: int
    num_parameters: float
    evaluate_every: int
    seed: int

    @property
    def num_warm_steps(self) -> int:
        """See `Place`: a tenth."""
        return self.num_steps // 10

    def rate_at(self, progress: int) -> float:
        """The learning rate after so many steps."""
        num_warm_up = TASKS[self.task].warm_up_share * self.num_steps
        risen = min(1.0, (progress + 1) / num_warm_up) if num_warm_up else 1.0
        return self.learning_rate * risen * (1 - progress / self.num_steps)


def train(training: Training, place: Place) -> dict[str, Any]:
    """Train as this rank; collective.

    A model is evaluated as it stands after the step: where an average comes at the end of a step, right after it; in
    our wrappers that gossip before the next step, with the local step in between; in those of ours that average now and
    then, as the average that the next step would begin with; with what was in flight applied in ours, as evaluation
    mode does, and not in those of others.

    Returns:
        Of this rank, a list each: num_steps (its own, when it evaluated), total and num_items (see
        `LearningTask.evaluate`), and mean_loss and mean_seconds (of its steps since the last evaluation).
    """
    method = CLUSTER_METHODS[training.method]
    task = TASKS[training.task](Path(training.data))
    batches = task.batches(place.rank, place.world_size, size=training.batch_size, seed=training.seed)
    place.join()
    network = PacedNetwork(task.network(training.seed), training.num_parameters)
    own_place = replace(place, learning_rate=training.rate_at(0), make_optimizer=task.optimizer)
    contender = method.make(network, own_place)
    curve: dict[str, list[float]] = {
        name: [] for name in ("num_steps", "total", "num_items", "mean_loss", "mean_seconds")
    }
    losses: list[float] = []
    seconds: list[float] = []

    def loss(model: nn.Module) -> Tensor:
        inputs, targets = next(batches)
        value = task.loss(model(inputs), targets)
        losses.append(value.item())
        factor = training.delays.factor(place.rank, num_own_steps, num_hosts=place.world_size)
        time.sleep(max(network.start + factor * training.compute_seconds - time.perf_counter(), 0.0))
        return value

    num_own_steps, due = 0, training.evaluate_every
    while (progress := contender.progress(num_own_steps)) < training.num_steps:
        contender.set_learning_rate(training.rate_at(progress))
        start = time.perf_counter()
        contender.step(loss)
        seconds.append(time.perf_counter() - start)
        num_own_steps += 1
        if contender.progress(num_own_steps) >= due:
            with contender.evaluation() as model, torch.no_grad():
                total, num_items = task.evaluate(model, place.rank, place.world_size)
            for name, value in (("num_steps", num_own_steps), ("total", total), ("num_items", num_items)):
                curve[name].append(value)
            for name, values in (("mean_loss", losses), ("mean_seconds", seconds)):
                curve[name].append(sum(values) / len(values))
                values.clear()
            due += training.evaluate_every
    place.leave(contender.close)
    return curve

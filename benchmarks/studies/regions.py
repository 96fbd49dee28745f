"""HALoS's four regions: outer methods with and without waiting, by the time to a loss.

    python -m benchmarks.studies regions --output benchmarks/results/regions.csv

Workers, links and settings are those of the authors' simulator (github.com/utnslab/halos, `examples/`): Pythia-70M on
16 workers of unequal speed. A small decoder learns here, and the clock of the Lab has the bytes and the step of Pythia.

An asynchronous worker takes the model of a server, trains H steps, pushes its drift (the model before less the model
after), and goes on from the server's present model. No other worker waits for it.

Kim et al., "HALoS: Hierarchical Asynchronous Local SGD over Slow Networks for Geo-Distributed Large Language Model
Training", ICML 2025, arXiv 2506.04531.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from benchmarks.studies.small_decoder import Text
from benchmarks.studies.study import Study, StudyTask
from gossip_modules import DelayedNesterov
from gossip_modules.lab import Network
from gossip_modules.lab.models import Objective

SPEEDS = np.array(
    [
        *(0.232, 0.907, 0.828, 0.347),
        *(0.574, 0.531, 0.722, 0.194),
        *(0.852, 0.132, 0.896, 0.107),
        *(0.827, 0.515, 0.527, 0.788),
    ]
)
"""Of the workers, four in each region."""
GBIT = ((100, 0.537, 0.935, 0.202), (0.537, 100, 0.386, 0.117), (0.935, 0.386, 100, 0.127), (0.202, 0.117, 0.127, 100))
"""Between regions, and inside each."""
WORKERS, IN_REGION = len(SPEEDS), 4
STEP_SECONDS = 0.238391 * SPEEDS.max() / SPEEDS
"""Of each worker; the fastest one takes 238 ms."""
MODEL_BYTES = 4 * 70_426_624
LINKS = Network([[f"{rate} Gbit/s, 0.1 ms" for rate in row] for row in GBIT], (1,) * len(GBIT), memory_byte_s=5e11).on(
    np.arange(WORKERS)
)
WARM_UP, LOWEST = 0.05, 0.1
"""The share of the steps in which the rate rises, and its share at the end of the cosine."""
Curve: TypeAlias = Iterator[tuple[float, Tensor]]
"""The time in seconds and the model after each push."""


class Server:
    """A model that drifts are pushed to.

    Args:
        model: at first, [d].
        rate: e of `DelayedNesterov` for each of N drifts.
        momentum: b.
        num_delayed: N.
    """

    def __init__(self, model: Tensor, rate: float, momentum: float, num_delayed: int) -> None:
        self.model = model.clone()
        self.optimizer = DelayedNesterov([self.model], num_delayed * rate, momentum=momentum, num_delayed=num_delayed)

    def push(self, drift: Tensor) -> None:
        """Step by a drift."""
        self.model.grad = drift
        self.optimizer.step()


class RegionFleet:
    """All workers. A worker that has started is computed when a drift is needed, together with all others.

    Args:
        task: the model and its data.
        rate: the highest rate of the workers' optimizers.
        steps: the optimizer steps of a worker in the mean over workers.
        seed: of the model and of data.

    Attributes:
        start: the model at first, [d].
        num_given: optimizer steps of all workers that have started.
        num_done: optimizer steps of each worker that servers have got, [n].
        crossed_bytes: sent from region to region so far.
    """

    def __init__(self, task: StudyTask, rate: float, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.task, self.rate, self.steps, module = task, rate, steps, Objective(task.model(), task.loss)
        named = dict(module.named_parameters())
        self.start = nn.utils.parameters_to_vector(named.values()).detach()
        sizes = [p.numel() for p in named.values()]

        def loss(x: Tensor, *batch: Tensor) -> Tensor:
            views = (part.view_as(p) for part, p in zip(x.split(sizes), named.values(), strict=True))
            return functional_call(module, dict(zip(named, views, strict=True)), (batch,))

        self._losses = vmap(loss)
        self._x = self.start.repeat(WORKERS, 1)
        self._rows = [nn.Parameter(row) for row in self._x]
        self._optimizers = [task.optimizer([row], rate) for row in self._rows]
        self._generators = [torch.Generator().manual_seed(1000 * seed + worker) for worker in range(WORKERS)]
        self._started: dict[int, tuple[Tensor, int, float]] = {}
        self._drifts: dict[int, tuple[Tensor, int]] = {}
        self.num_given, self.num_done = 0, np.zeros(WORKERS)
        self.crossed_bytes = 0.0

    def begin(self, worker: int, model: Tensor, num_steps: int) -> None:
        """Let a worker train from a model [d] that may change later."""
        self._started[worker] = model.clone(), num_steps, self.num_given / WORKERS
        self.num_given += num_steps

    def drift(self, worker: int) -> Tensor:
        """Return the drift of a worker that has started, [d]."""
        if worker in self._started:
            self._train()
        drift, num_steps = self._drifts.pop(worker)
        self.num_done[worker] += num_steps
        return drift

    def _train(self) -> None:
        started, self._started = self._started, {}
        for worker, (model, *_) in started.items():
            self._x[worker] = model
        for k in itertools.count():
            live = [worker for worker, (_, num_steps, _) in started.items() if k < num_steps]
            if not live:
                break
            batches = [self.task.batch(worker, k, self._generators[worker]) for worker in live]
            x = self._x[live].requires_grad_()
            losses = self._losses(x, *map(torch.stack, zip(*batches, strict=True)))
            (gradients,) = torch.autograd.grad(losses.sum(), x)
            for worker, gradient in zip(live, gradients, strict=True):
                self._rows[worker].grad = gradient
                self._optimizers[worker].param_groups[0]["lr"] = self.rate * self._share(started[worker][2] + k + 1)
                self._optimizers[worker].step()
        for worker, (model, num_steps, _) in started.items():
            self._drifts[worker] = model - self._x[worker], num_steps

    def _share(self, step: float) -> float:
        done = step / self.steps
        if done < WARM_UP:
            return done / WARM_UP
        angle = math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))
        return LOWEST + (1 - LOWEST) * (1 + math.cos(angle)) / 2


def periods(period: int, *, is_paced: bool) -> list[int]:
    """Return H of each worker: equal, or in proportion to its speed (DyLU)."""
    return [math.ceil(period * speed / SPEEDS.max()) if is_paced else period for speed in SPEEDS]


def diloco(fleet: RegionFleet, *, period: int = 32, is_paced: bool = False) -> Curve:
    """All workers wait for the slowest one, and for the all-reduce of the drifts along a ring."""
    server, counts = Server(fleet.start, 0.7, 0.9, 1), periods(period, is_paced=is_paced)
    ring = LINKS.all_reduce_seconds(MODEL_BYTES)
    for number in itertools.count(1):
        for worker, count in enumerate(counts):
            fleet.begin(worker, server.model, count)
        server.push(torch.stack([fleet.drift(worker) for worker in range(WORKERS)]).mean(0))
        fleet.crossed_bytes += len(GBIT) * 2 * (WORKERS - 1) / WORKERS * MODEL_BYTES
        yield number * float((counts * STEP_SECONDS).max() + ring), server.model


def arrivals(
    fleet: RegionFleet, servers: Sequence[Server], homes: Sequence[int], period: int, *, is_paced: bool
) -> Iterator[tuple[float, int, Tensor]]:
    """Yield each drift as it arrives: the time, the worker and the drift. Then the worker starts again.

    Args:
        fleet: the workers.
        servers: of each worker.
        homes: the regions of these servers.
        period, is_paced: see `periods`.
    """
    counts = periods(period, is_paced=is_paced)
    seconds = (2 * trips(np.arange(WORKERS), homes) + counts * STEP_SECONDS).tolist()
    queue = [(seconds[worker], worker) for worker in range(WORKERS)]
    heapq.heapify(queue)
    for worker in range(WORKERS):
        fleet.begin(worker, servers[worker].model, counts[worker])
    while True:
        now, worker = queue[0]
        fleet.crossed_bytes += 2 * MODEL_BYTES * (worker // IN_REGION != homes[worker])
        yield now, worker, fleet.drift(worker)
        fleet.begin(worker, servers[worker].model, counts[worker])
        heapq.heapreplace(queue, (now + seconds[worker], worker))


def trips(workers: Any, regions: Sequence[int]) -> Any:
    """Return the seconds of a model between each of these workers and its region: float64 [n]."""
    message = LINKS.plain_message(MODEL_BYTES)
    return LINKS.pair_seconds(workers, IN_REGION * np.array(regions), message)


def async_local_sgd(
    fleet: RegionFleet, *, period: int = 32, is_paced: bool = True, rate: float = 0.05, num_delayed: int = 32
) -> Curve:
    """Workers push to one server, in the first region."""
    server = Server(fleet.start, rate, 0.9, num_delayed)
    for now, _, drift in arrivals(fleet, [server] * WORKERS, [0] * WORKERS, period, is_paced=is_paced):
        server.push(drift)
        yield now, server.model


def halos(
    fleet: RegionFleet, *, period: int = 8, is_paced: bool = True, pushes: int = 32, share: float = 0.25
) -> Curve:
    """Workers push to the server of their region, whose drift goes to the global server after some pushes.

    The global model comes back and is merged: local <- (1 - share) local + share global.

    Args:
        fleet: the workers.
        period, is_paced: see `periods`.
        pushes: of workers, from a merge to the drift of the region.
        share: of the global model.
    """
    top, homes = Server(fleet.start, 0.15, 0.5, 2), np.arange(WORKERS) // IN_REGION
    regions = [Server(fleet.start, 0.2, 0.9, 16) for _ in GBIT]
    merged, counts = [fleet.start] * len(GBIT), [0] * len(GBIT)
    away = trips(IN_REGION * np.arange(len(GBIT)), [0] * len(GBIT)).tolist()
    mail: list[tuple[float, int, Tensor, bool]] = []  # the time, the region, a drift or a model, whether it goes up
    for now, worker, drift in arrivals(fleet, [regions[r] for r in homes], homes.tolist(), period, is_paced=is_paced):
        while mail and mail[0][0] <= now:
            at, r, vector, goes_up = heapq.heappop(mail)
            fleet.crossed_bytes += MODEL_BYTES * (r > 0)
            if goes_up:
                top.push(vector)
                heapq.heappush(mail, (at + away[r], r, top.model.clone(), False))
            else:
                regions[r].model.lerp_(vector, share)
                merged[r], counts[r] = regions[r].model.clone(), 0
        r = int(homes[worker])
        regions[r].push(drift)
        counts[r] += 1
        if counts[r] == pushes:
            heapq.heappush(mail, (now + away[r], r, merged[r] - regions[r].model, True))
        yield now, top.model


METHODS: Mapping[str, Callable[[RegionFleet], Curve]] = {
    "DiLoCo": diloco,
    "DiLoCo, DyLU": partial(diloco, is_paced=True),
    "async local SGD": async_local_sgd,
    "HALoS": halos,
    **{f"HALoS, K = {pushes}": partial(halos, pushes=pushes) for pushes in (8, 16, 4)},
}
"""At the settings of the authors' scripts. K is 32 there, for six times as many steps."""


def curve(study: Study, task: StudyTask, key: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """See `Study.train`: the points of one training, which ends when servers have got all steps of the workers."""
    fleet, model, rows = RegionFleet(task, key["rate"], key["steps"], seed), task.model(), list[dict[str, Any]]()
    every = key["steps"] if key["is_tuning"] else key["steps"] // study.points
    for now, x in study.methods(WORKERS)[key["method"]](fleet):
        steps = fleet.num_done.mean()
        if steps >= every * (len(rows) + 1):
            nn.utils.vector_to_parameters(x, model.parameters())
            validation, test = task.score(model)
            waiting = 1 - float((fleet.num_done * STEP_SECONDS).mean()) / now
            row = {"step": every * (len(rows) + 1), "seconds": now, "megabytes": fleet.crossed_bytes / WORKERS / 1e6}
            rows.append({**row, "validation": validation, "test": test, "waiting": waiting})
        if steps >= key["steps"]:
            return rows
    raise AssertionError("a method goes on until the end")


REGIONS: Mapping[str, Study] = {
    "regions": Study(
        partial(Text, 4, num_layers=1),
        lambda workers: METHODS,
        cells=tuple((WORKERS, 1024, seed) for seed in (1, 2, 3)),
        rates=(0.008, 0.016, 0.004),
        tuning=0.25,
        points=32,
        train=curve,
    )
}
"""The study by name."""

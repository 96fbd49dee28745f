"""Training, with workers that die or join, and compare: a model of your own by several methods, in one process."""

from __future__ import annotations

import csv
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..rounds.rows import Indices
from ..rounds.stacked import Stacked
from ..schedule import Action
from ..state import Restart
from .clock import Compute, Network
from .events import Event, LabJoin
from .mail_training import Mailbox, MailTraining
from .models import Models
from .plan import LabPlan, Running, Setting
from .tasks import LabTask

CELL = ("method", "plan", "workers", "seed", "steps", "setting")
COLUMNS = (*CELL, "step", "seconds", "megabytes", "loss", "evaluation", "consensus", "waiting", "by")


class LabTraining:
    """The training of n workers by one method, step by step.

    Workers that die and join have rows of their own in the tensors of the models from the beginning. When they do, a
    method for the present workers takes the place of the one before, as a new generation of a membership does: it
    begins when all are there, with the vectors that the algorithm declares to keep.

    Args:
        plan: the method.
        setting: the cluster.
        task: what workers train.
        events: the deaths and the joining workers.
        by: see `Models`.

    Attributes:
        models: the models of all workers that are there at some time.
        method: the method for the present workers.
        step: the number of optimizer steps so far.
        num_steps: the optimizer steps of each worker, float64 [n].
    """

    def __init__(
        self, plan: LabPlan, setting: Setting, task: LabTask, events: Sequence[Event] = (), *, by: str = ""
    ) -> None:
        self.plan, self.setting, self.events, n = plan, setting, events, setting.world_size
        is_alone = plan.method.pace != "lockstep"
        num_joins = sum(isinstance(event, LabJoin) for event in events)
        self.models = Models(task, n + num_joins, seed=setting.seed, by=by, is_alone=is_alone)
        if plan.method.needs_sgd:
            self.models.check_momentum()
        self.method = self._make(np.arange(n))
        self.step, self.num_steps = 0, np.zeros(n + num_joins)
        self._num_known, self._sent_bytes, self._began = n, 0.0, 0.0

    def _make(self, workers: Indices) -> Running:
        return self.plan.make(self.setting, self.models, workers, elastic=bool(self.events))

    def check_events(self) -> None:
        """Make the method of each generation, so that events which cannot be are refused before training.

        Raises:
            ValueError: a worker that dies is not there, nobody is left, or the method does not fit a generation.
        """
        workers, num_known = self.workers, self._num_known
        for event in sorted(self.events, key=lambda event: event.step):
            rows, num_known = _rows_after(event, workers, num_known)
            workers = rows[1]
            self._make(workers)

    def run(self, num_steps: int) -> Iterator[Tensor]:
        """Train, and yield the models z [n, d] of the present workers before each step, and after the last one."""
        models, last = self.models, self.step + num_steps
        while True:
            for event in self.events:
                if event.step == self.step:
                    self._regroup(event)
            driver, clock, schedule, averages, narrow = self.method
            workers = clock.links.workers
            is_whole = len(workers) == len(models.x)
            x = models.x if is_whole else models.x[workers]
            action = schedule.action(self.step) if self.step or clock.begins_with_round else Action.SKIP
            exchanges = driver.step(x, self.step, action, sgd=models.sgd if self.step else None)
            clock.advance(exchanges)
            z = driver.estimates(x)
            if not is_whole:
                models.x[workers] = x
            models.mix_buffers(exchanges, workers, late=driver.late_buffers)
            if self.step and (momentum := driver.momentum) is not None:
                models.set_momentum(momentum, workers)
            yield z
            if self.step == last:
                return
            stepping = workers if clock.is_stepping is None else workers[clock.is_stepping]
            if not is_whole:
                z, own = models.x.clone(), z
                z[workers] = own
            models.step(z, self.step, stepping, averages=averages, narrow=narrow)
            self.num_steps[stepping] += 1
            self.step += 1

    def points(self, num_steps: int, every: int, tell: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        """Train, and yield a point of the curve every so many steps, and after the last one; see `Result`.

        Args:
            num_steps: the optimizer steps of each worker.
            every: steps from one point to the next.
            tell: is told of the number of each step.
        """
        for z in self.run(num_steps):
            tell(self.step)
            if self.step % every == 0 or self.step == num_steps:
                yield measure(self, self.settle() if self.step == num_steps else z)

    def settle(self) -> Tensor:
        """End the rounds in flight; returns the models z [n, d] of the present workers."""
        driver, workers = self.method.driver, self.workers
        x = self.models.x[workers]
        driver.settle(x)
        self.models.x[workers] = x
        self.models.settle_buffers(workers)
        return driver.estimates(x)

    @property
    def workers(self) -> Indices:
        """The numbers of the present workers."""
        return self.method.clock.links.workers

    @property
    def seconds(self) -> float:
        """The time at which the last worker has started its present step."""
        return float(self.method.clock.starts.max())

    @property
    def sent_bytes(self) -> float:
        """The bytes that a worker has sent so far, mean over workers."""
        return self._sent_bytes + self.method.clock.sent_bytes

    @property
    def waiting_share(self) -> float:
        """The share of time for which the workers of the present method have waited under it, mean over workers."""
        seconds = self.seconds - self._began
        return float(self.method.clock.waited_seconds.mean()) / seconds if seconds else 0.0

    def _regroup(self, event: Event) -> None:
        """Go on with other workers, when all are there."""
        z, (driver, clock, *_) = self.settle(), self.method
        old = clock.links.workers
        (rows, workers), self._num_known = _rows_after(event, old, self._num_known)
        self.models.x[old] = z  # the push-sum weights begin anew
        self.models.copy(int(old[rows[-1]]), int(workers[-1]))
        self._sent_bytes += clock.sent_bytes
        self._began = float(clock.arrivals()[rows].max()) + event.seconds
        self.method = self._make(workers)
        self.method.clock.start_at(self._began, self.step)
        if isinstance(driver, Stacked) and isinstance(self.method.driver, Stacked):
            carry(driver, self.method.driver, rows.tolist())


def _rows_after(event: Event, workers: Indices, num_known: int) -> tuple[tuple[Indices, Indices], int]:
    """Return the workers after an event, the row of each one among those before, and how many there have been.

    The row of a worker that joins is the row of its donor.

    Raises:
        ValueError: a worker that dies is not there, or is the last one.
    """
    rows = np.arange(len(workers))
    if isinstance(event, LabJoin):
        return (np.append(rows, 0), np.append(workers, num_known)), num_known + 1
    rows = rows[workers != event.worker]
    if len(rows) in (0, len(workers)):
        raise ValueError(f"got {event}, expected one of the workers {workers.tolist()}; at least one stays")
    return (rows, workers[rows]), num_known


def carry(old: Stacked, new: Stacked, rows: Sequence[int]) -> None:
    """Give the memory of a driver to the driver of the next generation.

    Args:
        old, new: the drivers, of the same algorithm.
        rows: the old rank of each new rank; for a joining worker the rank of its donor, which stands before it.
    """
    for before, after in zip([old, *old.fragments], [new, *new.fragments], strict=True):
        new_ranks = {rank: index for index, rank in reversed(list(enumerate(rows)))}
        for memory in before.memories:
            memory.turn_to(after.memories[0].weights)
            memory.restart(Restart.GENERATION)
            memory.renumber(new_ranks)
        if old.algorithm.takes_rows:
            (memory,), (own,) = before.memories, after.memories
            state = memory.state_dict(has_links=False)
            state.pop("weights", None)
            state = _rows(state, torch.tensor(rows, device="cpu"), before.num_ranks)
            own.load_state_dict(state)
            continue
        for index, (rank, own) in enumerate(zip(rows, after.memories, strict=True)):
            joins = new_ranks[rank] != index
            state = before.memories[rank].state_dict(joins=joins, has_links=not joins)
            state.pop("weights", None)
            own.load_state_dict(state)


def _rows(state: Any, rows: Tensor, num_rows: int) -> Any:
    """Return a structure with these rows of its tensors of stacked vectors."""
    if isinstance(state, Tensor):
        return state[rows] if state.dim() > 1 and len(state) == num_rows else state
    if isinstance(state, Mapping):
        return {key: _rows(value, rows, num_rows) for key, value in state.items()}
    return [_rows(value, rows, num_rows) for value in state] if isinstance(state, list) else state


@dataclass(frozen=True)
class Result:
    """The curves of a comparison.

    Attributes:
        rows: a dict by `COLUMNS` for each point of each curve. A cell of the comparison is one method with one number
            of workers and one seed; its rows have equal values of `CELL`. The entries `seconds` and `megabytes`
            count from the beginning of training, for one worker; `loss` is the mean training loss over workers,
            `evaluation` the result of `evaluate` for the averaged model, `consensus` the distance of the models from
            their mean, root mean square over workers, and `by` says whether the losses of all workers were computed at
            once ("vmap"; "compile": by one compiled function) or one after another ("loop").
    """

    rows: Sequence[Mapping[str, Any]]

    def to_csv(self, path: str | Path) -> None:
        """Write the rows to a CSV file; a file at `path` is replaced, and folders are made."""
        write_rows(Path(path), self.rows)

    @property
    def last(self) -> list[Mapping[str, Any]]:
        """The last row of each cell."""
        return list({cell_of(row): row for row in self.rows}.values())


def compare(
    methods: Mapping[str, Any],
    *,
    model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    data: Callable[[int, int, torch.Generator], Any],
    optimizer: Callable[[Any], Optimizer],
    workers: Sequence[int],
    steps: int,
    seeds: Sequence[int] = (0,),
    network: Network | str = "1 Gbit/s",
    compute: Compute | None = None,
    events: Sequence[Event] = (),
    world: Mailbox | None = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    every: int = 10,
    num_parameters: int | None = None,
    by: str = "",
    path: str | Path | None = None,
    progress: bool = True,
) -> Result:
    """Train a model by each method, with each number of workers and each seed.

    Equal arguments give equal results, bit for bit, on one machine.

    Args:
        methods: by a name of yours: an algorithm, such as `DiLoCo(sync_every=50)`, the settings of another method, such
            as `SGP()`, a text, such as "choco:ring:topk", or a `LabPlan`.
        model: makes the model; see `LabTask`, also for the next five.
        loss: loss(model, batch), a scalar.
        data: data(worker, step, generator) makes a batch.
        optimizer: makes a torch optimizer from a list of parameters.
        scheduler: makes a learning rate scheduler from the optimizer; None: the rate is constant.
        evaluate: evaluate(model) measures the averaged model; None: nothing is measured.
        workers: the numbers of workers.
        steps: optimizer steps of a worker; for an asynchronous method, ticks of its fastest worker's step.
        seeds: the seeds of the model, the data and the methods.
        network: the links, or a text such as "1 Gbit/s, 0.1 ms".
        compute: the duration of steps; None: 100 ms.
        events: deaths and joins of workers.
        world: a `Mailbox`: workers share a store, and take steps at their own pace. A step of `steps`, `events` and
            `every` is then a tick of the fastest worker's step. None: all workers are connected.
        every: steps from one point of a curve to the next.
        num_parameters: the number of float32 parameters for the computation of seconds and bytes; None: this model.
        by: "vmap" computes the losses of all workers at once, "loop" one after another, which is faster for
            convolutions on a CPU. "compile" makes one function of the losses and gradients of all workers by
            `torch.compile`, which is faster for small models and needs a C++ compiler; see [Note: Compiled steps] of
            `Models`. "": vmap, and the loop if the model does not allow it.
        path: a CSV file for the rows of each cell, written when the cell ends. Cells in the file are not run again.
            Its column `setting` is a hash of the arguments that all cells share, see `setting_of`.
        progress: whether to show the present step on a terminal.

    Returns:
        The rows of all cells, also of the cells in the file.

    Raises:
        ValueError: `workers` or `seeds` is a number in place of a list, a method does not fit a number of workers, or
            the events, or the file at `path` has rows of another setting; nothing was trained then.
        OSError: the file at `path` cannot be written; nothing was trained then.
    """
    for name, numbers in {"workers": workers, "seeds": seeds}.items():
        if isinstance(numbers, int):
            raise ValueError(f"got {name}={numbers}, expected a list, such as {name}=[{numbers}]")
    if steps < 1:
        raise ValueError(f"got steps={steps}, expected at least 1")
    if every < 1:
        raise ValueError(f"got every={every}, expected at least 1: the steps from one point of a curve to the next")
    if by not in ("", "vmap", "loop", "compile"):
        raise ValueError(
            f"got by={by!r}, expected 'vmap', 'loop' or 'compile'; leave it out to take vmap if the model allows it"
        )
    if by == "compile" and world is not None:
        raise ValueError(f"got by='compile' with world={world}, expected one of them: its workers step one by one")
    for event in events:
        if not 0 < event.step < steps:
            raise ValueError(f"got {event} in a run of {steps} steps, expected a step from 1 to {steps - 1}")
    task = LabTask(model, loss, data, optimizer, scheduler, evaluate)
    compute = compute or Compute(0.1)
    network = Network(network) if isinstance(network, str) else network
    given = [each for each in (world, by) if each]
    shared = setting_of(task, compute, network, events, every, num_parameters, *given)
    cells = []
    for seed in seeds:
        for n in workers:
            for name, what in methods.items():
                plan = LabPlan.of(what)  # its graph follows the number of workers, which events change
                key = dict(zip(CELL, (name, plan.resolved(n).setting, n, seed, steps, shared), strict=True))
                cells.append((key, plan, Setting(n, num_parameters, compute, network, seed)))
    rows = [] if path is None else whole_cells(Path(path))
    if others := {row["setting"] for row in rows} - {shared}:
        raise ValueError(
            f"got {path} with rows of the settings {sorted(others)}, expected {shared}, the hash of this model, data, "
            "optimizer, network, compute and events; choose another file. If `data` draws random numbers, draw them "
            "from the generator"
        )
    done = {cell_of(row) for row in rows}
    left = [cell for cell in cells if cell_of(cell[0]) not in done]

    def training_of(plan: LabPlan, setting: Setting) -> LabTraining | MailTraining:
        if world is None:
            return LabTraining(plan, setting, task, events, by=by)
        return MailTraining(plan, setting, task, world, events)

    for _, plan, setting in left:  # refuses what cannot be, before anything is trained
        training_of(plan, setting).check_events()
    if path is not None and left:
        write_rows(Path(path), rows)  # without cells that an interruption has cut off
    for number, (key, plan, setting) in enumerate(left, 1):
        label = f"{number} of {len(left)}: {key['method']}, {key['workers']} workers, step"
        tell = partial(_tell, label) if progress else _tell_nobody
        found = [{**key, **point} for point in training_of(plan, setting).points(steps, every, tell)]
        rows += found
        if path is not None:
            append_rows(Path(path), found)
    if progress:
        show("")
    return Result(rows)


def _tell(label: str, step: int) -> None:
    show(f"{label} {step}")


def _tell_nobody(step: int) -> None:
    pass


def setting_of(task: LabTask, *others: Any) -> str:
    """Return 12 digits of a hash of the arguments that all cells of a comparison share.

    The loss, the evaluation, and learning rates after the first step are not in it.

    Args:
        task: its model with seed 0, its batch of worker 0 in step 0, and the text of its optimizer.
        others: further arguments, by their text.
    """
    models = Models(task, 1)
    state = {**models.views(models.x), **models.buffers}
    content = hashlib.sha256(repr((models.optimizers, others)).encode())
    for name, tensor in (*state.items(), *_tensors(task.batch(0, 0, 0))):
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:12]


def _tensors(batch: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch, with their names."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping | tuple | list):
        items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        for key, value in items:
            yield from _tensors(value, f"{name} {key}")


def measure(training: LabTraining, z: Tensor) -> dict[str, Any]:
    """Return a point of the curve of a training, with the models z [n, d]."""
    models, workers = training.models, training.workers
    evaluate = models.task.evaluate
    evaluation = math.nan
    if evaluate is not None:
        with torch.no_grad():
            evaluation = float(evaluate(models.mean_model(z, workers)))
    return {
        "step": training.step,
        "seconds": training.seconds,
        "megabytes": training.sent_bytes / 1e6,
        "loss": float(models.losses[torch.from_numpy(workers)].mean()),
        "evaluation": evaluation,
        "consensus": float((z - z.mean(0)).square().sum(1).mean().sqrt()),
        "waiting": training.waiting_share,
        "by": models.by,
    }


def cell_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the entries of a row that all rows of its cell have."""
    return tuple(row[name] for name in CELL)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file with these rows, in place of a file at `path`, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a CSV file that `write_rows` has begun."""
    with path.open("a", newline="") as file:
        csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(rows)


def whole_cells(path: Path) -> list[dict[str, Any]]:
    """Read the rows of the whole cells of a CSV file; none if there is no file.

    Raises:
        ValueError: the file has other columns.
    """
    if not path.exists() or not path.stat().st_size:
        return []
    with path.open(newline="") as file:
        lines = [line for line in file if line.endswith("\n")]  # an interruption may have cut off the last one
    reader = csv.DictReader(lines)
    rows = [dict(row) for row in reader]
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"got {path} with columns {reader.fieldnames}, expected {COLUMNS}; choose another file")
    texts = {"method", "plan", "setting", "by"}
    whole = {"workers", "seed", "steps", "step"}
    for row in rows:
        row.update({k: int(v) if k in whole else float(v) for k, v in row.items() if k not in texts})
    done = {cell_of(row) for row in rows if row["step"] == row["steps"]}
    return [row for row in rows if cell_of(row) in done]


def show(text: str) -> None:
    """Show a line of progress in place of the one before, if the error output is a terminal; "" clears it."""
    if sys.stderr.isatty():
        print(f"\r{text[:110]:<110}\r", end="", file=sys.stderr, flush=True)

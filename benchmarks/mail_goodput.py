r"""Goodput where a worker dies every 50 steps: DiLoCo over a mailbox, DiLoCo in lockstep, and data parallel.

    python -m benchmarks.mail_goodput  # the trainings without rows in benchmarks/results/mail_goodput.csv
    python -m benchmarks.mail_goodput --quick --output quick.csv

Eight workers have speeds from 1 to 4, evenly spread; a step of the slowest takes a second of the Lab's clock. Every 20
seconds, 50 steps of a worker of mean speed, one of them dies without a word. Ten seconds later a new process of its
speed comes. All systems meet the same deaths.

- The mailbox runs the code of real training, `MailMembership` and `GossipDataParallel`, under the virtual clock: with
  one period for all workers and an outer momentum of 0, or 0.9, or with periods in proportion to speeds.
- In lockstep all wait for all, as with a membership over sockets. A death, and a newcomer, cost a pause of a second.
- Data parallel averages gradients in each step, with the same pauses.
- Data parallel that waits stops until the worker is back, and goes on from a checkpoint of its last whole step, which
  takes no time.

A step counts if it is in an average: of an outer step, or of gradients. The goodput is the number of these steps beside
the run without deaths, after the same time. `loss` is of the model that has these steps, on the validation split.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.record import RESULTS, append_rows, matching, rows_in
from benchmarks.studies.small_decoder import Text
from gossip_modules import DiLoCo
from gossip_modules.lab import Compute, Join, Kill, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.lab.mail_training import Mailbox, MailTraining

NUM_WORKERS = 8
SPEEDS = tuple(np.linspace(1, 4, NUM_WORKERS).tolist())
BETWEEN, MISSING, PAUSE = 20.0, 10.0, 1.0
"""Seconds from a death to the next, until a new process comes, and of a pause in lockstep."""
PARAMETERS = 25_000_000
NETWORK = Network("10 Gbit/s, 20 ms")
RATE = 3e-3
BY_SPEED, WITH_MOMENTUM = "mailbox, periods by speed", "mailbox, outer momentum 0.9"
ONLY: Mapping[str, tuple[bool, ...]] = {WITH_MOMENTUM: (False,), "data parallel that waits": (True,)}
"""Whether workers die, of systems with one of both."""
KEY = ("system", "sync_every", "momentum", "quorum", "grace", "poll", "interval", "weighted_by", "deaths", "seconds")
COLUMNS = (*KEY, "at", "trained", "counted", "loss", "test", "waiting", "rounds", "cpu_seconds", "data")


@dataclass(frozen=True)
class GoodputCell:
    """A training.

    Args:
        system: its name; with `BY_SPEED` periods are in proportion to speeds.
        sync_every, momentum, weighted_by: of DiLoCo; the period of a worker of mean speed.
        quorum, grace, poll, interval: of the mailbox.
        deaths: whether workers die.
        seconds: the length, in seconds of the Lab's clock.
        seed: of data, deaths and turns.
    """

    system: str
    sync_every: int = 0
    momentum: float = 0.9
    quorum: int = 0
    grace: float = 0.0
    poll: float = 0.0
    interval: float = 0.0
    weighted_by: str = "equal"
    deaths: bool = True
    seconds: float = 400.0
    seed: int = 1

    @property
    def key(self) -> dict[str, Any]:
        """The columns that name the rows."""
        return {name: getattr(self, name) for name in KEY} | {"seed": self.seed}

    @property
    def plan(self) -> LabPlan:
        """The method."""
        if not self.sync_every:
            return LabPlan.of("ar")
        weights: Any = None if self.weighted_by == "equal" else self.weighted_by
        return LabPlan.of(DiLoCo(sync_every=self.sync_every, momentum=self.momentum, weighted_by=weights))

    def victims(self) -> list[int]:
        """The place, 0 to 7, of the worker of each death: every place once, in a drawn order, again and again."""
        draw = np.random.default_rng((self.seed, 49))
        num_deaths = max(math.ceil(self.seconds / BETWEEN) - 1, 0) if self.deaths else 0
        orders = [draw.permutation(NUM_WORKERS) for _ in range(num_deaths // NUM_WORKERS + 1)]
        return np.concatenate(orders)[:num_deaths].tolist()

    def setting(self) -> Setting:
        """The cluster; a new process has the speed of the place to which it comes."""
        speeds = (*SPEEDS, *(SPEEDS[place] for place in self.victims()))
        return Setting(NUM_WORKERS, PARAMETERS, Compute(1.0, speeds=speeds), NETWORK, seed=self.seed)

    def changes(self) -> list[tuple[float, Kill | Join]]:
        """The deaths and the newcomers with their times, in order; steps are filled in by the training."""
        held, found = list(range(NUM_WORKERS)), list[tuple[float, Kill | Join]]()
        for number, place in enumerate(self.victims()):
            died = BETWEEN * (number + 1)
            found += [(died, Kill(-1, held[place], PAUSE)), (died + MISSING, Join(-1, PAUSE))]
            held[place] = NUM_WORKERS + number
        return found


class GoodputTask:
    """The model and the data of all cells."""

    def __init__(self, *, batch_size: int = 8) -> None:
        self.text = Text(batch_size)

    def lab_task(self) -> LabTask:
        """The task for the Lab."""
        text = self.text
        return LabTask(text.model, text.loss, text.batch, lambda parameters: text.optimizer(parameters, RATE))

    def score(self, model: nn.Module) -> dict[str, float]:
        """The losses on the validation split and the test split."""
        validation, test = self.text.score(model)
        return {"loss": validation, "test": test}


def by_mailbox(cell: GoodputCell, task: GoodputTask, times: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Train over a mailbox, and yield a point of the curve at each of these times."""
    by_speed = cell.system == BY_SPEED
    world = Mailbox(cell.quorum, cell.grace, cell.poll, cell.interval, period_by_speed=by_speed)
    setting = cell.setting()
    tick = min(1 / speed for speed in SPEEDS)
    changes = [replace(change, step=round(at / tick)) for at, change in cell.changes()]
    training = MailTraining(cell.plan, setting, task.lab_task(), world, changes)
    stops = {round(at / tick) for at in times}
    for number in training.run(round(cell.seconds / tick), round(times[0] / tick)):
        if number in stops:
            num_rounds, model = training.newest()
            yield {
                "trained": sum(worker.num_steps for worker in training.workers),
                "counted": training.ledger.steps_in(num_rounds),
                "rounds": num_rounds,
                "waiting": training.waiting_share,
                **task.score(model),
            }


def in_lockstep(cell: GoodputCell, task: GoodputTask, times: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Train in lockstep, and yield a point of the curve at each of these times: after the outer step before it."""
    changes, left = cell.changes(), list(times)
    training = LabTraining(cell.plan, cell.setting(), task.lab_task(), [change for _, change in changes], by="vmap")
    due = list(changes)
    events: list[Any] = list(training.events)  # those with step -1 never happen
    training.events = events
    every, at_sync, counted = cell.sync_every or 1, np.zeros_like(training.num_steps), 0.0
    point: dict[str, Any] = {}
    for z in training.run(10**9):
        while left and training.seconds > left[0]:
            left.pop(0)
            yield point
        if not left:
            return
        if training.step and training.step % every == 0:
            own = training.workers
            counted += float((training.num_steps - at_sync)[own].sum())
            at_sync = training.num_steps.copy()
            point = {"trained": int(training.num_steps.sum()), "counted": int(counted)}
            point |= {"rounds": training.step // every, "waiting": training.waiting_share}
            if training.seconds + every / SPEEDS[0] + 2 * PAUSE > left[0]:
                point |= task.score(training.models.mean_model(z, own))
        if due and training.seconds >= due[0][0]:
            events.append(replace(due.pop(0)[1], step=training.step + 1))


def that_waits(rows: Any, cell: GoodputCell, times: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield the points of data parallel that stops at each death: the curve without deaths, later."""
    curve = rows.sort_values("at")
    steps = curve["counted"] / NUM_WORKERS
    seconds = float(curve["at"].iloc[-1] / steps.iloc[-1])  # of a step
    for at in times:
        done, now = 0.0, 0.0
        for died, change in cell.changes():
            if not isinstance(change, Kill) or died > at:
                continue
            done += max(died - now, 0.0) / seconds
            done, now = math.floor(done), max(now, died) + MISSING
        done = math.floor(done + max(at - now, 0.0) / seconds)
        trained = {name: float(np.interp(done, steps, curve[name])) for name in ("loss", "test")}
        counted = NUM_WORKERS * done
        yield {"trained": counted, "counted": counted, "rounds": done, "waiting": math.nan, **trained}


def cells(*, seconds: float, seeds: Sequence[int]) -> Iterator[GoodputCell]:
    """Yield the trainings in their order; those without deaths come before the others."""
    systems = (
        GoodputCell(BY_SPEED, 20, quorum=6, grace=1.0, poll=0.25, interval=5.0, weighted_by="num_steps"),
        GoodputCell("mailbox", 20, 0.0, quorum=4, grace=0.1, poll=0.1, interval=5.0),
        GoodputCell(WITH_MOMENTUM, 20, quorum=4, grace=0.1, poll=0.1, interval=5.0),
        GoodputCell("lockstep", 20),
        GoodputCell("data parallel"),
        GoodputCell("data parallel that waits"),
    )
    for seed in seeds:
        for system in systems:
            for deaths in ONLY.get(system.system, (False, True)):
                yield replace(system, deaths=deaths, seconds=seconds, seed=seed)


class GoodputStudy:
    """The trainings, with the rows of those that have ended.

    Args:
        path: the CSV file.
        end: no training begins after this time of `time.monotonic`.
        num_points: of a curve.
    """

    def __init__(self, path: Path, *, end: float = math.inf, num_points: int = 20) -> None:
        self.path, self.end, self.num_points = path, end, num_points
        self.task = GoodputTask()

    def run(self, todo: Sequence[GoodputCell]) -> bool:
        """Run the trainings without rows; returns whether all have rows now."""
        for cell in todo:
            if not matching(rows_in(self.path, COLUMNS), {**cell.key, "at": cell.seconds}).empty:
                continue
            if time.monotonic() > self.end:
                return False
            rows = self._train(cell)
            append_rows(self.path, rows, seed=cell.seed)
            print({name: rows[-1][name] for name in (*KEY, "trained", "counted", "loss", "waiting")}, flush=True)
        return True

    def _train(self, cell: GoodputCell) -> list[dict[str, Any]]:
        times = [cell.seconds * (i + 1) / self.num_points for i in range(self.num_points)]
        began = time.process_time()
        if cell.system == "data parallel that waits":
            without = replace(cell, system="data parallel", deaths=False)
            found = list(that_waits(matching(rows_in(self.path, COLUMNS), without.key), cell, times))
        else:
            found = list((by_mailbox if cell.quorum else in_lockstep)(cell, self.task, times))
        own = {"cpu_seconds": round(time.process_time() - began, 1), "data": self.task.text.data}
        key = {name: value for name, value in cell.key.items() if name != "seed"}
        return [
            dict.fromkeys(COLUMNS) | {**key, "at": at, **point, **own} for at, point in zip(times, found, strict=True)
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; returns the exit code, 3 if the time was over before the end."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.mail_goodput", description=__doc__, formatter_class=shape)
    parser.add_argument("--output", type=Path, default=RESULTS / "mail_goodput.csv", help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=400.0, help="of the Lab's clock, of each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--minutes", type=float, default=math.inf, help="the time after which no training begins")
    parser.add_argument("--quick", action="store_true", help="one seed and 60 seconds, to see that it runs")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    quick = {"seconds": 60.0, "seeds": [1]} if options.quick else {}
    todo = list(cells(**{"seconds": options.seconds, "seeds": options.seeds, **quick}))
    study = GoodputStudy(options.output, end=time.monotonic() + 60 * options.minutes, num_points=5 if quick else 20)
    return 0 if study.run(todo) else 3


if __name__ == "__main__":
    sys.exit(main())

"""Mailbox and MailTraining: workers that share a store, as threads of a virtual clock, with the code of training."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..graph_manager.named_graphs import named_graph
from ..mailbox.base import Listed
from ..mailbox.errors import Transient
from ..mailbox.job import read_run
from ..mailbox.membership import MailMembership
from ..mailbox.memory import MemoryMedium
from ..mailbox.rounds import Close
from ..mailbox.saved_models import SavedModels
from ..mailbox.sealed import Seal
from ..methods.chosen import read_algorithm
from ..wrappers.gossip import GossipDataParallel
from .clock import TCP_SHARE, LinkSpec
from .events import Event, LabJoin, LabKill
from .models import Models, Objective, WorkerParameters
from .plan import LabPlan, Setting
from .tasks import LabTask, seed_of
from .virtual_clock import VirtualClock, VirtualThread

_runs = itertools.count()
_OUTER_STREAM = "round/0-average/"


@dataclass(frozen=True)
class Mailbox:
    """A world of workers that share a store for objects, and have no connection with each other: see `MailMembership`.

    Each worker reaches the store over its link of the `Network`: the store stands beside worker 0. Workers take steps
    at their own pace. The Lab counts time in ticks of the fastest worker's median step.

    Args:
        quorum: see `MailMembership`.
        grace: seconds of the Lab's clock; see `MailMembership`.
        poll: seconds of the Lab's clock; see `MailMembership`.
        interval: seconds of the Lab's clock; see `MailMembership`.
        save_every: see `MailMembership`.
        period_by_speed: whether the `sync_every` of each worker is in proportion to its speed, and the
            `sync_every` of the algorithm belongs to a worker of mean speed. Then all workers write at about the same
            times.
        outages: times of the clock, pairs of begin and end, between which the store answers nobody.
    """

    quorum: int | None = None
    grace: float = 30.0
    poll: float = 1.0
    interval: float = 10.0
    save_every: int = 1
    period_by_speed: bool = False
    outages: tuple[tuple[float, float], ...] = ()


@dataclass
class StepLedger:
    """The optimizer steps that are in the averages of a run.

    Attributes:
        counted: by worker, its steps before the last message of it that a close has.
        closes: the time, the members, and the sum of `counted` after each close of the first fragment.
    """

    counted: dict[int, int] = field(default_factory=dict)
    closes: list[tuple[float, tuple[int, ...], int]] = field(default_factory=list)
    _sent: dict[str, tuple[int, int]] = field(default_factory=dict)

    def note_message(self, path: str, worker: int, num_steps: int) -> None:
        """A worker begins to send an object.

        Args:
            path: the path of the object.
            worker: the number of the worker in the Lab.
            num_steps: the steps of the worker so far.
        """
        if path.startswith(_OUTER_STREAM):
            self._sent[path] = worker, num_steps

    def note_close(self, path: str, content: bytes, now: float) -> None:
        """A round is closed.

        Args:
            path: the path of the close.
            content: its content.
            now: the time.
        """
        folder = path.removesuffix("close")
        close = Close.read(int(folder.split("/")[2]), content)
        sent = dict(self._sent[f"{folder}{member:06d}"] for member in close.members)
        self.counted |= sent
        self.closes.append((now, tuple(sent), sum(self.counted.values())))

    def steps_in(self, num_rounds: int) -> int:
        """The steps in the averages after so many rounds."""
        return self.closes[num_rounds - 1][2] if num_rounds else 0


class LinkedMedium(MemoryMedium):
    """A store in memory at the other end of a link; each request takes a way there and a way back.

    Objects of one direction share the link one after the other.

    Args:
        name: see `MemoryMedium`.
        link: the link of the worker.
        scale: the factor by which models and messages are larger than the trained ones.
        outages: see `Mailbox`.
        ledger: is told of messages and closes.
        worker: the number of the worker in the Lab.
        num_steps: returns the steps of the worker so far.
        options: see `Medium`.
    """

    def __init__(
        self,
        name: str,
        link: LinkSpec,
        *,
        scale: float = 1.0,
        outages: Sequence[tuple[float, float]] = (),
        ledger: StepLedger | None = None,
        worker: int = 0,
        num_steps: Callable[[], int] = int,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self.link, self.scale, self.outages = link, scale, outages
        self.ledger, self.worker, self.num_steps = ledger or StepLedger(), worker, num_steps
        self.sent_bytes = 0.0
        self._free_at = [0.0, 0.0]  # the way there, and the way back

    def create(self, path: str, data: bytes, *, deadline: float | None = None) -> bool:
        """See `Medium`."""
        self.ledger.note_message(path, self.worker, self.num_steps())
        return super().create(path, data, deadline=deadline)

    def _create(self, path: str, data: bytes) -> bool:
        self._travel(0, path, len(data))
        is_new = super()._create(path, data)
        if is_new and path.startswith(_OUTER_STREAM) and path.endswith("/close"):
            self.ledger.note_close(path, self.seal.open(path, data) or b"", self.clock.now())
        self._travel(1)
        return is_new

    def _put(self, path: str, data: bytes) -> None:
        self._travel(0, path, len(data))
        super()._put(path, data)
        self._travel(1)

    def _get(self, path: str, max_bytes: int) -> bytes | None:
        self._travel(0)
        data = super()._get(path, max_bytes)
        self._travel(1, path, len(data or b""))
        return data

    def _list(self, prefix: str) -> dict[str, Listed]:
        self._travel(0)
        found = super()._list(prefix)
        self._travel(1)
        return found

    def _delete(self, paths: Iterable[str]) -> None:
        self._travel(0)
        super()._delete(paths)
        self._travel(1)

    def _travel(self, way: int, path: str = "", num_bytes: int = 0) -> None:
        """Wait until so many bytes have come to the other end."""
        if path.startswith(("round/", "model/")) and not path.endswith("/close"):
            num_bytes = round(self.scale * num_bytes)
        self.sent_bytes += num_bytes * (way == 0)
        now = self.clock.now()
        self._free_at[way] = max(now, self._free_at[way]) + 8 * num_bytes / (self.link.rate_bit_s * TCP_SHARE)
        self.clock.sleep(self._free_at[way] + self.link.latency_s - now)
        if any(begin <= self.clock.now() < end for begin, end in self.outages):
            raise Transient("an outage")


class MailWorker:
    """A worker of a `MailTraining`: the training loop of a user.

    Args:
        run: the training.
        number: its number in the Lab.

    Attributes:
        num_steps: its optimizer steps so far.
        loss: the loss of its last step.
        model: its model.
        computed_seconds: the time of its steps.
        began: the time at which it came.
    """

    def __init__(self, run: MailTraining, number: int) -> None:
        self.run, self.number = run, number
        self.num_steps, self.computed_seconds, self.began = 0, 0.0, run.clock.now()
        self.loss = math.nan
        link = run.link_of(number)
        self.medium = LinkedMedium(
            run.name,
            link,
            scale=run.scale,
            outages=run.world.outages,
            ledger=run.ledger,
            worker=number,
            num_steps=lambda: self.num_steps,
            timeout=run.timeout,
            clock=run.clock,
            seal=Seal(None),
            seed=seed_of(run.setting.seed, number, 0),
        )
        self.module: Objective = copy.deepcopy(run.models.module).train()
        self.model: nn.Module = self.module.model
        self.thread: VirtualThread = run.clock.start(self._train, f"worker {number}")

    def _train(self) -> None:
        run, task, world = self.run, self.run.task, self.run.world
        membership = MailMembership(
            self.medium,
            min_workers=run.setting.world_size,
            quorum=world.quorum,
            grace=world.grace,
            poll=world.poll,
            interval=world.interval,
            save_every=world.save_every,
            timeout=run.timeout,
            clock=run.clock,
        )
        model = GossipDataParallel(self.model, membership=membership, **run.arguments(self.number))
        assert task.optimizer is not None, "the constructor of the training has looked"
        named = dict(self.module.named_parameters())
        trained = [(name, parameter) for name, parameter in named.items() if parameter.requires_grad]
        parameters = WorkerParameters([p for _, p in trained], [name for name, _ in trained], self.module)
        optimizer = task.optimizer(parameters)
        scheduler = task.scheduler(optimizer) if task.scheduler else None
        membership.track(optimizer=optimizer, **({"scheduler": scheduler} if scheduler else {}))
        counts = getattr(run.chosen.made, "counts_tokens", False)
        for _ in membership.steps(sys.maxsize):
            k = self.num_steps
            batch = task.batch(self.number, k, run.setting.seed)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(run.setting.seed, self.number, k))
                loss = task.loss(model, batch)
            if counts:
                model.count_tokens(1)  # all batches count alike
            optimizer.zero_grad()
            loss.backward()
            seconds = float(run.setting.compute.step_seconds(k, np.arange(self.number + 1))[-1])
            run.clock.sleep(seconds)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            self.loss, self.num_steps = float(loss.detach()), k + 1
            self.computed_seconds += seconds


class MailTraining:
    """The training of workers that share a mailbox: the library's own code, under a virtual clock.

    A worker dies and comes at the tick of its event. The time for which others wait then is a result, so the `seconds`
    of events are not used.

    Args:
        plan: the method.
        setting: the cluster.
        task: the model and the data.
        world: the mailbox.
        events: the deaths and the joining workers.

    Attributes:
        clock: has the time.
        ledger: has the steps that count.
        workers: all workers so far, by number.
    """

    def __init__(
        self, plan: LabPlan, setting: Setting, task: LabTask, world: Mailbox, events: Sequence[Event] = ()
    ) -> None:
        self.plan, self.setting, self.task, self.world, self.events = plan, setting, task, world, events
        self.chosen = read_algorithm(plan.text, seed=setting.seed) if plan.is_text else plan.chosen
        if task.optimizer is None or plan.method.needs_fixed_ranks:
            why = plan.method.needs_fixed_ranks or "there is nothing to train"
            raise ValueError(f"got {plan.method.title} over a mailbox, expected another method: {why}")
        self.models = Models(task, 1, seed=setting.seed)
        self.scale = 4 * setting.num_parameters / self.models.num_bytes if setting.num_parameters else 1.0
        self.name, self.timeout = f"lab-{next(_runs)}", 1e6
        self.clock, self.ledger = VirtualClock(seed=setting.seed), StepLedger()
        self.tick_seconds = float(setting.compute.median_seconds(np.arange(setting.world_size)).min())
        self.workers: list[MailWorker] = []

    def arguments(self, worker: int) -> Mapping[str, Any]:
        """Return the arguments of the wrapper of a worker."""
        plan, graph = self.plan, self.plan.graph
        named: dict[str, Any] = {"graph": graph} if graph else {}
        if isinstance(graph, str) and graph:
            named = {"graph": lambda n: named_graph(graph, n, plan.peers_per_itr)}
        chosen = self.chosen
        if self.world.period_by_speed:
            seconds = self.setting.compute.median_seconds(np.arange(max(worker + 1, self.setting.world_size)))
            mean = (1 / seconds[: self.setting.world_size]).mean()
            chosen = chosen.with_settings({"sync_every": max(round(chosen.period / seconds[worker] / mean), 2)})
        late = {"overlap": plan.overlap, "max_staleness": plan.max_staleness}
        return {"schedule": plan.schedule, **late, **named, **chosen.arguments}

    def link_of(self, worker: int) -> LinkSpec:
        """Return the link between a worker and the store."""
        network = self.setting.network
        stops = np.cumsum(network.shares) / sum(network.shares)
        group = int(np.searchsorted(stops, (worker % self.setting.world_size + 0.5) / self.setting.world_size))
        return network.table()[group][0]

    def check_events(self) -> None:
        """Wrap the model of one worker, and walk through the events, so that both are refused before training.

        Raises:
            ValueError: a worker that dies is not there, nobody is left, or the method does not fit to a mailbox.
        """
        present, num_known = set(range(self.setting.world_size)), self.setting.world_size
        for event in sorted(self.events, key=lambda event: event.step):
            if isinstance(event, LabJoin):
                present, num_known = {*present, num_known}, num_known + 1
            elif event.worker in present and len(present) > 1:
                present = present - {event.worker}
            else:
                raise ValueError(f"got {event}, expected one of the workers {sorted(present)}; at least one stays")
        try:
            self.workers = [MailWorker(self, 0)]
            self.clock.run(until=0.0)
        finally:
            self.close()

    def points(self, num_ticks: int, every: int, tell: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        """Train, and yield a point of the curve every so many ticks, and after the last one; see `LabTraining`."""
        for tick in self.run(num_ticks, every):
            tell(tick)
            yield self.measure(tick)

    def run(self, num_ticks: int, every: int) -> Iterator[int]:
        """Train, and yield the number of the tick at the start, after each `every` ticks, and after the last one."""
        self.workers = [MailWorker(self, number) for number in range(self.setting.world_size)]
        stops = {*range(0, num_ticks, every), num_ticks, *(event.step for event in self.events)}
        try:
            for tick in sorted(stops):
                self.clock.run(until=tick * self.tick_seconds)
                for event in self.events:
                    if event.step == tick:
                        self._happen(event)
                if not tick % every or tick == num_ticks:
                    yield tick
        finally:
            self.close()

    def _happen(self, event: Event) -> None:
        if isinstance(event, LabKill):
            self.clock.kill(self.workers[event.worker].thread)
        else:
            self.workers.append(MailWorker(self, len(self.workers)))

    @property
    def live(self) -> list[MailWorker]:
        """The workers that are there."""
        return [worker for worker in self.workers if not worker.thread.is_killed]

    @property
    def sent_bytes(self) -> float:
        """The bytes that a worker has sent so far, mean over the workers at the start."""
        return sum(worker.medium.sent_bytes for worker in self.workers) / self.setting.world_size

    @property
    def waiting_share(self) -> float:
        """The share of their time for which the present workers did not compute."""
        times = [self.clock.now() - worker.began for worker in self.live]
        waited = sum(times) - sum(worker.computed_seconds for worker in self.live)
        return waited / sum(times) if sum(times) else 0.0

    def newest(self) -> tuple[int, nn.Module]:
        """Return the number of rounds before the newest average, and the model with it; without one, the mean model."""
        medium = MemoryMedium(self.name, timeout=1.0, clock=self.clock, seal=Seal(None))
        models = SavedModels(medium)
        number = None if read_run(medium) is None else models.newest()
        saved = None if number is None else models.read(number)
        own = self.models.module.model
        if saved is not None and (saved.is_average or not saved.round):
            own.load_state_dict(dict(saved.model))
            return saved.round, own.eval()
        states = [worker.model.state_dict() for worker in self.live]
        own.load_state_dict({name: _mean([state[name] for state in states]) for name in states[0]})
        return 0, own.eval()

    def measure(self, tick: int) -> dict[str, Any]:
        """Return a point of the curve of the training, as `compare` has them."""
        evaluation, evaluate = math.nan, self.task.evaluate
        _, model = self.newest()
        if evaluate is not None:
            with torch.no_grad():
                evaluation = float(evaluate(model))
        z = torch.stack([torch.cat([p.detach().flatten() for p in worker.model.parameters()]) for worker in self.live])
        return {
            "step": tick,
            "seconds": self.clock.now(),
            "megabytes": self.sent_bytes / 1e6,
            "loss": float(np.mean([worker.loss for worker in self.live])),
            "evaluation": evaluation,
            "consensus": float((z - z.mean(0)).square().sum(1).mean().sqrt()),
            "waiting": self.waiting_share,
            "by": "mailbox",
        }

    def close(self) -> None:
        """End all threads, and forget the objects. Idempotent."""
        self.clock.close()
        objects = MemoryMedium(self.name, timeout=1.0, clock=self.clock, seal=Seal(None))
        objects.delete(objects.list())


def _mean(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows)).mean(0) if rows[0].is_floating_point() else rows[0]

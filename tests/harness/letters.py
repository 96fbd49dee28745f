"""Workers that exchange letters one after the other, by a clock without threads, and the mass of all of them."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossip_modules.flat.vector import FlatVector
from gossip_modules.mailbox.by_mail import ByMail
from gossip_modules.mailbox.clock import Clock, Joinable
from gossip_modules.mailbox.errors import MailboxError, Transient
from gossip_modules.mailbox.job import MailJob, Settings, read_run
from gossip_modules.mailbox.letters import path_of
from gossip_modules.mailbox.memory import MemoryMedium
from gossip_modules.mailbox.sealed import Seal, unpack
from gossip_modules.membership.links import alone
from gossip_modules.mixing_manager.base import MixingManager
from gossip_modules.transport.deadline import as_timeout
from gossip_modules.wrappers.choices import Choices

GRACE, INTERVAL = 4.0, 2.0
SILENCE = 4 * INTERVAL  # seconds without a beat after which a worker is silent
T = TypeVar("T")
_names = itertools.count()


class Killed(BaseException):
    """The process of a worker ends in a request."""


class StepClock(Clock):
    """Time that passes in sleeps alone. Threads run to their end at their start."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def start(self, target: Callable[[], object], name: str) -> Joinable:
        target()
        return _Ended()


class _Ended:
    def join(self, timeout: float | None = None) -> None:
        """The thread has ended."""


class FaultyMedium(MemoryMedium):
    """Objects in memory, with one fault.

    Args:
        name, clock: see `MemoryMedium`.

    Attributes:
        num_tries: the number of tries so far.
        fault_at: the number of the try with the fault; None: there is none.
        fault: "refused": the try and all others for a while fail; "unsure": it is carried out, and its answer and all
            tries for a while fail; "lost": it is carried out and only its answer fails; "killed": the worker dies
            before the try; "killed late": after it.
        stale: whether lists show the objects of the list before.
        odds: the probability that a try fails before or after it is carried out, that a list is stale, and that an
            object is not found; drawn by the seed `drawn`.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name, timeout=GRACE, clock=clock, seal=Seal(b"key"), seed=0)
        self.num_tries, self.fault = 0, ""
        self.fault_at: int | None = None
        self._until = 0.0
        self.is_dead = self.stale = False
        self.odds, self.drawn = 0.0, random.Random(0)
        self._lists: dict[str, dict[str, Any]] = {}

    def _through(self, request: Callable[[], T]) -> T:
        if self.clock.now() < self._until:
            raise Transient("an outage")
        if self.is_dead:
            raise Killed
        number, self.num_tries = self.num_tries, self.num_tries + 1
        if number != self.fault_at:
            if self._draws():
                raise Transient("503")
            result = request()
            if self._draws():
                raise Transient("the answer was lost")
            return result
        if self.fault == "killed":
            self.is_dead = True
            raise Killed
        if self.fault in ("refused", "unsure"):
            self._until = self.clock.now() + 2 * GRACE
        if self.fault != "refused":
            request()
        if self.fault == "killed late":
            self.is_dead = True
            raise Killed
        raise Transient(self.fault)

    def _draws(self) -> bool:
        return self.odds > 0 and self.drawn.random() < self.odds

    def _create(self, path: str, data: bytes) -> bool:
        create = super()._create
        return self._through(lambda: create(path, data))

    def _put(self, path: str, data: bytes) -> None:
        put = super()._put
        self._through(lambda: put(path, data))

    def _get(self, path: str, max_bytes: int) -> bytes | None:
        get = super()._get
        data = self._through(lambda: get(path, max_bytes))
        return None if self._draws() else data

    def _list(self, prefix: str) -> dict[str, Any]:
        list_ = super()._list
        found = self._through(lambda: list_(prefix))
        before = self._lists.get(prefix, found)
        self._lists[prefix] = found
        return before if self.stale or self._draws() else found

    def _delete(self, paths: Iterable[str]) -> None:
        delete, paths = super()._delete, list(paths)
        self._through(lambda: delete(paths))


class Worker:
    """A worker in a run of letters.

    Args:
        run: the run.
        mixer: its mixer, not bound yet.
        x: its model, copied.
    """

    def __init__(self, run: LetterRun, mixer: ByMail, x: Tensor) -> None:
        self.run = run
        self.medium = FaultyMedium(run.name, run.clock)
        self.job = MailJob(self.medium, run.settings)
        self.job.claim({})
        self.job.beat()
        self.number = self.job.number
        self.mixer: Any = mixer
        self.vector, self.num_rounds = FlatVector.over(x.clone()), 0
        mixer.join_run(self.job, run.choose)
        mixer.bind(run.choose(1), alone(as_timeout(1.0)))

    @property
    def is_dead(self) -> bool:
        return self.medium.is_dead

    @property
    def x(self) -> Tensor:
        return self.vector.segments[0]

    def beat(self) -> None:
        """A sign of life, if the medium answers."""
        with contextlib.suppress(MailboxError, Killed):
            self.job.beat()

    def round(self) -> None:
        """A sign of life and a round."""
        self.beat()
        if not self.is_dead:
            self.mixer.begin(self.vector)
            self.mixer.start(self.vector, self.num_rounds)
            self.mixer.finish(self.vector)
            self.num_rounds += 1
            self.step()

    def step(self) -> None:
        """Apply the letters that have come, as the next training step does."""
        try:
            self.mixer.begin(self.vector)
        except Killed:
            assert self.is_dead

    def leave(self) -> None:
        self.mixer.leave(self.vector)


class LetterRun:
    """Workers that share a mailbox in memory, and act one after the other.

    Args:
        make_mixer: makes the mixer of a worker.
        choices: the graph and weights.
    """

    def __init__(self, make_mixer: Callable[[], ByMail], choices: Choices | None = None) -> None:
        self.name, self.clock = f"letters-{next(_names)}", StepClock()
        self.settings = Settings(
            quorum=1, grace=GRACE, poll=0.1, interval=INTERVAL, timeout=GRACE, audit=0.0, save_every=1000
        )
        self._make_mixer = make_mixer
        self._choose = (choices or Choices()).for_any_size()
        self.workers: list[Worker] = []

    def choose(self, num_workers: int) -> MixingManager:
        return self._choose(num_workers)

    def add(self, *values: float, dtype: torch.dtype = torch.float64) -> Worker:
        """A new worker with this model."""
        self.workers.append(Worker(self, self._make_mixer(), torch.tensor(values, dtype=dtype)))
        return self.workers[-1]

    @property
    def live(self) -> Sequence[Worker]:
        return [worker for worker in self.workers if not worker.is_dead]

    def rounds(self, num_rounds: int, workers: Iterable[Worker] | None = None) -> None:
        """So many rounds of these workers, or of all live ones, in turn; a second each."""
        chosen = None if workers is None else list(workers)
        for _ in range(num_rounds):
            for worker in self.live if chosen is None else chosen:
                if not worker.is_dead:
                    worker.round()
            self.clock.sleep(1.0)

    def wait_for_silence(self, workers: Sequence[Worker] | None = None) -> None:
        """Let so much time pass that all workers but these, or but the live ones, are silent for them."""
        for _ in range(int(2 * SILENCE)):
            for worker in self.live if workers is None else workers:
                worker.beat()
                worker.job.live()
            self.clock.sleep(1.0)


class Shares:
    """The objects of a run, as an observer sees them.

    Args:
        run: the run.
    """

    def __init__(self, run: LetterRun) -> None:
        self.medium = MemoryMedium(run.name, timeout=1.0, clock=run.clock, seal=Seal(b"key"))
        read_run(self.medium)
        self.paths = set(self.medium.list("mail"))

    def content(self, data: bytes) -> tuple[dict[str, Any], Tensor]:
        """The header and the float64 vector of a letter."""
        header, (raw,) = unpack(data, max_bytes=1 << 20)
        return header, raw.view(torch.float64)

    def bytes_of(self, path: str) -> bytes:
        data = self.medium.get(path, max_bytes=1 << 20)
        assert data is not None
        return data

    def read(self, data: bytes) -> Tensor:
        """The mass (w, w z) of a share."""
        header, vector = self.content(data)
        weight = torch.tensor([header["weight"]], dtype=torch.float64)
        return torch.cat([weight, header["weight"] * vector])

    def of(self, path: str) -> Tensor:
        return self.read(self.bytes_of(path))

    def taker(self, path: str) -> int | None:
        """The worker at which a share counts; None: it is unread."""
        data = self.medium.get(f"{path}.taken", max_bytes=1 << 20)
        return None if data is None else int(unpack(data, max_bytes=1 << 20)[0]["by"])

    @property
    def shares(self) -> list[str]:
        return sorted(path for path in self.paths if not path.endswith(".taken"))


def mass_of(worker: Worker) -> Tensor:
    """The mass (w, w z) that a worker of push-sum holds, with all that is in its memory or that it alone may take."""
    mixer = worker.mixer
    weight = torch.tensor([mixer.weight], dtype=torch.float64)
    total = torch.cat([weight, mixer.weight * worker.x])
    if (letters := mixer.letters) is None:
        return total
    for letter in letters.arrived:
        w = letter.header["weight"]
        total += torch.cat([torch.tensor([w], dtype=torch.float64), w * letter.vector.segments[0]])
    found = Shares(worker.run)
    for (to, number), data in letters.posted.items():
        path = path_of(to, worker.number, number)
        taker = found.taker(path)
        if taker == worker.number or (taker is None and path not in found.paths):  # taken back, or never written
            total += found.read(data or found.bytes_of(path))
    for path in found.shares:
        _, to, sender, number = path.split("/")
        is_claimed = int(to) == worker.number and found.taker(path) == worker.number
        if is_claimed and not letters.is_decided(int(sender), int(number)):
            total += found.of(path)
    return total


def mass_in_mail(run: LetterRun) -> Tensor:
    """The mass (w, w z) of the shares that nobody has taken."""
    found = Shares(run)
    total = torch.zeros(1 + run.workers[0].x.numel(), dtype=torch.float64)
    for path in found.shares:
        _, to, sender, number = path.split("/")
        letters = run.workers[int(to)].mixer.letters
        is_decided = letters is not None and letters.is_decided(int(sender), int(number))
        if found.taker(path) is None and not is_decided:
            total += found.of(path)
    return total

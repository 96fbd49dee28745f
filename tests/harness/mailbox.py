"""Workers as threads that share a mailbox: late messages, deaths and restarts happen where a test says so."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gossip_modules import GossipDataParallel
from gossip_modules.mailbox.base import Listed
from gossip_modules.mailbox.clock import Clock
from gossip_modules.mailbox.driver import MailDriver, MailRounds
from gossip_modules.mailbox.errors import Permanent
from gossip_modules.mailbox.medium import Medium
from gossip_modules.mailbox.membership import MailMembership
from gossip_modules.mailbox.memory import MemoryMedium
from gossip_modules.mailbox.sealed import Seal
from tests.harness.progress import engine_of

T = TypeVar("T")
LIMIT = 30.0  # real seconds, for a test that would hang
GRACE = 1000.0
OPTIONS: Mapping[str, Any] = {"grace": GRACE, "poll": 0.01, "interval": 1e9, "timeout": 1e9}
"""The options of memberships: only a test passes the grace, by `StagedClock.jump`, and nobody becomes silent."""


class Died(Exception):
    """A worker has died where the test said so."""


class Aborted(Permanent):
    """Another worker of the test has failed."""


class StagedClock(Clock):
    """Real time, with jumps that a test makes; waits for threads have no limit but that of the test.

    Attributes:
        is_patient: whether a wait for a thread lasts until the thread ends; else it returns at once.
        threads: all threads so far.
    """

    def __init__(self) -> None:
        self.is_patient = True
        self.threads: list[threading.Thread] = []
        self._jumps = 0.0

    def now(self) -> float:
        """See `Clock`."""
        return time.monotonic() + self._jumps

    def jump(self, seconds: float) -> None:
        """Let so much time pass at once."""
        self._jumps += seconds

    def start(self, target: Callable[[], object], name: str) -> _Waited:
        """See `Clock`."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self.threads.append(thread)
        return _Waited(thread, self)


class _Waited:
    """A thread whose end the clock of its worker waits for."""

    def __init__(self, thread: threading.Thread, clock: StagedClock) -> None:
        self._thread, self._clock = thread, clock

    def join(self, timeout: float | None = None) -> None:
        """See `Joinable`."""
        self._thread.join(LIMIT if self._clock.is_patient else 0.0)


def in_memory(name: str, clock: Clock, key: bytes | None) -> Medium:
    """Objects in the memory of this process."""
    return MemoryMedium(name, timeout=1e9, clock=clock, seal=Seal(key))


class StagedMedium(Medium):
    """The medium of one worker: it holds late messages back, and refuses everything when its worker is dead.

    Args:
        inner: has the objects.
        run: the run of the worker.
    """

    def __init__(self, inner: Medium, run: MailRun) -> None:
        super().__init__(inner.address, timeout=inner.timeout, clock=inner.clock, seal=inner.seal, seed=0)
        self.inner, self._run = inner, run
        self.ends_by: Permanent | None = None

    def _create(self, path: str, data: bytes) -> bool:
        self._look()
        self._run.hold(path, self)
        self._look()
        is_new = self.inner._create(path, data)
        self._run.note(path, is_new=is_new)
        return is_new

    def _put(self, path: str, data: bytes) -> None:
        self._look()
        self.inner._put(path, data)

    def _get(self, path: str, max_bytes: int) -> bytes | memoryview | None:
        self._look()
        return self.inner._get(path, max_bytes)

    def _list(self, prefix: str) -> dict[str, Listed]:
        self._look()
        return self.inner._list(prefix)

    def _delete(self, paths: Iterable[str]) -> None:
        self._look()
        self.inner._delete(paths)

    def _look(self) -> None:
        if self.ends_by is not None:
            raise self.ends_by


class MailWorker:
    """One worker of a `MailRun`, in a thread.

    Attributes:
        run: its run.
        clock, medium, membership: its own.
        model: the wrapper, after `wrap`.
    """

    model: GossipDataParallel

    def __init__(self, run: MailRun, **options: Any) -> None:
        self.run, self.clock = run, StagedClock()
        self.clock.jump(run.time.now() - self.clock.now())
        self.medium = StagedMedium(run.make(run.name, self.clock, run.key), run)
        self.membership = MailMembership(self.medium, **{**OPTIONS, **run.options, **options})

    @property
    def number(self) -> int:
        """The number of this worker in its run."""
        return self.membership.number

    def wrap(self, module: nn.Module, **options: Any) -> GossipDataParallel:
        """Wrap a module."""
        self.model = GossipDataParallel(module, membership=self.membership, **options)
        return self.model

    @property
    def drivers(self) -> list[MailDriver]:
        """The drivers of the fragments."""
        rounds = engine_of(self.model).rounds
        assert isinstance(rounds, MailRounds)
        return rounds.drivers

    def anchor(self) -> Tensor:
        """The anchors of all fragments, as one vector [d]."""
        parts = [part for driver in self.drivers for part in driver.memory.vector("phi", start="x").parts]
        return torch.cat([part.detach().flatten().clone() for part in parts])

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds."""
        end = time.monotonic() + LIMIT
        while not condition():
            self.medium._look()
            assert time.monotonic() < end, "the condition did not come true"
            time.sleep(0.001)

    def die(self) -> None:
        """End as after kill -9: no more signs of life, requests or steps."""
        self.medium.ends_by = Permanent("dead")
        self.membership.release()
        raise Died


class MailRun:
    """Workers as threads that share a mailbox. They have the numbers 0, 1, ... in the order in which they start.

    A message that is late waits until its round is closed. The round closes when all others have written, and the
    clocks have then passed the grace: no result depends on how fast a thread is.

    Args:
        late: the workers that miss an outer step, by the number of the step; the first one is 1.
        make: opens the store of one worker; called with a name, a clock and a key.
        key: the key of all workers.
        name: the name of the run; None: one of its own.
        options: of the memberships.

    Attributes:
        closes: the number of closes of each round, by path.
    """

    def __init__(
        self,
        late: Mapping[int, Collection[int]] = {},
        *,
        make: Callable[[str, Clock, bytes | None], Medium] = in_memory,
        key: bytes | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        self.late, self.make, self.key, self.options = late, make, key, options
        self.name = uuid.uuid4().hex if name is None else name
        self.time = StagedClock()
        self.closes: dict[str, int] = {}
        self.workers: list[MailWorker] = []
        self.num_workers = 0
        self._threads: list[threading.Thread] = []
        self._results: dict[int, Any] = {}
        self._errors: list[BaseException] = []
        self._claimed: set[str] = set()
        self._lock = threading.Lock()

    def train(self, num_workers: int, body: Callable[[MailWorker], T], **options: Any) -> list[T]:
        """Run the body of each worker in a thread; returns the results, None of a worker that has died."""
        self.num_workers = num_workers
        for _ in range(num_workers):
            self.start(body, min_workers=num_workers, **options)
        return self.join()

    def start(self, body: Callable[[MailWorker], Any], **options: Any) -> None:
        """Start one more worker."""
        with self._lock:
            i, worker = len(self.workers), MailWorker(self, **options)
            self.workers.append(worker)
            if self._errors:
                worker.medium.ends_by = Aborted(f"another worker has failed: {self._errors[0]!r}")
            thread = threading.Thread(target=self._work, args=(i, worker, body), name=f"worker {i}", daemon=True)
            self._threads.append(thread)
        thread.start()

    def join(self) -> list[Any]:
        """Wait for the ends of all workers; returns the results, and raises the first error."""
        for thread in self._threads:  # also those that are started meanwhile
            thread.join(LIMIT)
            if thread.is_alive():
                self._fail(AssertionError(f"{thread.name} does not end"))
        if self._errors:
            raise self._errors[0]
        for worker in self.workers:
            for left in worker.clock.threads:
                left.join(LIMIT)
                assert not left.is_alive(), f"{left.name} stays after the end"
        return [self._results.get(i) for i in range(len(self.workers))]

    def _work(self, i: int, worker: MailWorker, body: Callable[[MailWorker], Any]) -> None:
        try:
            if i:
                worker.wait_for(lambda: f"worker/{i - 1:06d}/claim" in self._claimed)
            self._results[i] = body(worker)
            worker.model.close()
        except Died:
            pass
        except BaseException as error:  # noqa: BLE001 (raised by `join`)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._errors.append(error)
            workers = list(self.workers)
        for worker in workers:
            if worker.medium.ends_by is None:
                worker.medium.ends_by = Aborted(f"another worker has failed: {error!r}")
            worker.membership.mail.stop()

    # The media call these.

    def note(self, path: str, *, is_new: bool) -> None:
        """An object was created, or was there."""
        with self._lock:
            self._claimed.add(path)
            if is_new and path.endswith("/close"):
                self.closes[path] = self.closes.get(path, 0) + 1

    def hold(self, path: str, medium: StagedMedium) -> None:
        """Return when this message may be written."""
        kind, _, rest = path.partition("/")
        leaf = rest.rpartition("/")[2]
        if kind != "round" or not leaf.isdigit():
            return
        number, late = rest.split("/")[1], self.late
        missing = late.get(int(number) + 1, ())
        if int(leaf) not in missing:
            return
        folder = path.rpartition("/")[0]
        while f"{folder}/close" not in (found := medium.inner._list(folder)):
            medium._look()
            if sum(name[-1].isdigit() for name in found) == self.num_workers - len(missing):
                self.jump(1.5 * GRACE)
            time.sleep(0.005)

    def jump(self, seconds: float) -> None:
        """Let so much time pass at once, for all workers."""
        for clock in (self.time, *(worker.clock for worker in self.workers)):
            clock.jump(seconds)


def steps(worker: MailWorker, optimizer: torch.optim.Optimizer, loss: Callable[[int], Tensor], num_steps: int) -> None:
    """A loop of elastic training: so many steps, and one more forward, at which the round after the last step ends.

    Args:
        worker: the worker.
        optimizer: of its model.
        loss: the loss of a step, by a forward of the wrapper.
        num_steps: the number of optimizer steps.
    """
    for step in worker.membership.steps(num_steps + 1):
        value = loss(step)
        if step == num_steps:
            return
        optimizer.zero_grad()
        value.backward()
        optimizer.step()


def equal(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors have the same bits."""
    return all(torch.equal(tensors[0], x) for x in tensors)

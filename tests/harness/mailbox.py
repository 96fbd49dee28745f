"""Workers as threads that share a mailbox under a virtual clock, with late messages, deaths and restarts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gossip_modules import GossipDataParallel
from gossip_modules.lab.virtual_clock import VirtualClock, VirtualThread
from gossip_modules.mailbox.base import Listed
from gossip_modules.mailbox.clock import Clock
from gossip_modules.mailbox.driver import MailDriver
from gossip_modules.mailbox.mail_rounds import MailRounds
from gossip_modules.mailbox.medium import Medium
from gossip_modules.mailbox.membership import MailMembership
from gossip_modules.mailbox.memory import MemoryMedium
from gossip_modules.mailbox.rounds import Stream
from gossip_modules.mailbox.sealed import Seal
from tests.harness.progress import engine_of

OPTIONS: Mapping[str, Any] = {"grace": 4.0, "poll": 0.5, "interval": 2.0, "timeout": 1000.0}
"""The options of memberships, in seconds of the virtual clock, where a test gives no others."""
LIMIT = 1e5  # seconds of the virtual clock after which a run must have ended
_SETTLE = 60.0  # seconds of the virtual clock in which the threads of a worker end after close()


class Opens(Protocol):
    """Opens the store of one worker."""

    def __call__(self, name: str, *, clock: Clock, key: bytes | None) -> Medium: ...


def in_memory(name: str, *, clock: Clock, key: bytes | None) -> Medium:
    """Objects in the memory of this process."""
    return MemoryMedium(name, timeout=OPTIONS["timeout"], clock=clock, seal=Seal(key))


class HeldMedium(Medium):
    """The store of one worker, which holds late messages back until their round is closed.

    Args:
        inner: has the objects.
        late, held_for: see `MailRun`.
    """

    def __init__(self, inner: Medium, late: Mapping[int, Collection[int]], held_for: float) -> None:
        super().__init__(inner.address, timeout=inner.timeout, clock=inner.clock, seal=inner.seal, seed=0)
        self.inner, self._late, self._held_for = inner, late, held_for
        self._released: set[str] = set()  # each message is held back once

    def create(self, path: str, data: bytes, *, deadline: float | None = None) -> bool:
        """See `Medium`."""
        folder, _, leaf = path.rpartition("/")
        if path.startswith("round/") and leaf.isdigit() and path not in self._released:
            self._released.add(path)
            number = int(folder.rpartition("/")[2])
            if int(leaf) in self._late.get(number + 1, ()):
                while self.get(f"{folder}/close", max_bytes=1 << 20) is None:
                    self.clock.sleep(0.25)
                self.clock.sleep(self._held_for)
        return super().create(path, data, deadline=deadline)

    def _create(self, path: str, data: bytes) -> bool:
        return self.inner._create(path, data)

    def _put(self, path: str, data: bytes) -> None:
        self.inner._put(path, data)

    def _get(self, path: str, max_bytes: int) -> bytes | memoryview | None:
        return self.inner._get(path, max_bytes)

    def _list(self, prefix: str) -> dict[str, Listed]:
        return self.inner._list(prefix)

    def _delete(self, paths: Iterable[str]) -> None:
        self.inner._delete(paths)


class MailWorker:
    """One worker of a `MailRun`: a process of the virtual clock.

    Attributes:
        run: its run.
        medium, membership: its own.
        model: the wrapper, after `wrap`.
    """

    model: GossipDataParallel
    thread: VirtualThread

    def __init__(self, run: MailRun, **options: Any) -> None:
        self.run, self.clock = run, run.clock
        self.medium = HeldMedium(run.opens(run.name, clock=run.clock, key=run.key), run.late, run.held_for)
        self.membership = MailMembership(self.medium, **{**OPTIONS, **run.options, **options}, clock=run.clock)

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

    def closes(self) -> dict[str, int]:
        """For each kind of round, the number of the first round that the memory of this worker does not contain."""
        return {f"{driver.name}-{kind}": number for driver in self.drivers for kind, number in driver.next.items()}

    def die(self) -> None:
        """End as after kill -9."""
        self.clock.kill(self.thread)
        self.clock.sleep(0.0)


class MailRun:
    """Workers that share a mailbox. They have the numbers 0, 1, ... in the order in which they start.

    Computing takes no time of the virtual clock, so all workers are in time, apart from those that sleep or are late.

    Args:
        late: the workers that miss an outer step, by the number of the step; the first one is 1.
        held_for: the seconds from the close of a round to a late message.
        opens: opens the store of one worker.
        key: the key of all workers.
        name: the name of the run; None: one of its own.
        seed: see `VirtualClock`.
        options: of the memberships.

    Attributes:
        workers: all workers so far.
    """

    def __init__(
        self,
        late: Mapping[int, Collection[int]] = {},
        *,
        held_for: float = 0.0,
        opens: Opens = in_memory,
        key: bytes | None = None,
        name: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        self.late, self.held_for, self.opens, self.key, self.options = late, held_for, opens, key, options
        self.name = uuid.uuid4().hex if name is None else name
        self.clock = VirtualClock(seed=seed)
        self.workers: list[MailWorker] = []
        self._results: dict[int, Any] = {}

    def train(self, num_workers: int, body: Callable[[MailWorker], Any], **options: Any) -> list[Any]:
        """Run the body of each worker; returns the results, None of a worker that has died."""
        for _ in range(num_workers):
            self.start(body, min_workers=num_workers, **options)
        return self.end()

    def start(self, body: Callable[[MailWorker], Any], **options: Any) -> MailWorker:
        """Start one more worker."""
        i, worker = len(self.workers), MailWorker(self, **options)
        self.workers.append(worker)
        worker.thread = self.clock.start(lambda: self._work(i, worker, body), f"worker {i}")
        worker.thread.process = worker.thread  # also if another worker starts it
        return worker

    def end(self) -> list[Any]:
        """Wait for the ends of all workers; returns the results, and raises the first error."""
        try:
            assert self.clock.run(until=LIMIT), f"the run has not ended after {LIMIT:g} s"
        finally:
            self.clock.close()
        return [self._results.get(i) for i in range(len(self.workers))]

    def _work(self, i: int, worker: MailWorker, body: Callable[[MailWorker], Any]) -> None:
        self._results[i] = body(worker)
        worker.model.close()
        self.clock.sleep(_SETTLE)
        left = [str(t) for t in self.clock._threads if t.process is worker.thread and t is not worker.thread]
        assert not left, f"{', '.join(left)} of worker {worker.number} did not end with it"

    def drifts(self, kind: str = "average") -> dict[str, list[dict[int, Tensor]]]:
        """For each fragment, the vectors in the messages that count, by round and worker."""
        medium, found = self.workers[0].medium, dict[str, list[dict[int, Tensor]]]()
        for path in sorted(path for path in medium._list("round") if path.endswith("/close")):
            _, stream, number, _ = path.split("/")
            if stream.endswith(f"-{kind}"):
                rounds = Stream(self.workers[0].membership.mail, stream, max_bytes=1 << 30)
                close = rounds.close_of(int(number))
                assert close is not None, path
                sent = rounds._messages(close, close.members, {})
                row = {worker: torch.cat([x.flatten() for x in message.tensors]) for worker, message in sent.items()}
                found.setdefault(stream.removesuffix(f"-{kind}"), []).append(row)
        return found

    def objects(self) -> dict[str, Listed]:
        """All objects of the run."""
        return self.workers[0].medium._list("")


def steps(
    worker: MailWorker,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    num_steps: int,
    *,
    before: Callable[[int], object] = lambda step: None,
) -> None:
    """A loop of elastic training: so many steps, and one more forward, at which the round after the last step ends.

    Args:
        worker: the worker.
        optimizer: of its model.
        loss: the loss of a step, by a forward of the wrapper.
        num_steps: the number of optimizer steps.
        before: called before each forward.
    """
    for step in worker.membership.steps(num_steps + 1):
        before(step)
        value = loss(step)
        if step == num_steps:
            return
        optimizer.zero_grad()
        value.backward()
        optimizer.step()


def equal(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors have the same bits."""
    return all(torch.equal(tensors[0], x) for x in tensors)

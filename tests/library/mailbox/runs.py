"""Workers as threads that train problem Q over a mailbox, for tests of runs that begin, end and begin again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gossip_modules import DiLoCo, GossipDataParallel
from gossip_modules.mailbox.medium import Medium
from gossip_modules.mailbox.membership import MailMembership
from tests.harness.quadratics import LEARNING_RATE, Point

H = 5
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9}
OPTIONS: dict[str, Any] = {"grace": 10.0, "poll": 0.01, "interval": 5.0, "timeout": 30.0, "key": "key of these tests"}


@dataclass
class Worker:
    """A worker after its steps: x as each forward has found it by its step, and its membership."""

    membership: MailMembership
    model: GossipDataParallel
    optimizer: torch.optim.Optimizer
    x: dict[int, float] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """The first step."""
        return min(self.x)


def train(
    address: str | Callable[[], Medium],
    num_steps: int,
    *,
    parabolas: Sequence[int] = (0, 1, 2),
    lr: float = LEARNING_RATE,
    momentum: float = 0.0,
    end: Callable[[Worker], object] = lambda worker: worker.model.close(),
    at_step: Callable[[Worker, int], object] = lambda worker, step: None,
    make_model: Callable[[], Point] = Point,
    **options: Any,
) -> list[Worker]:
    """Train until a forward in step `num_steps`, which no optimizer step follows.

    Args:
        address: of the run, or makes its medium for a worker.
        num_steps: the number of optimizer steps of a worker that begins with the run.
        parabolas: the parabola of problem Q of each worker.
        lr, momentum: of SGD.
        end: the end of a worker.
        at_step: called after each forward.
        make_model: the model of a worker.
        options: of the memberships.
    """
    workers: list[Worker] = []
    errors: list[BaseException] = []
    all_joined = threading.Barrier(len(parabolas))

    def work(parabola: int) -> None:
        store = address if isinstance(address, str) else address()
        membership = MailMembership(store, **{"min_workers": len(parabolas), **OPTIONS, **options})
        point = make_model()
        optimizer = torch.optim.SGD(point.parameters(), lr=lr, momentum=momentum)
        membership.track(optimizer=optimizer)
        model = GossipDataParallel(point, algorithm=DiLoCo(sync_every=H, **OUTER), membership=membership)
        worker = Worker(membership, model, optimizer)
        membership.join()
        optimizer.param_groups[0]["lr"] = lr  # which the saved optimizer has replaced
        all_joined.wait(10.0)
        for step in membership.steps(num_steps + 1):
            optimizer.zero_grad()
            loss = model(parabola)
            worker.x[step] = point.x.item()
            at_step(worker, step)
            if step == num_steps:
                break
            loss.backward()
            optimizer.step()
        end(worker)
        workers.append(worker)

    def target(parabola: int) -> None:
        try:
            work(parabola)
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=target, args=(parabola,)) for parabola in parabolas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    if errors:
        raise errors[0]
    return workers

"""Workers of a mailbox under a virtual clock: each trains one number, and notes how long it waits between its steps."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossip_modules import GossipDataParallel
from gossip_modules.lab.virtual_clock import VirtualClock
from gossip_modules.mailbox.membership import MailMembership
from gossip_modules.mailbox.memory import MemoryMedium
from gossip_modules.mailbox.sealed import Seal
from gossip_modules.rounds import Algorithm
from gossip_modules.testing.storm import StormyMedium

_runs = itertools.count()


class Number(nn.Module):
    """One number, whose distance to the number of the worker is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.x


class VirtualWorker:
    """A worker that trains until it is killed.

    Args:
        run: its run.
        speed: its steps in a second.

    Attributes:
        waits: the seconds between the end of a step and the begin of the next one, longest last.
        membership: its membership, from its first turn on.
        model: the wrapper, from its first turn on.
        optimizer: its optimizer, after the first model was taken.
    """

    membership: MailMembership
    model: GossipDataParallel
    optimizer: torch.optim.Optimizer

    def __init__(self, run: VirtualRun, speed: float) -> None:
        self.run, self.speed, self.waits = run, speed, list[float]()
        self.num_steps = 0
        self.thread = run.clock.start(self._train, f"worker of {speed:g} steps in a second")

    def _train(self) -> None:
        run, clock = self.run, self.run.clock
        memory = MemoryMedium(run.name, timeout=run.options["timeout"], clock=clock, seal=Seal(None))
        medium = StormyMedium(memory, seed=0, outage=run.outage)
        self.membership = MailMembership(medium, clock=clock, **run.options)
        algorithm = run.algorithm if isinstance(run.algorithm, Algorithm) else run.algorithm(self.speed)
        self.model = model = GossipDataParallel(Number(), algorithm=algorithm, membership=self.membership)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        self.membership.track(optimizer=self.optimizer)
        end = None
        for _ in self.membership.steps(sys.maxsize):
            loss = (model() - self.membership.number).square().sum()
            if end is not None:
                self.waits.append(clock.now() - end)
            self.optimizer.zero_grad()
            loss.backward()
            clock.sleep(1 / self.speed)
            self.optimizer.step()
            self.num_steps += 1
            end = clock.now()


class VirtualRun:
    """A run over a mailbox in memory, whose requests take no time.

    Args:
        algorithm: of all workers; or a function of the speed of a worker.
        speeds: the steps in a second of the workers at the start.
        seed: see `VirtualClock`.
        outage: see `StormyMedium`.
        options: of `MailMembership`.
    """

    def __init__(
        self,
        algorithm: Any,
        speeds: Sequence[float],
        *,
        seed: int = 0,
        outage: Sequence[tuple[float, float]] = (),
        **options: Any,
    ) -> None:
        self.algorithm, self.outage = algorithm, outage
        self.options: dict[str, Any] = {
            "min_workers": len(speeds),
            "grace": 3.0,
            "poll": 0.5,
            "interval": 2.0,
            "timeout": 1e3,
            **options,
        }
        self.name, self.clock = f"virtual-{next(_runs)}", VirtualClock(seed=seed)
        self.workers = [VirtualWorker(self, speed) for speed in speeds]

    def __enter__(self) -> VirtualRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.clock.close()

    @property
    def longest_wait(self) -> float:
        return max(max(worker.waits, default=0.0) for worker in self.workers)

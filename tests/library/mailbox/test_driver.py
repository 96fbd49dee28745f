"""Rounds over a mailbox have the laws of the algorithms, and the drifts of late workers are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossip_modules import DiLoCo, GossipDataParallel
from gossip_modules.lab.virtual_clock import VirtualClock
from gossip_modules.mailbox.clock import Clock
from gossip_modules.mailbox.membership import MailMembership
from gossip_modules.mailbox.memory import MemoryMedium
from gossip_modules.mailbox.sealed import Seal
from tests.harness.late_drifts import outer_steps
from tests.harness.quadratics import CURVATURES, LEARNING_RATE, MINIMA, START

H, NUM_OUTER = 5, 4
LATE = {2: [4], 4: [4]}


class Quadratic(nn.Module):
    """One number, with which the loss of worker i is a_i / 2 (x - b_i)^2."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([START], dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.x


class Run:
    """Workers as threads of a virtual clock that share a mailbox in memory.

    Args:
        name: the name of the run.
        late: the workers that miss an outer step, by the number of the step; the first one is 1.
        options: of the memberships.
    """

    def __init__(self, name: str, late: Mapping[int, Collection[int]], **options: Any) -> None:
        self.name, self.late, self.options = name, late, options
        self.clock = VirtualClock()
        self.models: dict[int, float] = {}
        self.anchors: dict[int, float] = {}

    def train(self, algorithm: Any, num_workers: int) -> None:
        for i in range(num_workers):
            self.clock.start(lambda: self._steps(algorithm, num_workers), f"worker {i}")
        try:
            assert self.clock.run(until=1e4)
        finally:
            self.clock.close()

    def _steps(self, algorithm: Any, num_workers: int) -> None:
        options = {"grace": 10.0, "poll": 0.5, "interval": 5.0, "timeout": 30.0, **self.options}
        medium = SlowUploads(self.name, self.late, self.clock)
        membership = MailMembership(medium, min_workers=num_workers, clock=self.clock, **options)
        model = GossipDataParallel(Quadratic(), algorithm=algorithm, membership=membership)
        i, optimizer = membership.number, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for step in membership.steps(H * NUM_OUTER + 1):
            x = model()
            if step == H * NUM_OUTER:
                self.models[i] = x.item()
                break
            loss = CURVATURES[i] / 2 * (x - MINIMA[i]).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.close()


class SlowUploads(MemoryMedium):
    """A medium in which messages of late workers arrive when their round is closed.

    Args:
        name: the name of the run.
        late: see `Run`.
        clock: of the run.
    """

    def __init__(self, name: str, late: Mapping[int, Collection[int]], clock: Clock) -> None:
        super().__init__(name, timeout=30.0, clock=clock, seal=Seal(None))
        self._late = late

    def create(self, path: str, data: bytes, *, deadline: float | None = None) -> bool:
        kind, _, rest = path.partition("/")
        _, number, worker = rest.split("/") if kind == "round" else ("", "", "")
        if worker.isdigit() and int(worker) in self._late.get(int(number) + 1, ()):
            close = path.replace(worker, "close")
            while self.get(close, max_bytes=1 << 20) is None:
                self.clock.sleep(0.1)
        return super().create(path, data, deadline=deadline)


def test_workers_in_time_have_the_golden_value_of_diloco() -> None:
    run = Run("in-time", {})
    run.train(DiLoCo(sync_every=H), 5)
    assert len(set(run.models.values())) == 1
    assert run.models[0] == pytest.approx(0.7702157507, abs=5e-11)


def test_the_drift_of_a_late_worker_counts_in_the_next_outer_step() -> None:
    run = Run("late", LATE, quorum=4)
    run.train(DiLoCo(sync_every=H), 5)
    last = outer_steps(LATE)[-1]
    for i in range(4):
        assert run.models[i] == pytest.approx(last.anchor, abs=1e-12)
    assert run.models[4] == pytest.approx(last.models[4], abs=1e-12)
    assert (last.anchor, last.models[4]) == pytest.approx((0.1789581115, 1.8775301647), abs=5e-11)

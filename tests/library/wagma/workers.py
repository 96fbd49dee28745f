"""What several tests of this folder share."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gossip_modules.extend import FlatVector, ProcessGroupTransport
from gossip_modules.graph_manager.butterfly_groups import ButterflyGroups
from gossip_modules.wagma.engine import WaitAvoidingEngine
from gossip_modules.wagma.worker import WaitAvoidingWorker
from tests.harness.ranks import CPU, TIMEOUT

PATIENCE = 30.0  # a loaded machine may take long


class Rank:
    """An engine over a vector of equal numbers."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        size: int = 2,
        period: int = 0,
        numel: int = 8,
        timeout: timedelta = TIMEOUT,
        overlap: bool = False,
    ) -> None:
        self.x = torch.full((numel,), float(group.rank()))
        self.vector = FlatVector.over(self.x)
        transport = ProcessGroupTransport(group, device=CPU, timeout=timeout)
        groups = ButterflyGroups(transport.world_size, group_size=size)
        self.engine = WaitAvoidingEngine(groups, transport, self.vector, sync_period=period, overlap=overlap)
        self.worker = self.engine.worker
        self.engine.begin()

    def round(self, value: float | None = None) -> float:
        """A training step to the model `value`, and the round after it; what the model is then."""
        if value is not None:
            self.x.fill_(value)
        self.engine.round(self.vector)
        return self.value

    @property
    def value(self) -> float:
        """Of all numbers of the model."""
        assert self.x.max() - self.x.min() < 1.0, "a torn model"
        return self.x[0].item()

    def end(self) -> None:
        """Settle and close, as a script does."""
        self.engine.flush(self.vector)
        self.engine.settle(self.vector)
        self.engine.close()


def be_on_time(monkeypatch: pytest.MonkeyPatch, *, before: int = 1 << 31) -> None:
    """Until round `before`, no worker starts a round before its own training is there."""
    run = WaitAvoidingWorker._run

    def patient_run(worker: WaitAvoidingWorker, t: int) -> None:
        with worker.state:
            is_there = worker.state.wait_for(lambda: t >= before or worker.published.latest.standing >= t, PATIENCE)
            assert is_there, f"training never came to round {t}"
        run(worker, t)

    monkeypatch.setattr(WaitAvoidingWorker, "_run", patient_run)

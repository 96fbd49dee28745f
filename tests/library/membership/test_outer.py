"""Newcomers of outer methods: they start at the anchor, with an empty drift."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossip_modules as gm
from gossip_modules.extend import OuterMethod
from tests.library.membership.test_membership import Job, close


class Recording(nn.Sequential):
    """Keeps the parameters of its first training forward."""

    first: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = [parameter.detach().clone() for parameter in self.parameters()]
        return cast("Tensor", super().forward(x))


PERIOD = 1 << 20  # steps: no round ends the window


@pytest.mark.filterwarnings("ignore:closed a GossipDataParallel after:UserWarning")
@pytest.mark.parametrize(
    "outer",
    [
        gm.DiLoCo(PERIOD),
        gm.StreamingDiLoCo(PERIOD, delay=2, fragments=2),
        gm.EagerDiLoCo(PERIOD),
        gm.MuLoCo(PERIOD),
        gm.IsoLoCo(PERIOD),
        gm.SparseLoCo(PERIOD),
        gm.DiLoCo(PERIOD, compressor=gm.QSGD(8, unbiased=True), collective="all_reduce"),
        gm.SlowMo(PERIOD),
        gm.NoLoCo(PERIOD),
        gm.GASLoC(PERIOD),
    ],
    ids=lambda outer: type(outer).__name__,
)
def test_a_newcomer_starts_at_the_anchor(outer: OuterMethod) -> None:
    """It joins within a window. The donor's steps in it stay in the donor's drift alone."""
    job = Job(dist.HashStore(), min_workers=1, algorithm=outer)
    founder, newcomer = Recording(nn.Linear(4, 1)), Recording(nn.Linear(4, 1))
    (worker,) = job.start(1, model=founder)
    job.until_live([worker])
    job.until(lambda: worker.step > 10, "the donor has a drift")
    workers = [worker, *job.start(1, model=newcomer)]
    job.until_live(workers)
    job.end()
    assert founder.first is not None
    assert newcomer.first is not None
    assert all(map(torch.equal, newcomer.first, founder.first))
    assert not any(map(torch.equal, founder.first, founder.parameters()))
    close(workers)

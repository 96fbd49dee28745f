"""Checkpoints of version 0.2.0 load, and training goes on from them as that version did.

Each file of `old_checkpoints` has, for each of two ranks, the state of the wrapper and of the optimizer after six steps
of `train`, and the parameters after ten, all computed by commit a939c3a2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import (
    D2,
    Choco,
    DiLoCo,
    GossipDataParallel,
    PowerGossip,
    QGDSGDm,
    SlowMo,
    StreamingDiLoCo,
    TopK,
)
from tests.harness.ranks import run_ranks

FILES = Path(__file__).with_name("old_checkpoints")
CASES: dict[str, dict[str, Any]] = {
    "choco": {"algorithm": Choco(TopK(0.3), step_size=0.2)},
    "d2": {"algorithm": D2()},
    "diloco": {"algorithm": DiLoCo(4)},
    "osgp": {"overlap": True},
    "powergossip": {"algorithm": PowerGossip()},
    "qg": {"algorithm": QGDSGDm()},
    "sgp": {},
    "slowmo": {"algorithm": SlowMo(4)},
    "streaming": {"algorithm": StreamingDiLoCo(4, fragments=2, delay=1)},
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("version", ["0.2.0"])
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_an_older_version_goes_on(version: str, name: str) -> None:
    saved = torch.load(FILES / version / f"{name}.pt", weights_only=True)

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        model = GossipDataParallel(module, process_group=group, **CASES[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model.load_state_dict(saved[rank]["model"])
        optimizer.load_state_dict(saved[rank]["optimizer"])
        train(model, optimizer, rank, 6, 10)
        model.flush()
        found = torch.cat([x.detach().flatten() for x in module.parameters()])
        torch.testing.assert_close(
            found, saved[rank]["end"], rtol=1e-5, atol=1e-6
        )  # another processor rounds otherwise
        model.close()

    run_ranks(2, body)

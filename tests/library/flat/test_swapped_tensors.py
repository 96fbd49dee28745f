"""One layer is frozen and another of the same shapes is trained instead: nothing of the one reaches the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import (
    D2,
    DiLoCo,
    GossipDataParallel,
    GradientTracking,
    QGDSGDm,
    RelaySGD,
    StreamingDiLoCo,
)
from tests.harness.ranks import run_ranks, solo_group

OPTIONS: list[dict[str, Any]] = [
    {"algorithm": DiLoCo(sync_every=2)},
    {"algorithm": StreamingDiLoCo(sync_every=4, fragments=1, delay=1)},
    {"algorithm": QGDSGDm()},
    {"algorithm": D2()},
    {"algorithm": GradientTracking()},
    {"algorithm": RelaySGD},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_correction_of_one_layer_is_not_applied_to_another(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> float:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer, value in zip(model, (0.1, 0.9), strict=True):
            for parameter in layer.parameters():
                nn.init.constant_(parameter, value)
        model[1].requires_grad_(False)
        wrapper = GossipDataParallel(model, process_group=group, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(group.rank()))
        for step in range(10):
            if step == 7:
                model[0].requires_grad_(False)
                model[1].requires_grad_(True)
            optimizer.zero_grad()
            wrapper(x).square().mean().backward()
            optimizer.step()
        wrapper.close()
        return float(model[1].weight.detach().mean())

    with pytest.warns(UserWarning, match="other tensors"):  # around both: filters belong to the process
        means = run_ranks(2, body)
    assert all(abs(mean - 0.9) < 0.02 for mean in means), f"got {means}: three small steps from 0.9"


def test_a_replaced_tensor_of_two_dtypes_touches_no_other() -> None:
    model = nn.ParameterDict(
        {
            name: nn.Parameter(torch.full((4,), value, dtype=dtype))
            for name, value, dtype in (
                ("a", 1.0, torch.bfloat16),
                ("b", 2.0, torch.float32),
                ("c", 3.0, torch.bfloat16),
                ("d", 4.0, torch.float32),
            )
        }
    )

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.terms = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * sum(term.float() for term in self.terms.values())

    wrapper = GossipDataParallel(Sum(), process_group=solo_group())
    wrapper(torch.ones(2, 4)).sum().backward()
    model["d"] = nn.Parameter(model["d"].detach().clone())
    wrapper(torch.ones(2, 4)).sum().backward()
    wrapper.settle()
    assert {name: float(term.detach().float().mean()) for name, term in model.items()} == {
        "a": 1,
        "b": 2,
        "c": 3,
        "d": 4,
    }
    wrapper.close()

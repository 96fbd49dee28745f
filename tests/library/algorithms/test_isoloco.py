"""IsoLoCo: the mean drift has equal singular values in each matrix."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import DiLoCo, GossipDataParallel, IsoLoCo
from gossip_modules.algorithms.isoloco import equalize_
from gossip_modules.extend import FlatBuffer
from gossip_modules.rounds import Vector
from gossip_modules.rounds.stacked import Stacked
from gossip_modules.wrappers.choices import Choices
from tests.harness.quadratics import solve
from tests.harness.ranks import run_ranks

SHAPES = [(3, 4), (3,), (2, 2, 2)]
RATES: dict[str, Any] = {"lr": 0.7, "momentum": 0.5}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(shape, dtype=torch.float64) for shape in SHAPES)

    def forward(self) -> Tensor:
        return sum((x.sum() for x in self.parts), torch.zeros(()))


def steps(rank: int, k: int) -> Tensor:
    """The step of a rank, float64 [23]."""
    return torch.randn(23, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * k + rank))


def equal(d: Tensor) -> Tensor:
    """The rule, on the only matrix."""
    u, s, vh = torch.linalg.svd(d[:12].view(3, 4), full_matrices=False)
    return torch.cat([(s.mean() * u @ vh).flatten(), d[12:]])


def test_golden_value() -> None:
    model = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 0.0], [4.0, 5.0]]))
    x = Vector.of(FlatBuffer(model).vector)
    equalize_(x, x)
    expected = torch.tensor([[4.0, -2.0], [2.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")  # which on_nonfinite="spread" lets through
    equalize_(x, x)
    torch.testing.assert_close(model.weight[0].isnan(), torch.tensor([True, False]))


@pytest.mark.parametrize("orthogonalize", ["drift", "step"])
@pytest.mark.parametrize("delay", [0, 1])
def test_ranks_and_rows_are_the_law(orthogonalize: Literal["drift", "step"], delay: int) -> None:
    outer = IsoLoCo(2, orthogonalize=orthogonalize, delay=delay, arrival="carry", **RATES)

    def body(group: dist.ProcessGroup) -> Tensor:
        model = Model()
        wrapper = GossipDataParallel(model, process_group=group, algorithm=outer)
        for k in range(6):
            wrapper()
            with torch.no_grad():
                for x, step in zip(model.parts, steps(group.rank(), k).split([12, 3, 8]), strict=True):
                    x.sub_(step.view(x.shape))
        wrapper()
        wrapper.close()
        return torch.cat([x.detach().flatten() for x in model.parts])

    x = torch.zeros(3, 23, dtype=torch.float64)
    rows, driver = x.clone(), Stacked(outer, None, 3, shapes=SHAPES)
    phi, m, late = x[0].clone(), torch.zeros(23, dtype=torch.float64), {}
    for k in range(7):
        if k and k % 2 == 0:
            late[k + delay] = (phi - x, x)
        if k in late:
            drifts, s = late.pop(k)
            d = drifts.mean(0)
            d = equal(d) if orthogonalize == "drift" else d
            m = 0.5 * m + d
            change = d + 0.5 * m
            phi = phi - 0.7 * (equal(change) if orthogonalize == "step" else change)
            x = phi + x - s
        driver.step(rows, k)
        if k < 6:
            change = torch.stack([steps(rank, k) for rank in range(3)])
            x, rows = x - change, rows.sub_(change)
    for drifts, s in late.values():
        d = drifts.mean(0)
        d = equal(d) if orthogonalize == "drift" else d
        m = 0.5 * m + d
        change = d + 0.5 * m
        phi = phi - 0.7 * (equal(change) if orthogonalize == "step" else change)
        x = phi + x - s
    driver.settle(rows)
    torch.testing.assert_close(torch.stack(run_ranks(3, body)), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(rows, x, rtol=0, atol=1e-12)


def test_a_model_without_matrices_is_diloco() -> None:
    found = solve(lambda: {"algorithm": IsoLoCo(5, **RATES)})
    torch.testing.assert_close(found, solve(lambda: {"algorithm": DiLoCo(5, **RATES)}), rtol=0, atol=0)


def test_fragments_that_cut_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"IsoLoCo: got fragments=2, whose equal runs cut matrices, expected 1 or a"):
        IsoLoCo(fragments=2)
    with pytest.raises(ValueError, match="got orthogonalize='both', expected 'drift' or 'step'"):
        IsoLoCo(orthogonalize="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got IsoLoCo.* hold in shards \(nprocs_per_node=2, or fully_shard\)"):
        Choices(algorithm=IsoLoCo()).check(overlap=False, init_sync=True, nprocs_per_node=2)

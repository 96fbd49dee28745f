"""PULSELoCo computes what its paper says, and sends a bit for each entry and the visible entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import DiLoCo, GossipDataParallel, PULSELoCo
from tests.harness.ranks import run_ranks
from tests.library.algorithms.test_sparse_loco import NUM_RANKS, Elements, train


def law(x: Tensor, phi: Tensor, e: Tensor, m: Tensor, outer: PULSELoCo) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One outer step on the models x [n, d]: phi, e, m and the masks after it."""
    s = e + phi - x
    masks = phi.to(outer.visible_in) != (phi - s).to(outer.visible_in)
    mean = torch.where(masks, s, 0).mean(0)
    m = outer.momentum * m + mean
    return phi - outer.lr * (mean + outer.momentum * m), torch.where(masks, 0, s), m, masks


class Numbers(nn.Module):
    """The numbers of the golden values, and a buffer of two elements, which is averaged too."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(START.clone())
        self.register_buffer("seen", torch.zeros(2))

    def forward(self) -> Tensor:
        return self.x.sum()


START = torch.tensor([1, 1, -0.5, 0.001])
MODELS = torch.tensor([[0.999, 0.9, -0.4995, 0.00099], [1.003, 1.2, -0.5009, 0.0011]])


def outer_steps(outer: PULSELoCo, models: list[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """phi after each outer step from these models, then the buffers and e; a row for each of two ranks."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        model = Numbers()
        options: dict[str, Any] = {"rounds": "manual", "gossip_buffers": ["seen"], "process_group": group}
        wrapper = GossipDataParallel(model, algorithm=outer, **options)
        seen = []
        for each in models:
            with torch.no_grad():
                model.x.copy_(each[group.rank()])
                model.seen.fill_(group.rank())
            wrapper.gossip_step()
            seen.append(model.x.detach().clone())
        engine: Any = wrapper._local.engine
        error = engine.mixer.drivers[0].memory.vector("error").parts[0][:4]
        seen += [model.seen.clone(), error.clone()]
        wrapper.close()
        return seen

    *phis, buffers, e = (torch.stack(rows) for rows in zip(*run_ranks(2, body), strict=True))
    return phis, buffers, e


def test_golden_values() -> None:
    """By hand in float32: the second and the fourth entries are visible on both ranks."""
    phi, buffers, e = outer_steps(PULSELoCo(1, lr=1.0, momentum=0.0), [MODELS])
    torch.testing.assert_close(phi[0], torch.tensor([1, 1.05, -0.5, 0.001045]).expand(2, -1), rtol=0, atol=1e-7)
    assert torch.equal(phi[0][0], phi[0][1])
    assert torch.equal(buffers, torch.full((2, 2), 0.5))
    expected = torch.tensor([[0.001, 0, -0.0005, 0], [-0.003, 0, 0.0009, 0]])
    torch.testing.assert_close(e, expected, rtol=0, atol=1e-7)


def test_the_rest_is_sent_when_it_has_become_visible() -> None:
    outer = PULSELoCo(1, lr=0.7, momentum=0.9)
    models = [torch.stack([START, MODELS[1]]), MODELS + 0.003, MODELS - 0.01, MODELS]
    found, _, rest = outer_steps(outer, models)
    phi, e, m = START, torch.zeros(2, 4), torch.zeros(4)
    counts = []
    for x, seen in zip(models, found, strict=True):
        phi, e, m, masks = law(x, phi, e, m, outer)
        counts.append(masks.sum(1).tolist())
        torch.testing.assert_close(seen, phi.expand(2, -1), rtol=0, atol=1e-6)
    torch.testing.assert_close(rest, e, rtol=0, atol=1e-6)
    assert any(one != two for one, two in counts), "ranks send different numbers of entries"


def test_where_all_entries_are_visible_it_is_diloco() -> None:
    """And a message has a bit and a float64 for each of 256 elements, or nearly all, after 8 bytes with its size."""
    found, num_bytes = train(PULSELoCo(3, lr=0.7, momentum=0.5))
    expected, _ = train(DiLoCo(3, lr=0.7, momentum=0.5))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-3)  # half a unit of bfloat16 below 1
    d = sum(p.numel() for p in Elements().parameters())
    assert 0.98 < num_bytes / (4 * (NUM_RANKS - 1) * (8 + d // 8 + 8 * d)) <= 1


def test_a_warning_says_that_an_all_reduce_sends_less() -> None:
    """Once, on rank 0: all 2,040 entries are visible in the last two outer steps, and none in the first."""

    def body(group: dist.ProcessGroup) -> None:
        model = nn.Linear(50, 40)
        wrapper = GossipDataParallel(model, algorithm=PULSELoCo(1), rounds="manual", process_group=group)
        for change in (0.0, 1.0, 1.0):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(change)
            wrapper.gossip_step()
        wrapper.close()

    said = r"PULSELoCo\(.*: each rank has sent 8,\d+ bytes in a round, and an all-reduce of all entries sends 8,1\d\d: "
    with pytest.warns(UserWarning, match=said) as seen:
        run_ranks(2, body)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"lr": 0.0}, "PULSELoCo: got lr=0.0"),
        ({"momentum": 1.0}, "PULSELoCo: got momentum=1.0"),
        ({"visible_in": torch.float32}, "PULSELoCo: got visible_in=torch.float32, expected torch.bfloat16 or torch.fl"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        PULSELoCo(**arguments)

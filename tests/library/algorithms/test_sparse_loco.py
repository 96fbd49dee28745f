"""SparseLoCo computes what its paper says, on every rank alike, and sends the bytes of its messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import DiLoCo, GossipDataParallel, RandomK, SparseLoCo, TopK
from gossip_modules.compression import ChunkTopK, Compressor, TwoBit
from gossip_modules.extend import OuterMethod
from tests.harness.quadratics import CURVATURES, LEARNING_RATE, solve
from tests.harness.ranks import run_ranks

NUM_STEPS, NUM_RANKS, D = 14, 3, 256


def minima(rank: int) -> Tensor:
    """The minimum of each element's parabola on this rank, float64 [D]."""
    return torch.randn(D, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


class Elements(nn.Module):
    """D numbers, each with a parabola of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.linspace(-1, 1, D, dtype=torch.float64))

    def forward(self, rank: int) -> Tensor:
        return CURVATURES[rank] / 2 * (self.x - minima(rank)).square().sum()


def train(outer: OuterMethod) -> tuple[list[Tensor], float]:
    """The models of all ranks after each step, float64 [NUM_RANKS, D], and the bytes that rank 0 has sent."""

    def body(group: dist.ProcessGroup) -> tuple[list[Tensor], float]:
        model = Elements()
        wrapper = GossipDataParallel(model, process_group=group, algorithm=outer)
        before, seen = wrapper.comm_stats()["bytes_sent"], []
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = wrapper(group.rank())
            seen.append(model.x.detach().clone())
            loss.backward()
            optimizer.step()
        wrapper.flush()
        num_bytes = wrapper.comm_stats()["bytes_sent"] - before
        wrapper.close()
        return seen, num_bytes

    results = run_ranks(NUM_RANKS, body)
    return [torch.stack(models) for models in zip(*(seen for seen, _ in results), strict=True)], results[0][1]


def meant(compressor: Compressor, x: Tensor, t: int) -> Tensor:
    """C(x)."""
    message, result = compressor.message_like(x), torch.zeros_like(x)
    compressor.compress(x.contiguous(), message, t=t)
    compressor.add_decompressed(message, result)
    return result


def law(outer: SparseLoCo) -> list[Tensor]:
    """Algorithm 1, for each fragment at its steps, and with a delay as streaming DiLoCo has it."""
    x = torch.linspace(-1, 1, D, dtype=torch.float64).expand(NUM_RANKS, -1).clone()
    phi, e, mean, seen = x[0].clone(), torch.zeros_like(x), {}, []
    num_sent = [0] * outer.num_fragments
    curvatures = torch.tensor(CURVATURES[:NUM_RANKS], dtype=torch.float64)[:, None]
    goals = torch.stack([minima(rank) for rank in range(NUM_RANKS)])
    for k in range(NUM_STEPS):
        for p, piece in enumerate(torch.arange(D).chunk(outer.num_fragments)):
            if p in outer.starting_at(k):
                e[:, piece] = outer.decay * e[:, piece] + phi[piece] - x[:, piece]
                q = torch.stack([meant(outer.compressor, row[piece], num_sent[p]) for row in e])
                e[:, piece] -= q
                mean[p, k + int(outer.delay)] = q.mean(0)
                num_sent[p] += 1
            if (p, k) in mean:
                phi[piece] -= outer.lr * mean.pop((p, k))
                x[:, piece] = outer.kept * x[:, piece] + (1 - outer.kept) * phi[piece]
        seen.append(x.clone())
        x = x - LEARNING_RATE * curvatures * (x - goals)
    return seen


TWO_BITS = ChunkTopK(5, 50, values=TwoBit(8))


@pytest.mark.parametrize(
    "outer",
    [
        SparseLoCo(3, compressor=TWO_BITS),
        SparseLoCo(3, lr=0.7, decay=0.5, compressor=RandomK(0.1)),  # other entries in every outer step
        SparseLoCo(4, compressor=TWO_BITS, fragments=2, delay=2),
    ],
    ids=["two-bits", "random", "late-fragments"],
)
def test_sparse_loco_is_its_law(outer: SparseLoCo) -> None:
    found, num_bytes = train(outer)
    for models, expected in zip(found, law(outer), strict=True):
        torch.testing.assert_close(models, expected, rtol=0, atol=1e-12)
    if not outer.delay:  # all ranks have the same anchor, to the bit
        assert torch.equal(found[3], found[3][:1].expand(NUM_RANKS, -1))
    num_outer_steps = sum(len(outer.starting_at(k)) for k in range(NUM_STEPS))
    size = outer.compressor.num_bytes(D // outer.num_fragments, torch.float64)
    assert num_bytes == num_outer_steps * (NUM_RANKS - 1) * -(-size // 8) * 8


def test_without_loss_and_memory_it_is_diloco_without_momentum() -> None:
    found = solve(lambda: {"algorithm": SparseLoCo(5, lr=0.7, decay=0.0, compressor=TopK(1.0))})
    torch.testing.assert_close(found, solve(lambda: {"algorithm": DiLoCo(5, momentum=0.0)}), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SparseLoCo(lr=0.0), "SparseLoCo: got lr=0.0, expected a number above 0"),
        (lambda: SparseLoCo(decay=1.1), "SparseLoCo: got decay=1.1, expected 0 <= decay <= 1: above 1 the unsent rest"),
        (lambda: SparseLoCo(compressor=None), "SparseLoCo: got compressor=None, expected a Compressor; pass e.g."),  # type: ignore[arg-type]
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

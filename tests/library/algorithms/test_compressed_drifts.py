"""DiLoCo, Streaming DiLoCo and Eager DiLoCo whose drifts are compressed, with error feedback."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import (
    QSGD,
    DiLoCo,
    EagerDiLoCo,
    GossipDataParallel,
    SparseLoCo,
    StreamingDiLoCo,
    TopK,
)
from gossip_modules.compression import ChunkTopK, TwoBit
from tests.harness.problems import mlp
from tests.harness.quadratics import CURVATURES, LEARNING_RATE
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten
from tests.library.algorithms.test_sparse_loco import NUM_RANKS, NUM_STEPS, D, meant, minima, train
from tests.library.rounds.memories import memory_of

FOUR_BITS = QSGD(4, bucket_size=32, unbiased=True)
START = torch.linspace(-1, 1, D, dtype=torch.float64)


def trained(x: Tensor) -> Tensor:
    """The models of all ranks after a step of SGD; float64 [NUM_RANKS, D]."""
    curvatures = torch.tensor(CURVATURES[:NUM_RANKS], dtype=torch.float64)[:, None]
    return x - LEARNING_RATE * curvatures * (x - torch.stack([minima(rank) for rank in range(NUM_RANKS)]))


def messages(outer: DiLoCo, e: Tensor, t: int) -> Tensor:
    """What the messages of all ranks mean, q; e, float64 [NUM_RANKS, d], loses it."""
    assert outer.compressor is not None
    q = torch.stack([meant(outer.compressor, row, t) for row in e])
    e -= q
    return q


def averaged(outer: DiLoCo, e: Tensor, t: int) -> Tensor:
    """The mean of the messages of all ranks; e, float64 [NUM_RANKS, d], loses what they send."""
    if outer.collective == "all_gather":
        return messages(outer, e, t).mean(0)
    assert outer.compressor is not None
    n, d = NUM_RANKS, e.shape[1]
    length = -(-d // (64 * n)) * 64
    rows = torch.nn.functional.pad(e, (0, n * length - d)).view(n, n, length)  # rank, run, element
    mean = torch.zeros(n, length, dtype=e.dtype)
    for k in range(n):
        q = torch.stack([meant(outer.compressor, row, t) for row in rows[:, k]])
        mean[k] = meant(outer.compressor, q.mean(0), t)
        rows[:, k] -= q
        rows[k, k] += n * (q.mean(0) - mean[k])
    e.copy_(rows.view(n, -1)[:, :d])
    return mean.view(-1)[:d]


def law(outer: DiLoCo, num_steps: int = NUM_STEPS) -> list[Tensor]:
    """The models of all ranks after each step: the docstrings of DiLoCo and Streaming DiLoCo as a loop."""
    x = START.expand(NUM_RANKS, -1).clone()
    phi, m, e, means, seen = START.clone(), torch.zeros(D, dtype=torch.float64), torch.zeros_like(x), {}, []
    num_sent = [0] * outer.num_fragments
    for k in range(num_steps):
        for p, piece in enumerate(torch.arange(D).chunk(outer.num_fragments)):
            if p in outer.starting_at(k):
                own = outer.error_decay * e[:, piece] + phi[piece] - x[:, piece]
                means[p, k + int(outer.delay)] = averaged(outer, own, num_sent[p])
                e[:, piece] = own
                num_sent[p] += 1
            if (p, k) in means:
                mean = means.pop((p, k))
                m[piece] = outer.momentum * m[piece] + mean
                phi[piece] -= outer.lr * (mean + outer.momentum * m[piece])
                x[:, piece] = outer.kept * x[:, piece] + (1 - outer.kept) * phi[piece]
        seen.append(x.clone())
        x = trained(x)
    return seen


def eager_law(outer: EagerDiLoCo) -> list[Tensor]:
    """As `law`: at once its own message of a rank, and those of the others one outer step later."""
    x = START.expand(NUM_RANKS, -1).clone()
    phi, m, e, late, seen = x.clone(), *(torch.zeros_like(x) for _ in range(3)), []
    for k in range(NUM_STEPS):
        if outer.starting_at(k):
            e = outer.error_decay * e + phi - x
            q = messages(outer, e, k // outer.sync_every - 1)
            gradient = q / NUM_RANKS + late
            m = outer.momentum * m + gradient
            phi = phi - outer.lr * (gradient + outer.momentum * m)
            x, late = phi.clone(), q.mean(0) - q / NUM_RANKS
        seen.append(x.clone())
        x = trained(x)
    return seen


@pytest.mark.parametrize(
    "outer",
    [
        DiLoCo(3, compressor=FOUR_BITS),
        DiLoCo(3, lr=0.5, momentum=0.6, compressor=ChunkTopK(5, 50, values=TwoBit(8)), error_decay=0.8),
        StreamingDiLoCo(4, fragments=2, delay=2, compressor=FOUR_BITS),
        EagerDiLoCo(3, compressor=FOUR_BITS, error_decay=0.9),
        DiLoCo(3, compressor=FOUR_BITS, collective="all_reduce"),
        StreamingDiLoCo(4, fragments=2, delay=2, compressor=FOUR_BITS, collective="all_reduce"),
    ],
    ids=["four-bits", "largest-entries", "late-fragments", "eager", "all-reduced", "all-reduced-late-fragments"],
)
def test_compressed_drifts_are_their_law(outer: DiLoCo) -> None:
    found, num_bytes = train(outer)
    expected = eager_law(outer) if isinstance(outer, EagerDiLoCo) else law(outer)
    for models, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(models, theirs, rtol=0, atol=1e-12)
    if not outer.delay:  # all ranks have the same anchor, to the bit
        assert torch.equal(found[3], found[3][:1].expand(NUM_RANKS, -1))
    assert outer.compressor is not None
    num_outer_steps = sum(len(outer.starting_at(k)) for k in range(NUM_STEPS))
    d, times = D // outer.num_fragments, 1
    if outer.collective == "all_reduce":
        d, times = -(-d // (64 * NUM_RANKS)) * 64, 2
    size = outer.compressor.num_bytes(d, torch.float64)
    assert num_bytes == times * num_outer_steps * (NUM_RANKS - 1) * -(-size // 8) * 8


def test_any_outer_optimizer_steps_on_the_received_messages() -> None:
    """Adam on the mean of the messages; here with what was left out, by hand."""
    found, _ = train(DiLoCo(3, optimizer=lambda p: torch.optim.Adam(p, lr=0.05), compressor=FOUR_BITS))
    phi, x = START.clone(), START.expand(NUM_RANKS, -1)
    adam, e = torch.optim.Adam([phi], lr=0.05), torch.zeros(NUM_RANKS, D, dtype=torch.float64)
    for k in range(NUM_STEPS):
        if k and k % 3 == 0:
            e += phi - x
            phi.grad = messages(DiLoCo(compressor=FOUR_BITS), e, k // 3 - 1).mean(0)
            adam.step()
            x = phi.expand(NUM_RANKS, -1)
        torch.testing.assert_close(found[k], x, rtol=0, atol=1e-12)
        x = trained(x)


@pytest.mark.parametrize("method", [DiLoCo, EagerDiLoCo, StreamingDiLoCo])
def test_a_compressor_without_loss_changes_nothing(method: Any) -> None:
    options: dict[str, Any] = {"fragments": 2, "delay": 1} if method is StreamingDiLoCo else {}
    for one, other in zip(
        train(method(3, compressor=TopK(1.0), **options))[0], train(method(3, **options))[0], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_without_momentum_it_is_sparse_loco() -> None:
    code = ChunkTopK(5, 50, values=TwoBit(8))
    found, num_bytes = train(DiLoCo(3, lr=0.8, momentum=0.0, compressor=code, error_decay=0.95))
    expected, expected_bytes = train(SparseLoCo(3, lr=0.8, compressor=code))
    assert all(map(torch.equal, found, expected))
    assert num_bytes == expected_bytes


@functools.cache
def goal() -> Tensor:
    """Where DiLoCo ends."""
    return law(DiLoCo(10, compressor=TopK(1.0)), 801)[-1][0]


@pytest.mark.parametrize(
    ("outer", "factor"),
    [
        (DiLoCo(10, compressor=FOUR_BITS), 0.5),
        (DiLoCo(10, compressor=QSGD(8, unbiased=True)), 0.1),
        (DiLoCo(10, compressor=QSGD(4)), None),
        (DiLoCo(10, compressor=ChunkTopK(8, 64)), None),
    ],
    ids=["four-bits", "eight-bits", "sends-a-quarter", "largest-entries"],
)
def test_momentum_wants_codes_that_send_most_of_a_drift_at_once(outer: DiLoCo, factor: float | None) -> None:
    """How far the anchor stays from where DiLoCo ends, in units of where it began; None: it diverges."""
    distances = [float((x[0] - goal()).norm()) for x in law(outer, 801)[::200]]
    if factor is None:
        assert distances[0] < distances[2] < distances[4]
    else:
        assert max(distances[2:]) < factor * distances[0]


def test_the_anchor_and_the_messages_of_a_narrow_model_are_wide() -> None:
    """What is left out is float32 beside bfloat16, and small drifts add up in it."""

    def body(group: dist.ProcessGroup) -> Tensor:
        model = mlp().to(torch.bfloat16)
        wrapper = GossipDataParallel(model, process_group=group, algorithm=DiLoCo(2, compressor=FOUR_BITS))
        for step in range(5):
            x = torch.ones(2, 3, dtype=torch.bfloat16)
            wrapper(x)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01 * (group.rank() + 1 + step))
        (error,) = memory_of(wrapper).vector("error").parts
        wrapper.close()
        assert error.dtype == torch.float32
        assert error.abs().max() > 0
        return flatten(model)

    run_ranks(2, body)

"""Moniqua: the last digits tell a difference that is small, and a checksum tells one that is not."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import Moniqua
from gossip_modules.extend import FlatVector
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from tests.harness.ranks import run_ranks
from tests.library.algorithms.contract import DYNAMIC, STATIC, bound, ring, vector_of
from tests.library.algorithms.test_compressed import rounds_of

LAYOUT = FlatLayout.of([(torch.float64, [TensorSpec((3, 4)), TensorSpec((5,))])])
MIXINGS = {"ring": STATIC["ring"], "star": STATIC["star"], "path": STATIC["path"], "bipartite": DYNAMIC["bipartite"]}
BITS = pytest.mark.parametrize("bits", [2, 8])


def differences(mine: Tensor, theirs: Tensor, gossiper: Moniqua, num_rounds: int = 1) -> Tensor:
    """What rank 0 takes the difference to rank 1 for, in so many rounds on the same values: [rounds, d]."""

    def body(group: dist.ProcessGroup) -> Tensor:
        own = bound(gossiper, ring(2), group)
        seen = []
        for t in range(num_rounds):
            s = FlatVector.over((theirs if group.rank() else mine).clone())
            own.start(s, t)
            own.difference(s)
            seen.append(2 * s.segments[0].clone())  # the weight is 1/2
        return torch.stack(seen)

    first, second = run_ranks(2, body)
    assert torch.equal(first, -second), "the ends do not take opposite differences"
    return first


@BITS
@pytest.mark.parametrize("graph", MIXINGS)
def test_rounds_are_those_of_the_paper(graph: str, bits: int) -> None:
    """With whole numbers n = floor(x / h + u) that are known in full: no modulus, and the same dither everywhere."""
    theta, step_size, seed = 8.0, 0.3, 5
    x, *rest = rounds_of(lambda: Moniqua(theta, bits=bits, step_size=step_size, seed=seed), MIXINGS[graph], 6, LAYOUT)
    h = theta / (2 ** (bits - 1) - 1)
    for t, got in enumerate(rest):
        dither = int(np.random.SeedSequence((seed, t)).generate_state(1, np.uint64)[0]) / 2**64
        n = torch.floor(x / h + dither)
        W = MIXINGS[graph].matrix(t)
        x = x + step_size * h * (W @ n - n)
        torch.testing.assert_close(got, x, rtol=0, atol=1e-12)


@BITS
def test_equal_entries_do_not_differ(bits: int) -> None:
    x = vector_of(0, LAYOUT).segments[0]
    assert not differences(x, x.clone(), Moniqua(0.7, bits=bits), 8).any()


@BITS
def test_differences_are_right_on_average_and_within_a_spacing(bits: int) -> None:
    gossiper = Moniqua(0.7, bits=bits, seed=2)
    x = 3 * vector_of(0, LAYOUT).segments[0]
    apart = 0.69 * (2 * torch.linspace(0, 1, x.numel(), dtype=torch.float64) - 1)
    seen = differences(x, x + apart, gossiper, 80)
    assert float((seen - apart).abs().max()) < gossiper.spacing
    # A value takes one of two neighbouring levels: its variance is at most spacing^2 / 4.
    assert float((seen.mean(0) - apart).abs().max()) < 4.5 * gossiper.spacing / 2 / 80**0.5
    assert float((seen - apart).abs().max()) > 0.1 * gossiper.spacing, "nothing was rounded"


def refused(mine: Tensor, theirs: Tensor, gossiper: Moniqua) -> None:
    """A round on these values is an error."""
    message = re.compile(
        rf"rank \d: round 0: got .* differs in an entry by more than theta={gossiper.theta}, or is not finite, "
        "expected less; pass a larger theta"
    )
    with pytest.raises(RuntimeError, match=message):
        differences(mine, theirs, gossiper)


@BITS
@pytest.mark.parametrize("factor", [1.5, 2.5, 1000.0, -1.5])
def test_a_difference_beyond_theta_is_an_error(factor: float, bits: int) -> None:
    """From where the modulus takes it for another number: at half the range, L h / 2, not much above theta."""
    gossiper = Moniqua(0.5, bits=bits)
    x = vector_of(0, LAYOUT).segments[0]
    apart = torch.zeros_like(x)
    apart[3] = factor * gossiper.num_levels / 2 * gossiper.spacing
    refused(x, x + apart, gossiper)


PATTERNS: dict[str, list[tuple[int, int, float]]] = {
    "opposite": [(1, 1, 1.0), (5, 2, -1.0)],
    "three in a line": [(0, 1, 1.0), (0, 2, -2.0), (0, 3, 1.0)],
    "rank one": [(1, 1, 1.0), (1, 5, -1.0), (5, 1, -1.0), (5, 5, 1.0)],
    "every entry": [(i, j, (-1.0) ** (i + j)) for i in range(8) for j in range(8)],
    "every entry alike": [(i, j, 1.0) for i in range(8) for j in range(8)],
}


@BITS
@pytest.mark.parametrize("pattern", PATTERNS)
def test_differences_that_could_cancel_are_errors(pattern: str, bits: int) -> None:
    """By whole multiples of the modulus, so that the codes are those of equal models."""
    gossiper = Moniqua(0.5, bits=bits)
    x = 0.01 * torch.ones(8, 8, dtype=torch.float64)
    y = x.clone()
    for i, j, multiple in PATTERNS[pattern]:
        y[i, j] += multiple * gossiper.num_levels * gossiper.spacing
    refused(x, y, gossiper)


@BITS
@pytest.mark.parametrize(("who", "dtype"), [([0], torch.float32), ([0, 1], torch.float64)], ids=str)
def test_entries_beyond_the_whole_numbers_are_named_at_both_ends(who: list[int], dtype: torch.dtype, bits: int) -> None:
    """Equal models too: it is the size that cannot be, not a difference. Just below it is exact."""
    gossiper = Moniqua(0.5, bits=bits)
    most = 2**31 * gossiper.spacing
    x = torch.linspace(-0.1, 0.1, 16, dtype=dtype)
    for size in (0.999, -0.999):
        large = x.clone()
        large[5] = size * most
        assert not differences(large, large.clone(), gossiper).any()
    sides = [x.clone(), x.clone()]
    for side in who:
        sides[side][5] = -1.001 * most

    def body(group: dist.ProcessGroup) -> None:
        own = bound(Moniqua(0.5, bits=bits), ring(2), group)
        me, other = group.rank(), 1 - group.rank()
        ranks = ", ".join(str(rank) for rank in (me, other) if rank in who)
        message = (
            rf"rank {me}: round 0: got a model of rank {ranks} with an entry of .* or more, .*; pass a larger theta"
        )
        with pytest.raises(ValueError, match=message):
            own.mix(FlatVector.over(sides[me]), 0)

    run_ranks(2, body)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("indices", [[4], [4, 5], list(range(16))], ids=str)
def test_a_model_that_is_not_finite_is_an_error(indices: list[int], value: float) -> None:
    """One entry, an even number of them, and all; beside a model of small entries."""
    x = torch.linspace(-0.1, 0.1, 16)
    y = x.clone()
    y[indices] = value
    refused(x, y, Moniqua(0.5))


def test_agreement_far_from_zero() -> None:
    """What counts is the difference, not the size."""
    x = torch.linspace(1e3, 1e5, 40, dtype=torch.float64)
    seen = differences(x, x + 0.1, Moniqua(0.5), 4)
    assert float((seen - 0.1).abs().max()) < 0.5 / 127


@BITS
def test_bytes_are_the_bits_a_checksum_and_a_header(bits: int) -> None:
    layout = FlatLayout.of([(torch.float32, [TensorSpec((40, 10)), TensorSpec((31,)), TensorSpec((3,), True)])])

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(Moniqua(20.0, bits=bits), STATIC["star"], group)
        gossiper.mix(vector_of(group.rank(), layout), 0)
        num_peers = 3 if group.rank() == 0 else 1
        codes = -(-431 * bits // 8)
        assert gossiper.transport.num_bytes_sent == num_peers * (8 + 16 + -(-(8 + codes) // 8) * 8)

    run_ranks(4, body)


def test_chunks_of_a_long_vector_fit_together() -> None:
    """Longer than what is coded at a time, in an odd number of entries."""
    x = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    y = x + 0.4 * (torch.rand(300_001, generator=torch.Generator().manual_seed(1)) - 0.5)
    gossiper = Moniqua(0.25)
    assert float((differences(x, y, gossiper)[0] - (y - x)).abs().max()) < 1.01 * gossiper.spacing


@pytest.mark.parametrize("theta", [0, -1.0, float("nan"), float("inf"), "1"])
def test_theta_must_be_positive(theta: float) -> None:
    with pytest.raises(ValueError, match=rf"Moniqua: got theta={theta!r}, expected a positive number: more than any"):
        Moniqua(theta)


@pytest.mark.parametrize("bits", [1, 3, 16])
def test_bits_must_fill_bytes(bits: int) -> None:
    with pytest.raises(ValueError, match=rf"Moniqua: got bits={bits}, expected 2, 4 or 8; one bit cannot"):
        Moniqua(1.0, bits=bits)

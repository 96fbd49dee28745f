"""CodedAverage: the mean is kept, all ranks have equal bits, and rows in one process compute the same."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules.compression import Absmax, Cast, Compressor, Identity
from gossip_modules.rounds.coded_average import CodedAverage, coded_average, sent_bytes
from gossip_modules.rounds.vector import Vector
from gossip_modules.transport.process_group import ProcessGroupTransport
from tests.harness.ranks import CPU, TIMEOUT, run_ranks

T = 3
"""The number of the round."""


class Averaged(NamedTuple):
    """A, the rest of each rank, and the bytes that it has sent."""

    x: Tensor
    rest: Tensor
    num_bytes: int


def vectors(n: int, d: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64).to(dtype)


def by_ranks(x: Tensor, code: Compressor) -> list[Averaged]:
    def body(group: dist.ProcessGroup) -> Averaged:
        transport = ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT)
        own, rest = Vector([x[group.rank()].clone()]), Vector([torch.full_like(x[0], torch.nan)])
        CodedAverage(transport).run(own, rest, code, T)
        num_bytes = transport.num_bytes_sent
        transport.close()
        return Averaged(own.parts[0], rest.parts[0], num_bytes)

    return run_ranks(len(x), body)


@pytest.mark.parametrize("code", [Absmax(4, 32), Absmax(8, 64), Cast(torch.bfloat16), Identity()], ids=str)
@pytest.mark.parametrize(("n", "d"), [(1, 10), (2, 1), (3, 200), (4, 256), (5, 1000)])
def test_ranks_average_as_rows_do_and_keep_the_mean(code: Compressor, n: int, d: int) -> None:
    x = vectors(n, d, torch.float64)
    found = by_ranks(x, code)
    rows, rest = x.clone(), torch.full_like(x, torch.nan)
    coded_average(rows, rest, code, T)
    for rank, own in enumerate(found):
        assert torch.equal(own.x, found[0].x), "all ranks decode the same messages"
        torch.testing.assert_close(own.x, rows[rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(own.rest, rest[rank], rtol=0, atol=1e-11)
        assert own.num_bytes == sent_bytes(d, x.dtype, n, code)
    mean = torch.stack([own.x + own.rest for own in found]).mean(0)
    torch.testing.assert_close(mean, x.mean(0), rtol=0, atol=1e-12)
    if code.is_exact:
        torch.testing.assert_close(found[0].x, x.mean(0), rtol=0, atol=1e-12)
    else:
        assert float((found[0].x - x.mean(0)).norm()) < 0.5 * float(x.mean(0).norm()) + 0.1


def test_ranks_have_equal_bits_in_float32() -> None:
    found = by_ranks(vectors(3, 777, torch.float32), Absmax(4, 32))
    assert all(torch.equal(own.x, found[0].x) for own in found)


def test_a_bad_number_of_one_rank_reaches_all_ranks_and_stays_in_its_block() -> None:
    x = vectors(3, 384, torch.float32)
    x[1, 200] = torch.nan
    for own in by_ranks(x, Absmax(8, 64)):
        assert own.x[192:256].isnan().all()
        assert own.x[:192].isfinite().all()
        assert own.x[256:].isfinite().all()

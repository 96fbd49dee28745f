"""CodedAverage: the mean is kept, all ranks have equal bits, and rows in one process compute the same."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules.compression import Absmax, Cast, Compressor, Identity
from gossip_modules.compression.sparsifier import RandomK
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from gossip_modules.rounds import Average
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


def test_the_second_code_draws_the_entries_of_the_first_one() -> None:
    x = vectors(4, 512, torch.float64)
    rest, average = torch.empty_like(x), x.clone()
    coded_average(average, rest, RandomK(0.25), T)
    sent = average[0] != 0
    assert int(sent.sum()) == 128
    torch.testing.assert_close(average[0][sent], x.mean(0)[sent], rtol=0, atol=1e-12)


def test_a_code_and_a_rest_come_together() -> None:
    x = Vector([torch.zeros(3)])
    with pytest.raises(ValueError, match="got Average with code=None and a rest, expected a Compressor and a vector"):
        Average(x, rest=x)
    with pytest.raises(ValueError, match=r"got Average with code=Absmax.* and no rest"):
        Average(x, code=Absmax(8))


def test_two_dtypes_and_buffers_of_both_kinds() -> None:
    """Running statistics become their mean exactly, and moments keep theirs up to the second code."""

    def body(group: dist.ProcessGroup) -> tuple[list[Tensor], Tensor, Tensor]:
        transport, rank = ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT), group.rank()
        parts = [vectors(3, 100, torch.float32)[rank], vectors(3, 70, torch.float64)[rank]]
        x, rest = Vector([part.clone() for part in parts]), Vector([torch.empty_like(part) for part in parts])
        specs = [
            TensorSpec((2,)),
            TensorSpec((4,), is_buffer=True, name="mean"),
            TensorSpec((90,), is_buffer=True, name="moment", takes_code=True),
        ]
        buffers = vectors(3, 94, torch.float64)[rank]
        layout = FlatLayout.of([(torch.float64, specs)])
        CodedAverage(transport).run(x, rest, Absmax(8, 16), T, buffers=[buffers], layout=layout)
        transport.close()
        sums = [a.double() + e.double() for a, e in zip(x.parts, rest.parts, strict=True)]
        return [*x.parts, *sums], buffers[:4], buffers[4:]

    found = run_ranks(3, body)
    for k, (d, dtype) in enumerate([(100, torch.float32), (70, torch.float64)]):
        assert all(torch.equal(parts[k], found[0][0][k]) for parts, _, _ in found)
        mean = torch.stack([parts[2 + k] for parts, _, _ in found]).mean(0)
        torch.testing.assert_close(mean, vectors(3, d, dtype).double().mean(0), rtol=0, atol=1e-6)
    before = vectors(3, 94, torch.float64)
    for _, statistics, moments in found:
        torch.testing.assert_close(statistics, before.mean(0)[:4], rtol=0, atol=1e-12)
        torch.testing.assert_close(moments, before.mean(0)[4:], rtol=0, atol=0.05)
    spread = torch.stack([moments for _, _, moments in found]).std(0)
    assert 0 < float(spread.max()) < 0.05 < float(before.std(0).max())

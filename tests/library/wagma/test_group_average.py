"""The group average: W(t) of the groups, over real Gloo groups and between scripted ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules.extend import FlatVector, ProcessGroupTransport
from gossip_modules.graph_manager.butterfly_groups import ButterflyGroups
from gossip_modules.wagma import group_average as module
from gossip_modules.wagma.group_average import GroupAverage
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group

NUM_ROUNDS = 4


def vector_of(rank: int, t: int) -> FlatVector:
    """Three dtypes, other values for each rank and round."""
    generator = torch.Generator().manual_seed(100 * rank + t)
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    return FlatVector.pack([torch.randn(61, generator=generator).to(dtype) for dtype in dtypes])


def group_average(group: dist.ProcessGroup, group_size: int) -> GroupAverage:
    """Of all ranks of a process group."""
    groups = ButterflyGroups(group.size(), group_size=group_size)
    return GroupAverage(groups, ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT))


@pytest.mark.parametrize("chunk_bytes", [module.CHUNK_BYTES, 256])
@pytest.mark.parametrize(("n", "size"), [(2, 2), (4, 4), (5, 4), (6, 2), (8, 4)])
def test_members_get_their_mean_with_equal_bits(
    n: int, size: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    num_chunks = len(module.chunks_of(vector_of(0, 0)))
    assert num_chunks == 1 if chunk_bytes != 256 else num_chunks > 3  # more than are under way at a time

    def body(group: dist.ProcessGroup) -> list[list[Tensor]]:
        average = group_average(group, size)
        vectors = [average.mix(vector_of(group.rank(), t), t) for t in range(NUM_ROUNDS)]
        assert all(vector.push_sum_weight.item() == 1 for vector in vectors)
        return [list(vector.segments) for vector in vectors]

    results = run_ranks(n, body)
    groups = ButterflyGroups(n, group_size=size)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 0.03}
    for t in range(NUM_ROUNDS):
        for rank in range(n):
            members = groups.members(rank, t)
            for k, x in enumerate(results[rank][t]):
                mean = torch.stack([vector_of(j, t).segments[k].double() for j in members]).mean(0)
                torch.testing.assert_close(x.double(), mean, atol=tolerance[x.dtype], rtol=0)
                assert all(torch.equal(results[j][t][k], x) for j in members)


def test_difference_is_the_correction_of_the_law() -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        average = group_average(group, 2)
        s = FlatVector.over(torch.tensor([float(group.rank())]))
        average.start(s, 1)
        return average.difference(s) * s.segments[0]

    # Round 1 joins 0 with 2 and 1 with 3.
    assert torch.cat(run_ranks(4, body)).tolist() == [1.0, 1.0, -1.0, -1.0]


def test_a_group_of_one_changes_nothing() -> None:
    average = group_average(solo_group(), 1)
    x = torch.tensor([1.0, 2.0])
    assert average.mix(x, 3).tolist() == [1.0, 2.0]
    assert average.transport.num_bytes_sent == 0


def test_a_round_sends_one_model_per_phase() -> None:
    def body(group: dist.ProcessGroup) -> int:
        average = group_average(group, 4)
        average.mix(torch.zeros(16), 0)
        return average.transport.num_bytes_sent

    assert run_ranks(4, body) == [2 * 64] * 4


def test_groups_of_another_world_are_refused() -> None:
    transport = ProcessGroupTransport(solo_group(), device=CPU, timeout=TIMEOUT)
    with pytest.raises(
        ValueError, match=r"got ButterflyGroups\(4, .*\) over a process group of 1 ranks, expected equal"
    ):
        GroupAverage(ButterflyGroups(4), transport)


def test_a_second_start_is_a_mistake() -> None:
    def body(group: dist.ProcessGroup) -> None:
        average = group_average(group, 2)
        s = FlatVector.over(torch.zeros(4))
        average.start(s, 0)
        with pytest.raises(AssertionError, match="a round is in flight"):
            average.start(s, 1)
        average.finish(s)

    run_ranks(2, body)

"""The asynchronous wrappers on a GPU: parameters go through pinned memory and a side stream."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel, GroupAverageDataParallel, PairwiseDataParallel
from gossip_modules.ad_psgd.shared_model import SharedModel
from gossip_modules.extend import FlatBuffer, FlatVector
from tests.harness.problems import mlp, sgd, train_step
from tests.harness.progress import local_of
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_ELEMENTS = 1 << 22  # 16 MB: a copy to the host takes longer than what is queued after it
NUM_ROUNDS = 20


def forwards(model: nn.Module, count: int) -> None:
    for _ in range(count):
        model(torch.ones(2, 3, device="cuda"))


def test_peers_see_the_published_model_while_training_writes_its_own() -> None:
    x = FlatVector.over(torch.zeros(NUM_ELEMENTS, device="cuda"))
    shared = SharedModel(x)
    for k in range(NUM_ROUNDS):
        x.segments[0].fill_(k)
        shared.publish(x, step=0)
        x.segments[0].fill_(-1)  # queued at once: the copy must not see it
        with shared.snapshots.reading() as y:
            assert y is not None
            assert y.vector.raw.is_pinned()
            assert y.vector.segments[0].unique().tolist() == [k]


def test_corrections_are_added_on_the_card_once() -> None:
    x = FlatVector.over(torch.zeros(NUM_ELEMENTS, device="cuda"))
    shared = SharedModel(x)
    correction = shared.snapshots.vector()
    for k in range(NUM_ROUNDS):
        correction.segments[0].fill_(2.0 * k)
        shared.deliver(correction, alpha=0.5, step=0)
        correction.segments[0].fill_(1e9)  # the shared keeps nothing of it
        assert shared.collect(x)
        assert not shared.collect(x)
        shared.publish(x, step=0)
    assert x.segments[0].unique().tolist() == [sum(range(NUM_ROUNDS))]


def test_ad_psgd_keeps_the_mean_and_agrees() -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        module = mlp(seed=group.rank()).cuda()
        before = flatten(module).cpu()
        wrapper = BilatGossipDataParallel(module, process_group=group, init_sync=False)
        assert local_of(wrapper).transport.device.type == "cpu"
        for _ in range(60):
            forwards(wrapper, 1)
            wrapper.settle()
        after = flatten(module).cpu()
        wrapper.close()
        return before, after

    results = run_ranks(2, body)
    mean = torch.stack([before for before, _ in results]).double().mean(0)
    for _, after in results:
        torch.testing.assert_close(after.double(), mean, rtol=0, atol=1e-6)


def test_ad_psgd_trains_with_stale_corrections() -> None:
    def body(group: dist.ProcessGroup) -> float:
        module = mlp().cuda()
        wrapper = BilatGossipDataParallel(module, process_group=group)
        optimizer = sgd(module)
        for step in range(NUM_ROUNDS):
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.average_()
        distance = wrapper.consensus_distance()
        wrapper.close()
        return distance

    assert run_ranks(2, body) == [0.0, 0.0]


@pytest.mark.parametrize("wait_avoiding", [True, False])
def test_wagma_is_exact_after_a_global_average(wait_avoiding: bool) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        module = mlp().cuda()
        wrapper = GroupAverageDataParallel(
            module, group_size=2, sync_period=4, wait_avoiding=wait_avoiding, process_group=group, comm_device="cpu"
        )
        optimizer = sgd(module)
        step = 0
        while wrapper.round < 12:  # the last round, 11, is a global average
            train_step(wrapper, optimizer, group.rank(), step)
            step += 1
        wrapper.settle()
        wrapper.average_()
        values = flatten(module).cpu()
        wrapper.close()
        return values

    first, *others = run_ranks(4, body)
    assert torch.isfinite(first).all()
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_pairwise_workers_on_the_card_approach_each_other() -> None:
    first = PairwiseDataParallel(mlp(seed=0).cuda(), name="a", peers={"a": "tcp://127.0.0.1:*"})
    second = PairwiseDataParallel(
        mlp(seed=1).cuda(),
        name="b",
        peers={"a": first.address, "b": "tcp://127.0.0.1:*"},
        init_from_peers=False,
    )
    before = float((flatten(first) - flatten(second)).norm())
    for _ in range(10):
        forwards(second, 1)
        second.flush()
    after = float((flatten(first) - flatten(second)).norm())
    assert second.comm_stats()["num_rounds"] > 0
    assert after < 0.01 * before
    first.close()
    second.close()


def test_a_model_that_left_the_card_is_refused() -> None:
    buffer = FlatBuffer(mlp().cuda())
    shared = SharedModel(buffer.vector)
    with pytest.raises(ValueError, match=r"got a model of .* on cpu .* expected the same.*before wrapping"):
        shared.publish(FlatVector(buffer.vector.layout, buffer.vector.raw.cpu()), step=0)

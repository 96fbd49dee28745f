"""What one saves of a trained model, and what a wrapper shows of itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel, GossipDataParallel, GossipWrapper, GroupAverageDataParallel
from gossip_modules.wrappers.composable import gossip
from tests.harness.problems import mlp
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import irregular

WRAPPERS: list[Callable[..., GossipWrapper]] = [
    GossipDataParallel,
    BilatGossipDataParallel,
    GroupAverageDataParallel,
]


@pytest.mark.parametrize("make", WRAPPERS)
@pytest.mark.parametrize("rank0_only", [True, False])
def test_the_averaged_state_dict_is_that_of_a_bare_model(make: Callable[..., GossipWrapper], rank0_only: bool) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, dict[str, Tensor]]:
        model = mlp(group.rank())
        wrapper = make(model, process_group=group, init_sync=False)
        start = flatten(model)
        state = wrapper.averaged_state_dict(rank0_only=rank0_only)
        assert torch.equal(flatten(model), start)  # training goes on from where it was
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        wrapper.settle()
        wrapper.close()
        return start, state

    starts, states = zip(*run_ranks(2, body), strict=True)
    mean = torch.stack(starts).mean(0)
    for state in states[: 1 if rank0_only else 2]:
        bare = mlp(7)
        assert list(state) == list(bare.state_dict())
        bare.load_state_dict(state)
        torch.testing.assert_close(flatten(bare), mean)
    if rank0_only:
        assert states[1] == {}


def test_the_estimate_is_averaged_and_integers_are_kept() -> None:
    """With weights that move the average is that of the numerators; BatchNorm's counter is this rank's own."""

    def body(group: dist.ProcessGroup) -> dict[str, Tensor]:
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        wrapper = GossipDataParallel(module, process_group=group, graph=irregular(), push_sum=True)
        for _ in range(3):
            wrapper(torch.ones(4, 2))
        state = wrapper.averaged_state_dict(rank0_only=False, cpu=False)
        with wrapper.averaged():
            for name, value in module.state_dict().items():
                assert torch.equal(state[name], value)
        assert int(state["1.num_batches_tracked"]) == 3
        wrapper.close()
        return state

    first, *others = run_ranks(3, body)
    for other in others:
        for name, value in first.items():
            torch.testing.assert_close(other[name], value)


def test_a_wrapper_shows_its_rank_and_options() -> None:
    wrapper = GossipDataParallel(nn.Linear(2, 1), process_group=solo_group(), graph="ring", schedule=5)
    lines = repr(wrapper).split("\n")
    assert lines[0] == "GossipDataParallel("
    assert "  rank 0 of 1" in lines
    assert "  graph=RingGraph(1, peers_per_itr=1)" in lines
    assert "  schedule=Schedule(gossip_every=5, average_every=0)" in lines
    wrapper.close()


def test_the_state_of_gossip_in_place_is_of_no_rank() -> None:
    """Any rank loads it, into a module with or without gossip."""

    def body(group: dist.ProcessGroup) -> None:
        model = gossip(mlp(group.rank()), process_group=group, init_sync=False)
        state = model.averaged_state_dict(rank0_only=False)
        with pytest.warns(UserWarning, match="no gossip state"):
            model.load_state_dict(state)
        model.close()

    run_ranks(1, body)

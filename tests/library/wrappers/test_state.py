"""State dicts, checkpoints, and parameters that change after wrapping."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    BilatGossipDataParallel,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    RingGraph,
    gossip,
)
from gossip_modules.graph_manager import NetworkXGraph
from gossip_modules.wrappers.base import GossipWrapper
from gossip_modules.wrappers.state import place_of
from tests.harness.cases import each_once
from tests.harness.problems import fill_, loss_of, mlp, net, sgd, train_step
from tests.harness.progress import local_of
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import MODES, irregular, wrap

# State.


def test_state_dict_loads_into_the_bare_model() -> None:
    wrapper = wrap(net(1), solo_group())
    state = wrapper.state_dict()
    assert all(key.startswith("module.") for key in state)
    bare = net(2)
    assert bare.load_state_dict({key.removeprefix("module."): x for key, x in state.items()}) is not None
    assert torch.equal(flatten(bare), flatten(wrapper.module))
    bare = net(3)
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    bare.load_state_dict(state)
    assert torch.equal(flatten(bare), flatten(wrapper.module))


@pytest.mark.parametrize("options", MODES[:2])
def test_after_a_step_the_module_itself_holds_the_estimate(options: dict[str, Any]) -> None:
    """Who saves or evaluates the inner module gets z, not the push-sum numerator."""

    def body(group: dist.ProcessGroup) -> float:
        wrapper = wrap(net(group.rank()), group, graph=irregular(), **options)
        optimizer = sgd(wrapper)
        for step in range(5):
            train_step(wrapper, optimizer, group.rank(), step)
            if not wrapper.overlap:  # else state_dict() applies a round first
                inner = {f"module.{key}": x.clone() for key, x in wrapper.module.state_dict().items()}
                outer = wrapper.state_dict()
                assert place_of(outer.pop("_extra_state")) == {"rank": group.rank(), "world_size": 3}
                assert list(inner) == list(outer)
                assert all(torch.equal(inner[key], outer[key]) for key in inner)
        weight = wrapper.get_extra_state()["weight"]
        inside = flatten(wrapper.module)
        local_of(wrapper).to_numerator()
        torch.testing.assert_close(flatten(wrapper.module), inside * weight)
        local_of(wrapper).to_estimate()
        wrapper.close()
        return float(weight)

    assert max(abs(weight - 1) for weight in run_ranks(3, body)) > 0.1


def test_state_dict_of_a_model_around_the_wrapper() -> None:
    outer = nn.Sequential(nn.Identity(), wrap(net(1), solo_group()))
    other = nn.Sequential(nn.Identity(), wrap(net(2), solo_group()))
    loss_of(outer, 0, 0)
    state = outer.state_dict()
    assert all(key.startswith("1.module.") for key in state)
    other.load_state_dict(state)
    assert other[1].get_extra_state() == outer[1].get_extra_state()
    assert torch.equal(flatten(other), flatten(outer))


def test_resuming_overlap_keeps_round_and_weight() -> None:
    def body(group: dist.ProcessGroup) -> None:
        options = {"graph": irregular(), "overlap": True, "max_staleness": 1}
        wrapper = wrap(net(group.rank()), group, **options)
        optimizer = sgd(wrapper)
        for step in range(5):
            train_step(wrapper, optimizer, group.rank(), step)
        resumed = wrap(net(99), group, **options)
        resumed.load_state_dict(wrapper.state_dict())
        assert str(resumed.get_extra_state()) == str(wrapper.get_extra_state())
        assert resumed.get_extra_state()["weight"] != 1
        assert torch.equal(flatten(resumed.module), flatten(wrapper.module))
        wrapper.close()
        resumed.close()

    run_ranks(3, body)


def test_loading_a_plain_checkpoint_warns_and_starts_anew() -> None:
    wrapper = wrap(net(1), solo_group())
    loss_of(wrapper, 0, 0)
    plain = OrderedDict((f"module.{key}", x) for key, x in net(2).state_dict().items())
    with pytest.warns(UserWarning, match="no gossip state: counting rounds from 0"):
        wrapper.load_state_dict(plain)
    assert wrapper.get_extra_state()["engine"]["t"] == 0
    assert torch.equal(flatten(wrapper.module), flatten(net(2)))


def test_load_state_dict_still_names_wrong_keys() -> None:
    wrapper = wrap(net(1), solo_group())
    state = wrapper.state_dict()
    state["module.third.weight"] = state.pop("module.second.weight")
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing key.*module.second.weight.*Unexpected key.*module.third.weight"
    ):
        wrapper.load_state_dict(state)


@pytest.mark.parametrize("make", [GossipDataParallel, BilatGossipDataParallel, GroupAverageDataParallel, gossip])
def test_the_error_of_pickling_names_the_state_to_save(make: Callable[..., Any]) -> None:
    model = make(mlp(), process_group=solo_group())
    for pickle_ in (pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
        with pytest.raises(
            TypeError, match=r"got a \w+ to pickle, which torch.save does too.* save state_dict\(\) to tra"
        ):
            pickle_(model)
    model.close()


@pytest.mark.parametrize("is_strict", [True, False])
def test_the_state_of_a_plain_module_is_refused_with_where_to_load_it(is_strict: bool) -> None:
    wrapper = wrap(net(1), solo_group())
    outer = nn.Sequential(nn.Identity(), wrapper)
    loss_of(wrapper, 0, 0)
    before = flatten(wrapper)
    message = (
        r"with the key '{0}first.weight', .* expected that of .* '{0}module.first.weight'; .*settle\(\).*\.module\."
        r"load_state_dict\(\.\.\.\) and wrapper\.set_extra_state\(None\), so that nothing of another model is kept"
    )
    with pytest.raises(RuntimeError, match=message.format("")):
        wrapper.load_state_dict(net(2).state_dict(), strict=is_strict)
    with pytest.raises(RuntimeError, match=message.format(r"1\.")):
        outer.load_state_dict(nn.Sequential(nn.Identity(), net(2)).state_dict(), strict=is_strict)
    assert torch.equal(flatten(wrapper), before)
    assert wrapper.get_extra_state()["engine"]["t"] == 1, "nothing was changed"
    wrapper.settle()
    wrapper.module.load_state_dict(net(2).state_dict())  # the remedy
    wrapper.set_extra_state(None)
    assert wrapper.get_extra_state()["engine"]["t"] == 0
    assert torch.equal(flatten(wrapper), flatten(net(2)))


def test_the_state_of_a_wrapper_is_refused_where_names_are_bare() -> None:
    model = gossip(net(1), process_group=solo_group())
    loss_of(model, 0, 0)
    state = wrap(net(2), solo_group()).state_dict()
    with pytest.raises(RuntimeError, match=r"with the key 'module.first.weight', .*consume_prefix_in_state_dict_if"):
        model.load_state_dict(state)
    assert model.comm_stats()["num_rounds"] == 1
    assert model.state_dict()._metadata[""]["gossip_state"]["engine"]["t"] == 1, "nothing was changed"
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")  # the remedy
    with pytest.warns(UserWarning, match="no gossip state"):
        model.load_state_dict(state)
    assert torch.equal(flatten(model), flatten(net(2)))
    model.close()


@pytest.mark.parametrize("options", MODES)
def test_load_state_dict_with_assign_keeps_gossiping(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(net(group.rank()), group, **options)
        loss_of(wrapper, group.rank(), 0)
        state = OrderedDict((key, x.clone()) for key, x in wrapper.state_dict().items())
        state._metadata = wrapper.state_dict()._metadata  # type: ignore[attr-defined]
        wrapper.load_state_dict(state, assign=True)
        for step in range(2):
            loss_of(wrapper, group.rank(), step)
        wrapper.close()
        return torch.cat([p.detach().flatten() for p in wrapper.parameters()])

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first, second)  # two ranks agree after one round of any W = J


@pytest.mark.parametrize(("graph", "options"), each_once([RingGraph(2), RingGraph(3), irregular()], MODES), ids=str)
def test_its_own_state_assigned_makes_parameters_that_are_noticed(
    options: dict[str, Any], graph: NetworkXGraph
) -> None:
    """New Parameter objects over the same memory: they gossip, and autograd and the optimizer hooks know them."""

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()), group, graph=graph, **options)
        loss_of(wrapper, group.rank(), 0)
        before = list(wrapper.parameters())
        wrapper.load_state_dict(wrapper.state_dict(), assign=True)
        parameters = list(wrapper.parameters())
        assert not any(p is q for p, q in zip(before, parameters, strict=True))
        optimizer = sgd(wrapper)
        for step in range(2):
            train_step(wrapper, optimizer, group.rank(), step)
        assert all(p is q for p, q in zip(parameters, wrapper.parameters(), strict=True))
        assert {id(p) for p in parameters} == {id(p) for p in local_of(wrapper).buffer.parameters}
        assert local_of(wrapper).loop.concerns(optimizer)
        early = loss_of(wrapper, group.rank(), 2)
        for _ in range(wrapper.max_staleness + 1):
            wrapper.gossip_step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()
        for _ in range(60):
            wrapper.gossip_step()
        wrapper.close()
        return flatten(wrapper.module)

    results = run_ranks(graph.world_size, body)
    for x in results:
        torch.testing.assert_close(x, results[0], rtol=0, atol=1e-5)


def notice(wrapper: GossipWrapper, how: str) -> None:
    """Whatever makes a wrapper look at requires_grad again."""
    if how == "train":
        wrapper.train()
    elif how == "eval":
        wrapper.eval().train()
    elif how == "flush":
        wrapper.flush()
    elif how == "double":
        wrapper.double()
    else:
        assert how == "inner double"
        wrapper.module.double()


HOW_NOTICED = ["train", "eval", "flush", "double", "inner double"]


@pytest.mark.parametrize(("how", "options"), each_once(HOW_NOTICED, MODES))
def test_parameters_unfrozen_after_wrapping_gossip(options: dict[str, Any], how: str) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = mlp(group.rank())
        first = model.get_submodule("0").requires_grad_(False)
        wrapper = wrap(model, group, **options)
        loss_of(wrapper, group.rank(), 0)  # with overlap: a round of the second layer alone is in flight
        assert torch.equal(first.get_parameter("weight"), mlp(group.rank()).get_parameter("0.weight"))
        first.requires_grad_(True)
        notice(wrapper, how)
        for step in range(4):
            loss_of(wrapper, group.rank(), step)
        wrapper.average_()
        wrapper.close()
        return flatten(first), flatten(model)

    (first, whole), (other_first, other_whole) = run_ranks(2, body)
    mean = (flatten(mlp(0)) + flatten(mlp(1))) / 2
    torch.testing.assert_close(first, other_first)
    torch.testing.assert_close(whole, other_whole)
    torch.testing.assert_close(whole, mean.to(whole))


@pytest.mark.parametrize(("how", "options"), each_once(HOW_NOTICED, MODES))
def test_parameters_frozen_after_wrapping_are_averaged_once_and_stay(options: dict[str, Any], how: str) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        model = mlp(group.rank())
        first, last = model.get_submodule("0"), model.get_submodule("2")
        wrapper = wrap(model, group, **options)
        loss_of(wrapper, group.rank(), 0)  # with overlap: a round of both layers is in flight
        first.requires_grad_(False)
        notice(wrapper, how)
        results = []
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(group.rank()))
            for step in range(8):
                loss_of(wrapper, group.rank(), step)
            results.append(nn.utils.parameters_to_vector(first.parameters()).detach().clone())
        wrapper.average_()
        wrapper.close()
        return results[0], results[1], flatten(last)

    with pytest.warns(UserWarning, match=r"got frozen parameters .* that differ between ranks"):
        results = run_ranks(2, body)
    for rank, (averaged, kept, last) in enumerate(results):
        torch.testing.assert_close(averaged, torch.full_like(averaged, 0.5), rtol=0, atol=0)
        assert torch.equal(kept, torch.full_like(kept, float(rank)))
        torch.testing.assert_close(last, torch.full_like(last, 0.5))


@pytest.mark.parametrize(("inner", "options"), each_once([False, True], MODES))
def test_a_cast_keeps_gossiping(options: dict[str, Any], inner: bool) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()), group, **options)
        loss_of(wrapper, group.rank(), 0)
        (wrapper.module if inner else wrapper).double()
        for step in range(4):
            loss_of(wrapper, group.rank(), step)
        wrapper.close()
        assert {p.dtype for p in wrapper.parameters()} == {torch.float64}
        return flatten(wrapper.module)

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first, second)


class Tokens(nn.Module):
    """Only what stands in the middle has a memory format, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.patches = nn.Conv2d(3, 4, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.patches(x).mean((2, 3)) + self.token[:, 0])


@pytest.mark.parametrize(("change", "options"), each_once(["channels_last", "assign"], MODES))
def test_a_change_in_the_middle_of_the_module_keeps_gossiping(options: dict[str, Any], change: str) -> None:
    """The first and the last tensor stay where they are."""

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(fill_(Tokens(), group.rank()), group, **options)
        x = torch.ones(1, 3, 4, 4)
        wrapper(x)
        if change == "assign":
            state = wrapper.state_dict()
            for key in set(state) - {"module.patches.weight"}:
                del state[key]
            state["module.patches.weight"] = state["module.patches.weight"].clone()
            wrapper.load_state_dict(state, strict=False, assign=True)
        else:
            wrapper.to(memory_format=torch.channels_last)
        for _ in range(4):
            wrapper(x)
        wrapper.close()
        return flatten(wrapper.module)

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first, second)


# What one saves of a trained model.

WRAPPERS: list[Callable[..., GossipWrapper]] = [
    GossipDataParallel,
    BilatGossipDataParallel,
    GroupAverageDataParallel,
]


@pytest.mark.parametrize(("make", "rank0_only"), each_once(WRAPPERS, [True, False]))
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


def test_the_estimate_is_averaged_and_integers_are_those_of_rank_0() -> None:
    """With weights that move the average is that of the numerators; BatchNorm's counter is that of rank 0."""

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
    assert "  schedule=Schedule(gossip_every=5, average_every=0, average_until=0)" in lines
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


def test_a_refused_state_changes_no_part() -> None:
    """The state of the algorithm is the last one that is looked at; the position in the loop comes first."""
    wrapper = GossipDataParallel(mlp(), process_group=solo_group())
    other = GossipDataParallel(mlp(), process_group=solo_group(), algorithm=DiLoCo(2))
    optimizer = sgd(other)
    train_step(other, optimizer, 0, 0)
    before = wrapper.get_extra_state()
    with pytest.raises(ValueError, match=r"got state .* of another algorithm"):
        wrapper.set_extra_state(other.get_extra_state())
    assert repr(wrapper.get_extra_state()) == repr(before)
    wrapper.close()
    other.close()

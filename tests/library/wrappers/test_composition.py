"""What a gossip wrapper is not combined with, what one gossiper belongs to, and whose state is whose."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossip_modules import (
    AllReduceDataParallel,
    BilatGossipDataParallel,
    Choco,
    GossipDataParallel,
    GroupAverageDataParallel,
    PairwiseDataParallel,
    RingGraph,
    SignNorm,
    gossip,
)
from gossip_modules.dpwa import PairwiseAverager, PairwiseConfig
from gossip_modules.extend import PushPull, PushSum
from gossip_modules.mixing_manager import MetropolisHastingsMixing, UniformMixing
from gossip_modules.rounds.mixer import Mixer
from gossip_modules.rounds.rounds import Rounds
from tests.harness.cases import each_once
from tests.harness.problems import loss_of, mlp, net, sgd, train_step
from tests.harness.processes import run_processes
from tests.harness.progress import local_of, round_of
from tests.harness.ranks import run_ranks, solo_group

WRAPPERS = [GossipDataParallel, BilatGossipDataParallel, GroupAverageDataParallel]

PEERS = {"w": "tcp://127.0.0.1:*"}

MODULES: dict[str, Callable[[nn.Module], Any]] = {
    "gossip": lambda module: gossip(module, process_group=solo_group()),
    "GossipDataParallel": lambda module: GossipDataParallel(module, process_group=solo_group()),
    "BilatGossipDataParallel": lambda module: BilatGossipDataParallel(module, process_group=solo_group()),
    "GroupAverageDataParallel": lambda module: GroupAverageDataParallel(module, process_group=solo_group()),
    "PairwiseDataParallel": lambda module: PairwiseDataParallel(module, name="w", peers=PEERS),
}
KEEPERS: dict[str, Callable[[nn.Module], Any]] = {
    **MODULES,
    "PairwiseAverager": lambda module: PairwiseAverager(module, PairwiseConfig("w", PEERS)),
}


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> GossipDataParallel:
    return GossipDataParallel(module, process_group=group, **{"init_sync": False, **options})


# In a wrapper.


@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_wrapper_in_a_wrapper_is_refused(outer: Callable[..., nn.Module], depth: int) -> None:
    inner: nn.Module = wrap(mlp(), solo_group())
    if depth:
        inner = nn.Sequential(nn.Identity(), inner)
    what = "in which '1' is a GossipDataParallel" if depth else "that is a GossipDataParallel"
    with pytest.raises(
        ValueError, match=rf"got a module {what}, to wrap in {outer.__name__}, expected .*remove the other"
    ):
        outer(inner, process_group=solo_group())


def in_one_process(body: Callable[[], None]) -> None:
    """With a default process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        body()
    finally:
        dist.destroy_process_group()


def test_distributed_data_parallel_in_or_around_is_refused() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=r"a module that is a DistributedDataParallel.*wrap the plain module once"):
            GossipDataParallel(DistributedDataParallel(mlp()))
        around = DistributedDataParallel(GossipDataParallel(mlp()))
        with pytest.raises(
            RuntimeError,
            match=r"got a GossipDataParallel inside a DistributedDataParallel.*gossip_modules.integrations",
        ):
            loss_of(around, 0, 0)

    in_one_process(body)


def test_all_reduce_keeps_its_module_and_its_names_as_the_others() -> None:
    def body() -> None:
        with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
            AllReduceDataParallel(nn.ReLU())
        module = mlp()
        wrapper = AllReduceDataParallel(module)
        message = r"in a AllReduceDataParallel already, to wrap in \w+, expected a module that no other"
        for make in (AllReduceDataParallel, GossipDataParallel):
            with pytest.raises(ValueError, match=message):
                make(module)
        with pytest.raises(RuntimeError, match=r"'0.weight', to load into a AllReduceDataParallel, .*module\.load_s"):
            wrapper.load_state_dict(module.state_dict())
        wrapper.close()
        gossiping = GossipDataParallel(module)
        with pytest.raises(ValueError, match="in a GossipDataParallel already, to wrap in AllReduceDataParallel"):
            AllReduceDataParallel(module)
        gossiping.close()

    in_one_process(body)


def test_sharding_is_refused_with_the_alternatives() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

    def body() -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        sharded = mlp()
        fully_shard(sharded, mesh=mesh)
        with pytest.raises(ValueError, match=r"sharded over processes \(fully_shard.*device_mesh=mesh\['replicate'\]"):
            GossipDataParallel(sharded)
        layer = nn.Sequential(nn.Linear(2, 2))
        layer.weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.ones(2), mesh))
        with pytest.raises(ValueError, match=r"a plan of DTensors\) and no device_mesh"):
            GossipDataParallel(layer)
        wrapper = GossipDataParallel(mlp())
        fully_shard(wrapper, mesh=mesh)
        with pytest.raises(RuntimeError, match=r"fully_shard or .* was applied after it was made"):
            wrapper(torch.ones(1, 3))
        for is_original in (False, True):
            outer = FullyShardedDataParallel(
                GossipDataParallel(mlp()),
                device_id=torch.device("cpu"),
                sharding_strategy=ShardingStrategy.NO_SHARD,
                use_orig_params=is_original,
            )
            with pytest.raises(RuntimeError, match=r"FullyShardedDataParallel"):
                outer(torch.ones(1, 3))

    in_one_process(body)


def zero_redundancy(rank: int) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapper = GossipDataParallel(mlp(rank))
    optimizer = ZeroRedundancyOptimizer(wrapper.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(
        RuntimeError, match=r"got a ZeroRedundancyOptimizer over the parameters.*torch\.optim"
    ) as caught:
        train_step(wrapper, optimizer, rank, 0)
    wrapper.close()
    return str(caught.value)


@pytest.mark.e2e
def test_a_sharded_optimizer_is_refused() -> None:
    assert all(outcome.result for outcome in run_processes(2, zero_redundancy))


def test_a_sharded_optimizer_of_another_model_is_nothing_to_us() -> None:
    def body() -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(mlp().parameters(), torch.optim.SGD, lr=0.1)
        wrapper = GossipDataParallel(mlp())
        train_step(wrapper, sgd(wrapper), 0, 0)
        wrapper.close()
        del optimizer

    in_one_process(body)


# One module, one wrapper.


@pytest.mark.parametrize(("first", "second"), each_once(list(KEEPERS), [*KEEPERS][1:] + [*KEEPERS][:1]))
def test_a_module_is_in_one_wrapper_until_that_is_closed(first: str, second: str) -> None:
    module = mlp()
    plain = type(module)
    wrapper = KEEPERS[first](module)
    for again in (module, nn.ModuleList([nn.Linear(1, 1), module])):
        with pytest.raises(ValueError, match=rf"in a {first} already, .*close|gossip\(\) made.*close") as caught:
            KEEPERS[second](again)
        assert second in str(caught.value)
    wrapper.close()
    other = KEEPERS[second](module)
    if second != "gossip":
        assert type(module) is plain
    if second != "PairwiseAverager":
        loss_of(other, 0, 0).backward()  # the one that is closed is not asked, so it does not warn
    other.close()


def test_a_part_of_a_module_in_a_wrapper_is_refused_and_a_frozen_one_is_not() -> None:
    body, head = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapper = KEEPERS["GossipDataParallel"](nn.Sequential(body, head))
    with pytest.raises(ValueError, match=r"whose parameter 'weight' is in a GossipDataParallel already"):
        KEEPERS["GossipDataParallel"](body)
    wrapper.close()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    two = [KEEPERS["GossipDataParallel"](nn.Sequential(frozen, nn.Linear(2, 2))) for _ in range(2)]
    for each in two:
        each.close()


def test_a_wrapper_that_is_lost_or_was_never_made_keeps_nothing() -> None:
    module = mlp()
    lost = GossipDataParallel(module, process_group=solo_group())
    del lost
    with pytest.raises(ValueError, match="did you mean 'ring'"):
        GossipDataParallel(module, process_group=solo_group(), graph="rings")
    GossipDataParallel(module, process_group=solo_group()).close()


def test_the_module_of_a_copy_is_in_that_copy() -> None:
    wrapper = GossipDataParallel(mlp(), process_group=solo_group())
    twin = copy.deepcopy(wrapper)
    wrapper.close()
    with pytest.raises(ValueError, match="is in a GossipDataParallel already"):
        GossipDataParallel(twin.module, process_group=solo_group())
    twin.close()
    GossipDataParallel(twin.module, process_group=solo_group()).close()


# After close().


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_training_after_close_warns_once(make: Callable[[nn.Module], Any]) -> None:
    model = make(mlp())
    optimizer = sgd(model)
    train_step(model, optimizer, 0, 0)
    model.close()
    with torch.no_grad():
        loss_of(model, 0, 1)
    loss_of(model.eval(), 0, 1)
    model.train()
    with pytest.warns(UserWarning, match=r"got a training forward after close\(\) of a .*trains alone.*wrap the modul"):
        train_step(model, optimizer, 0, 1)
    train_step(model, optimizer, 0, 2)


@pytest.mark.parametrize("wrap", [GossipDataParallel, gossip])
def test_the_warning_names_the_line_of_the_forward(wrap: Callable[..., Any]) -> None:
    model = wrap(mlp(), process_group=solo_group())
    model.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(1, 3))
    assert [warning.filename for warning in caught] == [__file__]


def test_an_unreachable_wrapper_keeps_no_module() -> None:
    """gossip() and its module refer to each other, so they wait for the garbage collector."""
    part = nn.Linear(3, 2)
    gc.disable()
    try:
        gossip(nn.Sequential(part, nn.Linear(2, 1)), process_group=solo_group())
        wrapper = GossipDataParallel(nn.Sequential(part, nn.Linear(2, 1)), process_group=solo_group())
    finally:
        gc.enable()
    with pytest.raises(ValueError, match=r"parameter '0.weight' is in a GossipDataParallel already"):
        GossipDataParallel(nn.Sequential(part), process_group=solo_group())
    wrapper.close()


def test_a_module_keeps_its_closed_gossip_where_it_cannot_be_wrapped_again() -> None:
    module = gossip(nn.Linear(3, 2), process_group=solo_group())
    module.close()
    with pytest.raises(ValueError, match="schedule"):
        GossipDataParallel(module, schedule=-3, process_group=solo_group())
    module.close()
    again = gossip(module, process_group=solo_group())
    assert len(module._forward_pre_hooks) == 1
    again.close()


def test_a_copy_without_peers_warns_where_it_trains() -> None:
    wrapper = BilatGossipDataParallel(mlp(), process_group=solo_group())
    twin = copy.deepcopy(wrapper)
    wrapper.close()
    with pytest.warns(UserWarning, match=r"a training forward in a copy of a BilatGossipDataParallel, "):
        loss_of(twin, 0, 0)


# One gossiper, one wrapper.


def test_a_gossiper_belongs_to_one_wrapper() -> None:
    def body(group: dist.ProcessGroup) -> None:
        gossiper = PushSum()
        first = wrap(mlp(group.rank()), group, algorithm=gossiper)
        with pytest.raises(ValueError, match=r"which belongs to another wrapper.*make another"):
            wrap(mlp(group.rank()), group, algorithm=gossiper)
        twin = copy.deepcopy(first)
        for wrapper in (first, twin):
            loss_of(wrapper, 0, 0)
            wrapper.close()

    run_ranks(2, body)


def test_an_algorithm_serves_any_number_of_wrappers() -> None:
    """It has settings only, and each wrapper a memory of its own."""
    choco = Choco(SignNorm(), step_size=0.3)

    def body(group: dist.ProcessGroup) -> None:
        wrappers = [wrap(mlp(group.rank()), group, algorithm=choco) for _ in range(2)]
        for step in range(3):
            for wrapper in wrappers:
                loss_of(wrapper, group.rank(), step)
        first, second = (wrapper.module for wrapper in wrappers)
        assert all(torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters(), strict=True))
        for wrapper in wrappers:
            wrapper.close()

    run_ranks(2, body)


def test_a_gossiper_that_did_not_suit_is_still_free() -> None:
    gossiper: Mixer = Rounds(Choco(SignNorm(), step_size=0.3), PushPull())
    transport = local_of(wrap(mlp(), solo_group())).transport
    with pytest.raises(ValueError, match="expected symmetric weights"):
        gossiper.bind(UniformMixing(RingGraph(3)), transport)
    gossiper.bind(MetropolisHastingsMixing(RingGraph(1)), transport)


# Whose state it is.


def test_the_state_of_another_rank_or_world_is_refused() -> None:
    states: dict[int, Any] = {}

    def save(group: dist.ProcessGroup) -> None:
        wrapper = wrap(net(group.rank()), group)
        loss_of(wrapper, 0, 0)
        states[group.rank()] = wrapper.state_dict()
        wrapper.close()

    def load(group: dist.ProcessGroup, which: int, message: str) -> None:
        wrapper = wrap(net(9), group)
        before = {key: x.clone() for key, x in wrapper.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            wrapper.load_state_dict(states[which])
        assert all(torch.equal(x, before[key]) for key, x in wrapper.state_dict().items()), "nothing was changed"
        wrapper.close()

    run_ranks(3, save)
    run_ranks(3, lambda group: load(group, (group.rank() + 1) % 3, r"of rank \d of 3, expected that of rank \d of 3"))
    run_ranks(2, lambda group: load(group, group.rank(), r"of rank \d of 3, expected that of rank \d of 2.*averaged"))


def test_a_state_from_before_ranks_were_named_still_loads() -> None:
    wrapper = wrap(net(), solo_group())
    loss_of(wrapper, 0, 0)
    state = wrapper.state_dict()
    for key in ("rank", "world_size"):
        del state._metadata[""]["gossip_state"][key]
    other = wrap(net(1), solo_group())
    other.load_state_dict(state)
    assert round_of(other) == 1

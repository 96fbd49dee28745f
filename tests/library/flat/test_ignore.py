"""Parameters and buffers that each rank keeps for itself, in every wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossip_modules import (
    D2,
    AllReduceDataParallel,
    BilatGossipDataParallel,
    Choco,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    Membership,
    QGDSGDm,
    TopK,
    gossip,
)
from tests.harness.cases import each_once
from tests.harness.problems import fill_
from tests.harness.processes import run_processes
from tests.harness.progress import local_of
from tests.harness.ranks import run_ranks
from tests.library.dpwa.workers import introduce, wrap

Make = Callable[..., Any]


def choco(module: nn.Module, **options: Any) -> GossipDataParallel:
    return GossipDataParallel(module, algorithm=Choco(TopK(0.5), step_size=0.3), **options)


WRAPPERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGP": (GossipDataParallel, {}),
    "overlapped": (GossipDataParallel, {"overlap": True}),
    "DiLoCo": (GossipDataParallel, {"algorithm": DiLoCo(sync_every=2)}),
    "CHOCO": (choco, {}),
    "D2": (GossipDataParallel, {"algorithm": D2()}),
    "QG-DSGDm": (GossipDataParallel, {"algorithm": QGDSGDm()}),
    "in place": (gossip, {}),
    "AD-PSGD": (BilatGossipDataParallel, {}),
    "WAGMA": (GroupAverageDataParallel, {"wait_avoiding": False}),
    "wait-avoiding WAGMA": (GroupAverageDataParallel, {}),
    "AR": (AllReduceDataParallel, {}),
}


def set_list(module: Any, names: list[str]) -> dict[str, Any]:
    module._ddp_params_and_buffers_to_ignore = names
    return {}


def call_function(module: nn.Module, names: list[str]) -> dict[str, Any]:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    return {}


LISTS: dict[str, Callable[[nn.Module, list[str]], dict[str, Any]]] = {
    "ignore": lambda module, names: {"ignore": names},
    "DDP's list": set_list,
    "DDP's function": call_function,
}


class Personal(nn.Module):
    """A shared layer, and a layer, a scale and statistics of each rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = fill_(nn.Linear(2, 2), 0)
        self.own = fill_(nn.Linear(2, 2), 10 + rank)
        self.scale = nn.Parameter(torch.full((2,), float(1 + rank)))
        self.frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
        self.norm = nn.BatchNorm1d(2, affine=False)
        nn.init.constant_(self.norm.get_buffer("running_mean"), float(rank))
        self.register_buffer("table", torch.full((2,), float(rank)))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.norm(self.own(self.shared(x)))


NAMES = ["own.weight", "own.bias", "scale", "frozen", "norm.running_mean", "norm.running_var", "table"]


@pytest.mark.parametrize(("name", "how"), each_once(list(WRAPPERS), list(LISTS)))
def test_ignored_tensors_are_as_without_gossip(name: str, how: str) -> None:
    """At the start, in rounds, in averages and in the averaged state dict; what it learns it learns alone."""
    make, options = WRAPPERS[name]
    steps = 4

    def alone(rank: int, shared: list[dict[str, Tensor]]) -> Personal:
        """The rank's model, trained with the shared layer that it had in each step."""
        module = Personal(rank)
        own = [x for name, x in module.named_parameters() if name in NAMES and x.requires_grad]
        optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
        for step in range(steps):
            module.shared.load_state_dict(shared[step])
            optimizer.zero_grad()
            module(batch(rank, step)).square().sum().backward()
            optimizer.step()
        return module

    def batch(rank: int, step: int) -> Tensor:
        return torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * rank + step))

    def body(group: dist.ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rank, module = group.rank(), Personal(group.rank())
        wrapper = make(module, process_group=group, **LISTS[how](module, NAMES), **options)
        assert all(torch.equal(module.state_dict()[name], Personal(rank).state_dict()[name]) for name in NAMES)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
        seen: list[dict[str, Tensor]] = []

        def note(*_: Any) -> None:
            seen.append({name: x.clone() for name, x in module.shared.state_dict().items()})

        module.shared.register_forward_pre_hook(note)
        for step in range(steps):
            optimizer.zero_grad()
            wrapper(batch(rank, step)).square().sum().backward()
            optimizer.step()
        wrapper.settle()
        expected = alone(rank, seen[:steps]).state_dict()
        for name in NAMES:
            torch.testing.assert_close(module.state_dict()[name], expected[name])
        with wrapper.averaged():
            inside = {name: x.clone() for name, x in module.state_dict().items()}
        for name in NAMES:
            torch.testing.assert_close(inside[name], expected[name])
        state = wrapper.averaged_state_dict(rank0_only=False)
        wrapper.average_()
        after = {name: x.clone() for name, x in module.state_dict().items()}
        wrapper.close()
        for name in NAMES:
            torch.testing.assert_close(state[name], expected[name])
            torch.testing.assert_close(after[name], expected[name])
        return inside, after

    (first, _), (second, after) = run_ranks(2, body)
    for name in ("shared.weight", "shared.bias"):
        torch.testing.assert_close(first[name], second[name])
        torch.testing.assert_close(after[name], second[name])
    assert not torch.equal(first["own.weight"], second["own.weight"])


def test_the_state_of_an_optimizer_for_ignored_parameters_stays_local() -> None:
    def body(group: dist.ProcessGroup) -> list[float]:
        module = nn.Linear(1, 1)
        wrapper = GossipDataParallel(module, process_group=group, ignore=["bias"])
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
        (wrapper(torch.ones(1, 1)) * group.rank()).sum().backward()
        optimizer.step()
        wrapper.average_optimizer_state(optimizer)
        wrapper.close()
        return [optimizer.state[x]["momentum_buffer"].item() for x in (module.weight, module.bias)]

    assert run_ranks(2, body) == [[0.5, 0.0], [0.5, 1.0]]


def test_freezing_an_ignored_parameter_on_one_rank_changes_no_vector() -> None:
    def body(group: dist.ProcessGroup) -> bool:
        module = Personal(group.rank())
        wrapper = GossipDataParallel(module, process_group=group, ignore=NAMES, algorithm=DiLoCo(sync_every=2))
        vector = local_of(wrapper).buffer.vector
        for step in range(6):
            if step == 3 and group.rank() == 1:
                module.own.requires_grad_(False)
            wrapper(torch.ones(2, 2)).sum().backward()
        wrapper.close()
        return local_of(wrapper).buffer.vector is vector

    assert run_ranks(2, body) == [True, True]


def test_the_lists_of_ranks_differ() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"ranks do not agree with rank 0: rank 1: ignore: got \('scale',\)"):
            GossipDataParallel(Personal(0), process_group=group, ignore=["scale"] if group.rank() else ["frozen"])

    run_ranks(2, body)


@pytest.mark.parametrize("make", [GossipDataParallel, BilatGossipDataParallel, GroupAverageDataParallel, gossip])
def test_an_entry_that_matches_nothing_is_refused_before_ranks_meet(make: Make) -> None:
    with pytest.raises(ValueError, match=r"got ignore with 'scales', which matches no.* did you mean 'scale'"):
        make(Personal(0), ignore=["scales"])


def test_all_reduce_refuses_an_entry_that_matches_nothing() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="got ignore with 'scales', which matches no"):
            AllReduceDataParallel(Personal(0), process_group=group, ignore=["scales"])

    run_ranks(1, body)


def test_dpwa_merges_all_but_ignored_tensors() -> None:
    with contextlib.ExitStack() as workers:
        modules = [Personal(rank) for rank in range(2)]
        nn.init.constant_(modules[1].get_parameter("shared.weight"), 5.0)
        models = [
            wrap(workers, f"w{rank}", module, ignore=["own.*", "scale", "norm.*"], init_from_peers=False)
            for rank, module in enumerate(modules)
        ]
        introduce(*((f"w{rank}", model) for rank, model in enumerate(models)))
        for model in models:
            model.report_loss(1.0)
        while models[0].comm_stats()["num_rounds"] == 0:
            for model in models:
                model(torch.ones(2, 2)).sum().backward()
        assert modules[0].get_parameter("shared.weight").max() > 1
        state, expected = modules[0].state_dict(), Personal(0).state_dict()
        for name in ("own.weight", "own.bias", "scale"):
            assert torch.equal(state[name], expected[name])


def test_workers_of_a_membership_begin_with_their_own() -> None:
    store, x = dist.HashStore(), torch.ones(2, 2)

    def work(rank: int) -> dict[str, Tensor]:
        module = Personal(rank)
        membership = Membership(store, min_workers=2, timeout=20.0)
        model = GossipDataParallel(module, membership=membership, ignore=NAMES)
        with torch.no_grad():
            module.get_parameter("shared.bias").fill_(float(rank))
        for _ in membership.steps(2):
            model(x).sum().backward()
        model.settle()
        state = {name: value.clone() for name, value in module.state_dict().items()}
        model.close()
        return state

    with ThreadPoolExecutor(2) as pool:
        states = list(pool.map(work, range(2)))
    torch.testing.assert_close(states[0]["shared.bias"], states[1]["shared.bias"])
    for rank, state in enumerate(states):
        for name in ("own.weight", "own.bias", "scale", "frozen", "table"):
            assert torch.equal(state[name], Personal(rank).state_dict()[name])


def in_a_node(rank: int) -> list[float]:
    module = Personal(rank)
    model = GossipDataParallel(module, nprocs_per_node=2, ignore=["scale", "own.*", "frozen"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 2), float(rank))).sum().backward()
        optimizer.step()
    with torch.no_grad():
        module.get_buffer("table").fill_(float(rank))
    with model.averaged():
        inside = module.get_buffer("table")[0].item()
    model.close()
    assert not hasattr(module, "_ddp_params_and_buffers_to_ignore")
    own = module.get_parameter("own.weight")[0, 0].item()
    return [own, module.frozen[0].item(), inside, module.get_buffer("table")[0].item()]


@pytest.mark.e2e
def test_in_a_node_each_process_has_its_own_ignored_tensors() -> None:
    outcomes = run_processes(4, in_a_node)
    assert not any(outcome.error for outcome in outcomes)
    results = [outcome.result for outcome in outcomes]
    assert len({own for own, *_ in results}) == 4
    assert [rest for _, *rest in results] == [[float(rank), 0.0, float(rank)] for rank in range(4)]

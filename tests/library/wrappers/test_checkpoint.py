"""checkpoint(): each rank gets its own state back, another number of ranks the average, and nobody a patchwork."""

from __future__ import annotations

import copy
import io
import logging
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from gossip_modules import (
    D2,
    AllReduceDataParallel,
    BilatGossipDataParallel,
    Choco,
    DeepSqueeze,
    DiLoCo,
    GossipDataParallel,
    GradientTracking,
    GroupAverageDataParallel,
    PairwiseDataParallel,
    PowerGossip,
    QGDSGDm,
    RelaySGD,
    RingGraph,
    SignNorm,
    SlowMo,
    StreamingDiLoCo,
    gossip,
)
from gossip_modules.checkpoints import average_checkpoints
from gossip_modules.testing import Chaos
from tests.harness.problems import adamw, mlp, net, sgd, train_step
from tests.harness.processes import run_processes
from tests.harness.progress import state_of
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import irregular

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized",
    "ignore:TypedStorage is deprecated",  # torch 2.7, of itself
)
_dcp_lock = threading.Lock()  # ranks are threads here, and it has state of its own in modules
ANY_WORLD = {"planner": dcp.DefaultLoadPlanner(allow_partial_load=True)}

METHODS: dict[str, Callable[..., Any]] = {
    "SGP": GossipDataParallel,
    "SGP, weights that move": lambda m, **o: GossipDataParallel(m, graph=irregular(), **o),
    "SGP, gossip()": gossip,
    "Overlap SGP": lambda m, **o: GossipDataParallel(m, overlap=True, **o),
    "D-PSGD": lambda m, **o: GossipDataParallel(m, push_sum=False, graph=RingGraph, **o),
    "PowerGossip, overlap": lambda m, **o: GossipDataParallel(
        m, algorithm=PowerGossip(), push_sum=False, overlap=True, **o
    ),
    "CHOCO": lambda m, **o: GossipDataParallel(m, algorithm=Choco(SignNorm(), step_size=0.4), graph=RingGraph, **o),
    "DeepSqueeze": lambda m, **o: GossipDataParallel(
        m, algorithm=DeepSqueeze(SignNorm(), step_size=0.4), graph=RingGraph, **o
    ),
    "RelaySGD": lambda m, **o: GossipDataParallel(m, algorithm=RelaySGD(), **o),
    "DiLoCo": lambda m, **o: GossipDataParallel(m, algorithm=DiLoCo(sync_every=3), **o),
    "DiLoCo, rounds after steps": lambda m, **o: gossip(m, algorithm=DiLoCo(sync_every=3), rounds="step", **o),
    "StreamingDiLoCo": lambda m, **o: GossipDataParallel(m, algorithm=StreamingDiLoCo(4, fragments=2, delay=1), **o),
    "SlowMo": lambda m, **o: GossipDataParallel(m, algorithm=SlowMo(2), **o),
    "D2": lambda m, **o: GossipDataParallel(m, algorithm=D2(), **o),
    "gradient tracking": lambda m, **o: GossipDataParallel(m, algorithm=GradientTracking(), **o),
    "QG-DSGDm": lambda m, **o: GossipDataParallel(m, algorithm=QGDSGDm(), **o),
    "WAGMA, waiting": lambda m, **o: GroupAverageDataParallel(m, wait_avoiding=False, **o),
}


def save(model: Any, folder: Path, *optimizers: torch.optim.Optimizer) -> None:
    """`dcp.save` of one rank; the average is collective, and so is outside the lock."""
    state = {"model": model.checkpoint(*optimizers).state_dict()}
    with _dcp_lock:
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def load(model: Any, folder: Path, *optimizers: torch.optim.Optimizer, **options: Any) -> None:
    """`dcp.load` of one rank."""
    checkpoint = model.checkpoint(*optimizers)
    state: dict[str, Any] = {"model": checkpoint.state_dict()}
    with _dcp_lock:
        dcp.load(state, checkpoint_id=folder, no_dist=True, **options)
    checkpoint.load_state_dict(state["model"])


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The keys of all ranks, and where they have the same one its value on any of them."""
    whole: dict[str, Any] = {}
    for state in states:
        for key, value in state.items():
            whole[key] = merged([whole[key], value]) if isinstance(whole.get(key), dict) else value
    return whole


@pytest.mark.parametrize("name", METHODS)
def test_a_new_wrapper_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank, folder = group.rank(), tmp_path / str(group.rank())
        models = [mlp(rank), mlp(7 + rank)]
        runs = [(METHODS[name](model, process_group=group), sgd(model)) for model in models]
        (wrapper, optimizer), (fresh, fresh_optimizer) = runs
        for step in range(5):
            train_step(wrapper, optimizer, rank, step)
        save(wrapper, folder, optimizer)
        load(fresh, folder, fresh_optimizer)
        for each, stepped in runs:
            for step in range(5, 9):
                train_step(each, stepped, rank, step)
            each.settle()
        assert torch.equal(flatten(models[1]), flatten(models[0]))
        first, second = (getattr(each, "_gossip", each) for each, _ in runs)
        assert str(state_of(first)) == str(state_of(second))
        for each, _ in runs:
            each.close()

    run_ranks(3 if name == "SGP, weights that move" else 2, body)


@pytest.mark.parametrize("make", [BilatGossipDataParallel, GroupAverageDataParallel])
def test_asynchronous_ranks_get_their_own_models_back(make: Callable[..., Any], tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        rank, folder = group.rank(), tmp_path / str(group.rank())
        wrapper = make(mlp(rank), process_group=group)
        optimizer = adamw(wrapper)
        for step in range(4):
            train_step(wrapper, optimizer, rank, step)
        save(wrapper, folder, optimizer)
        own, state = flatten(wrapper), str(state_of(wrapper))
        wrapper.close()
        fresh = make(mlp(7), process_group=group)
        fresh_optimizer = adamw(fresh)
        load(fresh, folder, fresh_optimizer)
        assert torch.equal(flatten(fresh), own)
        assert str(state_of(fresh)) == state
        assert str(fresh_optimizer.state_dict()) == str(optimizer.state_dict())
        for step in range(2):
            train_step(fresh, fresh_optimizer, rank, step)
        fresh.close()
        return own

    first, second = run_ranks(2, body)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
@pytest.mark.parametrize("name", ["SGP", "SGP, gossip()", "DiLoCo, rounds after steps", "D2"])
def test_another_number_of_ranks_begins_with_the_average(
    name: str, before: int, after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(group: dist.ProcessGroup) -> dict[str, Any]:
        model = mlp(group.rank())
        wrapper, optimizer = METHODS[name](model, process_group=group), sgd(model)
        for step in range(4):
            train_step(wrapper, optimizer, group.rank(), step)
        state = wrapper.checkpoint(optimizer).state_dict()
        momentum = torch.cat([x["momentum_buffer"].flatten() for x in optimizer.state_dict()["state"].values()])
        wrapper.average_()
        wrapper.close()
        return {"state": state, "average": flatten(model), "momentum": momentum}

    saved = run_ranks(before, run)
    dcp.save({"model": merged([rank["state"] for rank in saved])}, checkpoint_id=tmp_path, no_dist=True)

    def go_on(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = mlp(7 + group.rank())
        wrapper, optimizer = METHODS[name](model, process_group=group), sgd(model)
        train_step(wrapper, optimizer, group.rank(), 0)  # what it has learned is dropped
        load(wrapper, tmp_path, optimizer, **ANY_WORLD)
        assert wrapper.comm_stats()["num_rounds"] >= 0
        found = flatten(model), optimizer.state_dict()["state"][0]["momentum_buffer"].flatten().clone()
        for step in range(4):
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.close()
        return found

    with caplog.at_level(logging.WARNING, logger="gossip_modules.checkpoint"):
        found = run_ranks(after, go_on)
    mean = torch.stack([rank["momentum"] for rank in saved]).mean(0)
    for model, momentum in found:
        torch.testing.assert_close(model, saved[0]["average"])
        assert torch.equal(model, found[0][0])
        torch.testing.assert_close(momentum, mean[: momentum.numel()])
    assert (
        f"a checkpoint of {before} ranks for {after} ranks: begins with the average of the models and opt"
        in caplog.text
    )
    assert "the counters of rounds, push-sum weights and the memory of" in caplog.text
    plain = mlp(3)
    tensors: dict[str, Any] = {"model": plain.state_dict()}
    dcp.load(tensors, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(flatten(plain), found[0][0]), "the average is under bare names"


def test_torch_names_the_remedy_for_another_number_of_ranks(tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = GossipDataParallel(mlp(), process_group=group)
        if group.size() == 1:
            save(wrapper, tmp_path)
        else:
            with pytest.raises(
                dcp.CheckpointException, match=r"rank_\d_of_2.memory .of other ranks or shards: pass pl"
            ):
                load(wrapper, tmp_path)
        wrapper.close()

    for size in (1, 2):
        run_ranks(size, body)


def test_a_checkpoint_in_memory_is_of_its_moment() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper, optimizer = GossipDataParallel(mlp(), process_group=group), None
        optimizer = adamw(wrapper)
        checkpoint = wrapper.checkpoint(optimizer)
        assert isinstance(checkpoint, Stateful)
        train_step(wrapper, optimizer, group.rank(), 0)
        state, model = checkpoint.state_dict(), flatten(wrapper)
        moments = str(optimizer.state_dict())
        for step in range(2):
            train_step(wrapper, optimizer, group.rank(), step)
        checkpoint.load_state_dict(state)
        assert torch.equal(flatten(wrapper), model)
        assert str(optimizer.state_dict()) == moments
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        checkpoint.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(flatten(wrapper), model)
        wrapper.close()

    run_ranks(2, body)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    wrapper = GossipDataParallel(mlp(), process_group=solo_group())
    optimizer = sgd(wrapper)
    before = flatten(wrapper)
    with pytest.raises(ValueError, match=r"got a state dict with '0.weight', .* without 'gossip.world', expected one"):
        wrapper.checkpoint().load_state_dict(mlp(3).state_dict())
    dcp.save({"model": mlp(3).state_dict()}, checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(
        ValueError, match=r"without 'gossip.world'|got a checkpoint whose model of the average has other"
    ):
        load(wrapper, tmp_path / "plain", **ANY_WORLD)
    other = GossipDataParallel(net(), process_group=solo_group())
    save(other, tmp_path / "other")
    with pytest.raises(ValueError, match=r"not all of this model, expected '0.weight', .*; load"):
        load(wrapper, tmp_path / "other", **ANY_WORLD)
    save(wrapper, tmp_path / "own")
    with pytest.raises(ValueError, match=r"got a checkpoint without optimizers, expected 1; save it with checkpoint"):
        load(wrapper, tmp_path / "own", optimizer, **ANY_WORLD)
    save(wrapper, tmp_path / "two", optimizer, optimizer)
    with pytest.raises(ValueError, match=r"got a checkpoint with 2 optimizers, expected 1"):
        load(wrapper, tmp_path / "two", optimizer)
    with pytest.raises(ValueError, match=r"got dict in checkpoint\(\), expected optimizers"):
        wrapper.checkpoint({})  # type: ignore[arg-type]
    assert torch.equal(flatten(wrapper), before), "nothing was changed"
    wrapper.close()
    other.close()


def test_tensors_of_each_rank_are_taken_from_rank_0_and_optimizers_without_a_mean_start_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ignored and frozen tensors in the average; ranks of which one has not stepped yet."""

    def run(group: dist.ProcessGroup) -> dict[str, Any]:
        model = mlp(group.rank())
        model.get_submodule("2").requires_grad_(False)
        wrapper = GossipDataParallel(model, process_group=group, init_sync=False, ignore=["0.bias"])
        optimizer = torch.optim.AdamW(model.parameters())
        if group.rank():
            train_step(wrapper, optimizer, 0, 0)
        else:
            wrapper.gossip_step()
        state = wrapper.checkpoint(optimizer).state_dict()
        own = wrapper.checkpoint()._own_state()
        assert torch.equal(state["gossip"][f"rank_{group.rank()}_of_2"]["model"]["2.bias"], own["module.2.bias"])
        wrapper.close()
        return state

    with pytest.warns(UserWarning, match=r"got frozen parameters .* that differ between ranks"):
        first, second = run_ranks(2, run)
    for name in ("0.bias", "2.weight", "2.bias"):
        assert torch.equal(first[name], mlp(0).get_parameter(name))
        assert torch.equal(second[name], first[name])
    wrapper = GossipDataParallel(mlp(5), process_group=solo_group())
    optimizer = torch.optim.AdamW(wrapper.parameters())
    wrapper.checkpoint(optimizer).load_state_dict(second)
    assert "the optimizers, whose state differed between ranks" in caplog.text
    assert not optimizer.state_dict()["state"]
    wrapper.close()


def _whole_run(rank: int, folder: str, action: str) -> Any:
    """A job of torch.distributed: real collectives of torch.distributed.checkpoint."""
    torch.manual_seed(rank)
    size = dist.get_world_size()
    if action.startswith("dpwa"):
        wrapper: Any = PairwiseDataParallel(mlp(rank), name=f"w{rank}", peers={f"w{rank}": "tcp://127.0.0.1:*"})
    else:
        kind = AllReduceDataParallel if action.startswith("all-reduce") else GossipDataParallel
        options: dict[str, Any] = {"nprocs_per_node": 2, "overlap": True} if action.startswith("nodes") else {}
        wrapper = kind(mlp(rank), **options)
    optimizer = sgd(wrapper)
    if action == "patchwork":
        for step in range(3):
            train_step(wrapper, optimizer, rank, step)
        dcp.save({"model": wrapper.state_dict()}, checkpoint_id=folder)
        state = {"model": wrapper.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        try:
            wrapper.load_state_dict(state["model"])
        except ValueError as error:
            return str(error)
        return ""
    checkpoint = {"model": wrapper.checkpoint(optimizer)}
    if action.endswith("load"):
        dcp.load(checkpoint, checkpoint_id=folder, **ANY_WORLD)
        found = flatten(wrapper)
    else:
        for step in range(3):
            train_step(wrapper, optimizer, rank, step)
        if action.endswith("async save"):
            future: Any = dcp.async_save(checkpoint, checkpoint_id=folder)
            found = flatten(wrapper)
            for step in range(3, 6):
                train_step(wrapper, optimizer, rank, step)
            future.result()
        else:
            dcp.save(checkpoint, checkpoint_id=folder)
            found = flatten(wrapper)
    train_step(wrapper, optimizer, rank, 9)
    wrapper.close()
    return found, size


class _WithState(nn.Linear):
    """A layer with state of its own that differs by rank."""

    own = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.own])

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


def test_ignored_tensors_under_all_their_names_and_state_of_layers_are_of_rank_0() -> None:
    def body(group: dist.ProcessGroup) -> tuple[dict[str, Any], Any]:
        torch.manual_seed(group.rank())
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), _WithState(3, 2))
        model[1].weight = model[0].weight
        vars(model[2])["own"] = group.rank()
        wrapper = GossipDataParallel(model, ignore=["0.weight"], process_group=group)
        state = wrapper.checkpoint().state_dict()
        wrapper.close()
        gossip = state.pop("gossip")
        return {name: x.tolist() for name, x in state.items()}, dict(gossip["world"])

    first, *others = run_ranks(3, body)
    assert first[0]["2._extra_state"] == [0]
    assert others == [first, first]


@pytest.mark.parametrize("kind", ["gossip async", "all-reduce", "nodes", "dpwa"])
def test_torch_distributed_checkpoint_keeps_all_ranks(kind: str, tmp_path: Path) -> None:
    def run(size: int, action: str) -> list[Tensor]:
        return [outcome.result[0] for outcome in run_processes(size, _whole_run, str(tmp_path), action)]

    saved = run(4 if kind in ("gossip async", "nodes") else 2, f"{kind} save")
    again = run(len(saved), f"{kind} load")
    assert all(torch.equal(x, y) for x, y in zip(saved, again, strict=True))
    if kind == "gossip async":
        for model in run(2, f"{kind} load"):  # another number of ranks
            torch.testing.assert_close(model, torch.stack(saved).mean(0))


def test_a_patchwork_is_refused_on_every_rank(tmp_path: Path) -> None:
    messages = [outcome.result for outcome in run_processes(3, _whole_run, str(tmp_path), "patchwork")]
    own = [message for message in messages if "with other tensors than this rank has saved" in message]
    assert len(own) == 1, "the rank whose place was kept"
    assert all(re.search(r"ave and load model.checkpoint\(optimizer\) with", message) for message in messages)


def test_weights_of_a_checkpoint_are_one_where_rounds_keep_them_at_one() -> None:
    """A run on a digraph whose weights move goes on on the default graph."""

    def body(group: dist.ProcessGroup) -> None:
        before = GossipDataParallel(mlp(), graph=irregular(), process_group=group)
        optimizer = sgd(before)
        for step in range(4):
            train_step(before, optimizer, group.rank(), step)
        state = copy.deepcopy(before.state_dict())
        assert before.get_extra_state()["weight"] != 1
        model = GossipDataParallel(mlp(), process_group=group)
        model.load_state_dict(state)
        assert torch.equal(flatten(model.module), flatten(before.module))
        optimizer = sgd(model)
        for step in range(2):
            assert model.get_extra_state()["weight"] == 1
            train_step(model, optimizer, group.rank(), step)

    run_ranks(3, body)


# One file per rank.


@pytest.mark.parametrize("wrap", [GossipDataParallel, gossip])
def test_files_of_all_ranks_are_averaged_by_their_weights(wrap: Callable[..., Any]) -> None:
    def run(group: dist.ProcessGroup) -> dict[str, Any]:
        model = mlp(group.rank())
        wrapper, optimizer = wrap(model, process_group=group, init_sync=False), sgd(model)
        train_step(wrapper, optimizer, group.rank(), 0)
        state: Any = wrapper.state_dict()
        state._metadata[""]["gossip_state"]["weight"] = torch.tensor([1.0 + group.rank()])
        file = io.BytesIO()
        torch.save({"model": state, "optimizer": optimizer.state_dict(), "step": group.rank()}, file)
        file.seek(0)
        wrapper.close()
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
        return loaded

    first, second = run_ranks(2, run)
    average = average_checkpoints(iter([first, second]))
    prefix = "module." if wrap is GossipDataParallel else ""
    for name, x in average["model"].items():
        mean = (first["model"][prefix + name].double() + 2 * second["model"][prefix + name].double()) / 3
        torch.testing.assert_close(x, mean)
    mlp().load_state_dict(average["model"])
    momenta = [state["optimizer"]["state"][0]["momentum_buffer"] for state in (first, second)]
    torch.testing.assert_close(average["optimizer"]["state"][0]["momentum_buffer"], sum(momenta) / 2)
    sgd(mlp()).load_state_dict(average["optimizer"])
    assert average["step"] == 0
    with pytest.raises(ValueError, match=r"got no checkpoint, expected one for each rank"):
        average_checkpoints([])
    with pytest.raises(ValueError, match=r"got checkpoints of which one has .* expected the same on all ranks"):
        average_checkpoints([first, {**second, "model": nn.Linear(1, 1).state_dict()}])


# With a membership.


@pytest.mark.parametrize("make", [GossipDataParallel, AllReduceDataParallel, BilatGossipDataParallel])
def test_a_job_with_a_membership_goes_on_with_any_number_of_workers(make: Callable[..., Any]) -> None:
    """One worker writes for all, and ranks without a membership may go on from its file."""
    files: dict[str, bytes] = {}

    def train(worker: Any, size: int) -> dict[str, Any]:
        membership = worker.membership(min_workers=size)
        model = make(mlp(len(files)), membership=membership)
        optimizer = sgd(model)
        membership.track(optimizer=optimizer)
        checkpoint, begun = model.checkpoint(optimizer), None
        if "first" in files:
            checkpoint.load_state_dict(torch.load(io.BytesIO(files["first"]), weights_only=True))
            begun = flatten(model)
        for step in membership.steps(4):
            train_step(model, optimizer, membership.rank, step)
        state = checkpoint.state_dict()
        model.close()
        file = io.BytesIO()
        torch.save(state, file)
        average = torch.cat([x.flatten().double() for x in state.values() if isinstance(x, Tensor)])
        return {"begun": begun, "state": file.getvalue(), "average": average}

    first = list(Chaos([]).run(partial(train, size=3), 3).values())
    assert len({tuple(result["average"].tolist()) for result in first}) == 1
    files["first"] = first[1]["state"]
    for result in Chaos([]).run(partial(train, size=2), 2).values():
        torch.testing.assert_close(result["begun"], first[0]["average"])

    def go_on(group: dist.ProcessGroup) -> Tensor:
        wrapper = GossipDataParallel(mlp(5), process_group=group)
        optimizer = sgd(wrapper)
        wrapper.checkpoint(optimizer).load_state_dict(torch.load(io.BytesIO(files["first"]), weights_only=True))
        wrapper.close()
        return flatten(wrapper)

    for model in run_ranks(2, go_on):
        torch.testing.assert_close(model, first[0]["average"])


# A change of what is trained, before the next round.


@pytest.mark.parametrize("algorithm", [DiLoCo(sync_every=4), SlowMo(4)], ids=str)
@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.filterwarnings("ignore:.*other tensors are trained than before")
def test_layers_frozen_or_added_before_the_next_synchronisation(algorithm: Any, freezes: bool) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank, models = group.rank(), [mlp(group.rank()), mlp(7)]
        if not freezes:
            for model in models:
                model.get_submodule("0").requires_grad_(False)
        runs = [(GossipDataParallel(m, process_group=group, algorithm=algorithm), sgd(m)) for m in models]
        for step in range(6):
            train_step(*runs[0], rank, step)
        models[0].get_submodule("0").requires_grad_(not freezes)
        train_step(*runs[0], rank, 6)
        state = runs[0][0].checkpoint(runs[0][1]).state_dict()
        models[1].get_submodule("0").requires_grad_(not freezes)
        runs[1][0].checkpoint(runs[1][1]).load_state_dict(state)
        again = runs[1][0].checkpoint(runs[1][1]).state_dict()  # before any round
        runs[1][0].checkpoint(runs[1][1]).load_state_dict(again)
        for wrapper, optimizer in runs:
            for step in range(7, 16):
                train_step(wrapper, optimizer, rank, step)
            wrapper.close()
        assert torch.equal(flatten(models[1]), flatten(models[0]))

    run_ranks(2, body)

"""Replicas sharded by fully_shard (FSDP2) over a mesh of 2 x 2, against whole models on two ranks."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gossip_modules import (
    D2,
    AllReduceDataParallel,
    BilatGossipDataParallel,
    Choco,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    PowerGossip,
    QGDSGDm,
    SignNorm,
    SlowMo,
    StreamingDiLoCo,
    gossip,
)
from tests.harness.processes import run_processes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]  # four processes, perhaps on a loaded machine
HALVES = [["0", "1"], ["2", "4"]]
OPTIONS: dict[str, dict[str, Any]] = {
    "SGP": {},
    "D-PSGD": {"push_sum": False},
    "Overlap SGP": {"overlap": True},
    "bfloat16 wire": {"wire_dtype": torch.bfloat16, "schedule": 2},
    "int8 wire": {"wire_dtype": torch.int8},
    "DiLoCo": {"algorithm": DiLoCo(sync_every=2)},
    "Streaming DiLoCo": {"algorithm": StreamingDiLoCo(2, fragments=HALVES, delay=1)},
    "adaptive": {"algorithm": DiLoCo(2, lr=1.0, momentum=0.0, delay=1, arrival="adaptive")},
    "SlowMo": {"algorithm": SlowMo(2)},
    "D2": {"algorithm": D2()},
    "QG-DSGDm": {"algorithm": QGDSGDm(), "push_sum": False},
}


def model_of(seed: int) -> nn.Sequential:
    """Weights of 5 and 3 rows, which two processes cannot share evenly, and buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def sharded(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """The model, by two calls of fully_shard for its layers and one for the rest."""
    from torch.distributed.fsdp import fully_shard

    for part in (model[2], model[4]):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x.detach().clone()


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [whole(p) for p in model.parameters()]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, optimizer: torch.optim.Optimizer, replica: int, steps: range) -> None:
    """Both processes of a replica have the same batches."""
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * replica + step))
        model(x).square().mean().backward()
        optimizer.step()


def mesh_of_four() -> DeviceMesh:
    torch.set_num_threads(1)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def has_exact_shards(mesh: DeviceMesh) -> bool:
    """Whether a step under fully_shard alone is that of a whole model: with Gloo in torch 2.7 it is not."""
    models = sharded(model_of(0), mesh["shard"]), model_of(0)
    for model in models:
        train(model, sgd(model), 0, range(1))
    return all(map(torch.equal, *map(parameters_of, models)))


def compared(rank: int) -> dict[str, list[list[Tensor]]]:
    """Parameters, averages and the distance after some steps, of sharded replicas and of whole ones."""
    mesh = mesh_of_four()
    replica = mesh["replicate"].get_local_rank()
    results: dict[str, list[list[Tensor]]] = {}
    if not has_exact_shards(mesh):
        return results
    for name, options in OPTIONS.items():
        for is_sharded in (True, False):
            model = model_of(replica)
            inner = sharded(model, mesh["shard"]) if is_sharded else model
            wrapper = GossipDataParallel(inner, device_mesh=mesh["replicate"], **options)
            train(wrapper, sgd(model), replica, range(4))
            wrapper.flush()
            left = parameters_of(model)
            distance = torch.tensor(wrapper.consensus_distance())
            average = wrapper.averaged_state_dict(rank0_only=False, full=True)
            assert wrapper.comm_stats()["num_rounds"] > 0
            wrapper.close()
            results.setdefault(name, []).append([*left, *(average[k] for k in sorted(average)), distance])
    return results


def test_sharded_replicas_equal_whole_ones() -> None:
    """To the bit, but for the distance, which is a sum over shards, and for int8, whose blocks end with shards."""
    for outcome in run_processes(4, compared, timeout=100.0):
        assert not outcome.error, outcome.error
        if not outcome.result:
            pytest.skip(f"fully_shard of torch {torch.__version__} computes other gradients over Gloo")
        assert list(outcome.result) == list(OPTIONS)
        for name, (got, want) in outcome.result.items():
            atol = 0.01 if name == "int8 wire" else 0.0
            for one, other in zip(got[:-1], want[:-1], strict=True):
                assert float((one - other).detach().abs().max()) <= atol, name
            torch.testing.assert_close(got[-1], want[-1], rtol=1e-6, atol=atol)


def loop(wrapper: Any, replica: int, mesh: DeviceMesh) -> tuple[list[list[Tensor]], float]:
    """Evaluation, accumulation, a step that one replica leaves out, freezing, a checkpoint: parameters in between."""
    model, optimizer, seen = wrapper.module, sgd(wrapper.module), []

    def evaluate() -> None:
        """Leaves the parameters of the root gathered."""
        wrapper.eval()
        with torch.no_grad():
            wrapper(torch.ones(2, 4))
        wrapper.train()

    def accumulate() -> None:
        optimizer.zero_grad()
        with wrapper.no_sync():
            wrapper(torch.ones(2, 4)).square().sum().backward()
        wrapper(torch.full((2, 4), 2.0 + replica)).square().mean().backward()
        optimizer.step()

    def leave_out() -> None:
        """As a GradScaler does at an overflow, in one replica."""
        optimizer.zero_grad()
        wrapper(torch.full((2, 4), 1.0 + replica)).square().mean().backward()
        if replica == 1:
            optimizer.step()

    def freeze() -> None:
        model[4].requires_grad_(False)

    def thaw() -> None:
        model[4].requires_grad_(True)

    for act in (leave_out, evaluate, accumulate, leave_out, leave_out, freeze, thaw):
        act()
        train(wrapper, optimizer, replica, range(2))
        seen.append(parameters_of(model))
    state, steps = copy.deepcopy(wrapper.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(wrapper, optimizer, replica, range(2, 4))
    seen.append(parameters_of(model))
    wrapper.load_state_dict(state)
    optimizer.load_state_dict(steps)
    train(wrapper, optimizer, replica, range(2, 4))
    assert all(map(torch.equal, parameters_of(model), seen[-1]))
    with wrapper.averaged():
        seen.append(parameters_of(model))
        evaluate()
    for x in seen[-1]:
        total = x.clone()
        dist.all_reduce(total, group=mesh["replicate"].get_group())
        assert torch.equal(total, 2 * x)
    num_rounds = wrapper.comm_stats()["num_rounds"]
    wrapper.close()
    return seen, num_rounds


def check_loops(rank: int) -> None:
    """A loop of sharded replicas and one of whole ones; mixed precision, and algorithms that are not elementwise."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = mesh_of_four()
    replica = mesh["replicate"].get_local_rank()
    each: list[dict[str, Any]] = [{}, {"overlap": True}]
    for options in each if has_exact_shards(mesh) else ():
        models = sharded(model_of(replica), mesh["shard"]), model_of(replica)
        wrappers = [GossipDataParallel(model, device_mesh=mesh["replicate"], **options) for model in models]
        (got, num_rounds), (want, num_expected) = (loop(wrapper, replica, mesh) for wrapper in wrappers)
        assert num_rounds == num_expected
        for k, pair in enumerate(zip(got, want, strict=True)):
            assert all(map(torch.equal, *pair)), (options, k)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    codes: list[dict[str, Any]] = [
        {"algorithm": Choco(SignNorm(8), step_size=0.5)},
        {"algorithm": PowerGossip(rank=1), "overlap": True},
    ]
    for options in codes:
        half = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        fully_shard(half, mesh=mesh["shard"], mp_policy=policy)
        wrapper = GossipDataParallel(half, device_mesh=mesh["replicate"], **options)
        train(wrapper, torch.optim.AdamW(half.parameters(), lr=1e-2), replica, range(5))
        assert all(bool(p.isfinite().all()) for p in parameters_of(half))
        assert wrapper.comm_stats()["num_rounds"] >= 4
        wrapper.close()


def check_wrappers(rank: int) -> None:
    """gossip(), the asynchronous wrappers, a plan of DTensors; and the errors."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of_four()
    over: dict[str, Any] = {"device_mesh": mesh["replicate"]}
    replica = mesh["replicate"].get_local_rank()
    makes: list[Any] = [gossip, BilatGossipDataParallel, GroupAverageDataParallel]
    wrapper: Any
    for make in makes:
        model = sharded(model_of(replica), mesh["shard"])
        wrapper = make(model, **over)
        train(wrapper, sgd(model), replica, range(4))
        wrapper.average_()
        assert wrapper.consensus_distance() == 0.0
        wrapper.close()
    pair = model_of(replica)
    plan = {"2": ColwiseParallel(), "4": RowwiseParallel()}
    parallelize_module(pair, mesh["shard"], plan)
    wrapper = GossipDataParallel(pair, **over)
    plain = model_of(replica)
    other = GossipDataParallel(plain, **over)
    for each in (wrapper, other):
        train(each, sgd(each.module), replica, range(4))
    torch.testing.assert_close(parameters_of(pair), parameters_of(plain), rtol=0, atol=1e-6)
    for each in (wrapper, other):
        each.close()

    measured = GossipDataParallel(sharded(model_of(replica), mesh["shard"]), overlap="auto", **over)
    train(measured, sgd(measured.module), replica, range(12))
    choices: list[Any] = [None] * 4
    dist.all_gather_object(choices, measured.overlap_choice)
    assert choices[0] is not None
    assert len(set(choices)) == 1
    measured.close()

    def refused(match: str, model: nn.Module, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            GossipDataParallel(model, **options)

    shards = sharded(model_of(0), mesh["shard"])
    refused(r"sharded over processes .* and no device_mesh, expected .*device_mesh=mesh\['replicate'\]", shards)
    refused(r"got process_group and device_mesh", shards, process_group=dist.group.WORLD, **over)
    refused(r"expected a DeviceMesh of one dimension.*mesh\['replicate'\]", shards, device_mesh=mesh)
    both = sharded(model_of(0), mesh)
    refused(r"ranks \[0, 1, 2, 3\], of which \[[0-3]\] are to gossip with this rank", both, **over)
    # One process differs, and all processes of all replicas have the same error at once.
    one = r"^ranks do not agree with rank 1: rank 3: overlap: got True, expected False; wrap the same"
    refused(one, shards, overlap=rank == 3, timeout=600, **over)
    of_one_place = r"^ranks do not agree with rank [02]: rank [13]: overlap: got True, expected False; wrap the same"
    refused(of_one_place, shards, overlap=rank % 2 == 1, timeout=600, **over)
    with pytest.raises(ValueError, match=r"got a module of fully_shard to wrap in AllReduceDataParallel"):
        AllReduceDataParallel(shards, **over)
    late = GossipDataParallel(model_of(0), **over)
    fully_shard(late.module, mesh=mesh["shard"])
    with pytest.raises(RuntimeError, match=r"fully_shard or .* was applied after it was made; .*before you wrap it"):
        late(torch.ones(2, 4))
    other_places = nn.Linear(4, 2)
    parallelize_module(other_places, mesh["shard"], ColwiseParallel() if replica else RowwiseParallel())
    refused(r"ranks do not agree with rank [01]: rank [23]: model: got .*S\(", other_places, **over)


def check_replica(rank: int) -> None:
    """The processes of a replica, with different batches, hold one model: buffers, common tensors, checkpoints."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of_four()
    over: dict[str, Any] = {"device_mesh": mesh["replicate"]}
    replica = mesh["replicate"].get_local_rank()

    def wrapped(seed: int) -> tuple[Any, Any, torch.optim.Optimizer]:
        model = sharded(model_of(seed), mesh["shard"])
        return model, GossipDataParallel(model, **over), torch.optim.Adam(model.parameters(), lr=1e-2)

    model, wrapper, optimizer = wrapped(replica)
    train(wrapper, optimizer, rank, range(4))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save({"model": wrapper.checkpoint(optimizer)}, checkpoint_id=folder[0])
    again, other, adam = wrapped(5)
    dcp.load({"model": other.checkpoint(adam)}, checkpoint_id=folder[0])
    assert all(map(torch.equal, parameters_of(model), parameters_of(again)))
    assert all(map(torch.equal, model.buffers(), again.buffers()))
    for each, stepped in ((wrapper, optimizer), (other, adam)):
        train(each, stepped, rank, range(4, 6))
    assert all(map(torch.equal, parameters_of(model), parameters_of(again)))
    parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    for part in parts:
        fully_shard(part, mesh=mesh["shard"])
    container = GossipDataParallel(nn.Sequential(*parts), **over)
    with container.no_sync():
        container(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is None for p in parts.parameters())
    for each in (wrapper, other, container):
        each.close()
    for algorithm in (Choco(SignNorm(8), step_size=0.5), DiLoCo(sync_every=2)):
        torch.manual_seed(replica)
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        parallelize_module(model, mesh["shard"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        wrapper = GossipDataParallel(model, algorithm=algorithm, **over)
        train(wrapper, sgd(model), replica, range(4))
        wrapper.flush()
        for x in (*model[0].parameters(), model[3].bias):
            mine = whole(x).contiguous()
            theirs = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(theirs, mine, group=mesh["shard"].get_group())
            assert torch.equal(*theirs)
        wrapper.close()


def check_all(rank: int) -> None:
    """All checks in one start of four processes, whose imports take long."""
    check_loops(rank)
    check_wrappers(rank)
    check_replica(rank)


def test_of_sharded_replicas() -> None:
    for outcome in run_processes(4, check_all, expect_result=False, timeout=100.0):
        assert not outcome.error, outcome.error

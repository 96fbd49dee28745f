"""Each public call that takes or gives a state, on a model of tensor parallelism, against whole models."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gossip_modules import DiLoCo, GossipDataParallel, gossip
from tests.harness.processes import run_processes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]  # four processes, perhaps on a loaded machine
WIDTH = 4


class Statistics(nn.Module):
    """A layer with an averaged buffer, and one that an average takes from rank 0."""

    running_mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.randn(WIDTH))
        self.register_buffer("count", torch.randint(9, ()))

    def forward(self, x: Tensor) -> Tensor:
        """Update the buffers by x [batch, length, WIDTH] in training; returns x."""
        if self.training:
            with torch.no_grad():
                local(self.running_mean).lerp_(x.mean((0, 1)), 0.1)
                local(self.count).add_(1)
        return x


def local(x: Any) -> Tensor:
    found: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return found


def whole(x: Any) -> Tensor:
    found: Tensor = (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
    return found


def model_of(seed: int, mesh: DeviceMesh | None) -> nn.Module:
    """Plain tensors, shards (unequal ones, too), and replicated DTensors: trained, frozen, and buffers."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(seed)
    layers = [nn.LayerNorm(WIDTH), Statistics(), nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6)]
    model = nn.Sequential(*layers, nn.Linear(6, 7))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if mesh is not None:
        distribute_module(model[1], mesh)
        plan = {
            "2": ColwiseParallel(),
            "4": RowwiseParallel(output_layouts=Shard(1)),
            "5": SequenceParallel(),
            "6": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, plan)
    for frozen in (model[0].bias, model[5].bias, model[6].bias):
        frozen.requires_grad_(False)
    return model


class Job(NamedTuple):
    """A wrapper, its model, an optimizer, the number of the replica, and whether that is sharded."""

    wrapper: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    replica: int
    is_cut: bool

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(100 * self.replica + step))
            self.wrapper(x).square().mean().backward()
            self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the model and of the optimizer."""
        self.wrapper.settle()
        found = {name: whole(x) for name, x in (*self.model.named_parameters(), *self.model.named_buffers())}
        states = self.optimizer.state_dict()["state"]
        return found | {f"{k}.{name}": whole(x) for k, of in states.items() for name, x in of.items()}


def job_of(mesh: DeviceMesh, make: Any, *, seed: int, is_cut: bool, **options: Any) -> Job:
    replica = mesh["replicate"].get_local_rank()
    model = model_of(seed + replica, mesh["shard"] if is_cut else None)
    wrapper = make(model, device_mesh=mesh["replicate"], **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return Job(wrapper, model, optimizer, replica, is_cut)


def averaged_state_dict(job: Job, again: Job, folder: str) -> Any:
    return job.wrapper.averaged_state_dict(rank0_only=False, full=True)


def averaged_shards(job: Job, again: Job, folder: str) -> Any:
    """Loads into the module, as it is and through DCP."""
    state = job.wrapper.averaged_state_dict(rank0_only=False)
    again.wrapper.settle()
    again.model.load_state_dict(state)
    if again.wrapper is not again.model:
        again.wrapper.set_extra_state(None)
    return again.tensors()


def averaged(job: Job, again: Job, folder: str) -> Any:
    before = job.tensors()
    with job.wrapper.averaged():
        inside = job.tensors()
    after = job.tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return inside


def average_(job: Job, again: Job, folder: str) -> Any:
    """The distance is that of the frozen parameters, which stay as they are."""
    job.wrapper.average_()
    return job.tensors() | consensus_distance(job, again, folder)


def consensus_distance(job: Job, again: Job, folder: str) -> Any:
    return {"distance": torch.tensor(job.wrapper.consensus_distance())}


def average_optimizer_state(job: Job, again: Job, folder: str) -> Any:
    job.wrapper.average_optimizer_state(job.optimizer)
    return job.tensors()


def state_dict(job: Job, again: Job, folder: str) -> Any:
    again.wrapper.load_state_dict(copy.deepcopy(job.wrapper.state_dict()))
    again.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    return goes_on(job, again)


def checkpoint(job: Job, again: Job, folder: str) -> Any:
    saved = job.wrapper.checkpoint(job.optimizer).state_dict()
    again.wrapper.checkpoint(again.optimizer).load_state_dict(saved)
    return goes_on(job, again)


def checkpoint_of_dcp(job: Job, again: Job, folder: str) -> Any:
    dcp.save({"model": job.wrapper.checkpoint(job.optimizer)}, checkpoint_id=folder)
    dcp.load({"model": again.wrapper.checkpoint(again.optimizer)}, checkpoint_id=folder)
    return goes_on(job, again)


def goes_on(job: Job, again: Job) -> Any:
    """The tensors of both, which are equal also after more steps."""
    for each in (job, again):
        each.train(range(4, 6))
    mine, theirs = job.tensors(), again.tensors()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    return theirs


ALL = (
    *(averaged_state_dict, averaged_shards, averaged, consensus_distance, state_dict, checkpoint, checkpoint_of_dcp),
    *(average_optimizer_state, average_),
)
WRAPPERS: list[tuple[Any, dict[str, Any], tuple[Callable[[Job, Job, str], dict[str, Any]], ...]]] = [
    (GossipDataParallel, {"overlap": True, "init_sync": False}, ALL),
    (gossip, {"algorithm": DiLoCo(sync_every=3)}, (averaged_state_dict, averaged_shards, state_dict, checkpoint)),
]


def mesh_of(num_replicas: int, num_shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (num_replicas, num_shards), mesh_dim_names=("replicate", "shard"))


def check_calls(rank: int) -> int:
    """Each call of two replicas in two shards, and of two whole ones."""
    mesh, folder = mesh_of(2, 2), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for make, options, calls in WRAPPERS:
        pairs = [[job_of(mesh, make, is_cut=cut, seed=seed, **options) for seed in (0, 7)] for cut in (True, False)]
        for job, _ in pairs:
            job.train(range(4))
        for call in calls:
            path = f"{folder[0]}/{make.__name__}-{call.__name__}"
            got, want = (call(job, again, f"{path}-{job.is_cut}") for job, again in pairs)
            assert_close(got, want, f"{call.__name__}() of {make.__name__}")
        if make is GossipDataParallel:
            check_another_sharding(pairs[0][0], f"{folder[0]}/another sharding")
        for job in (*pairs[0], *pairs[1]):
            job.wrapper.close()
    return rank


def check_another_sharding(job: Job, folder: str) -> None:
    """One replica in four shards, and four whole ones, begin with the average."""
    dcp.save({"model": job.wrapper.checkpoint(job.optimizer)}, checkpoint_id=folder)
    average = job.wrapper.averaged_state_dict(rank0_only=False, full=True)
    for x in average.values():
        dist.broadcast(x, 0)  # frozen tensors have the values of rank 0
    for shape in ((1, 4), (4, 1)):
        other = job_of(mesh_of(*shape), GossipDataParallel, is_cut=shape[1] > 1, seed=9)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load({"model": other.wrapper.checkpoint(other.optimizer)}, checkpoint_id=folder, planner=planner)
        found = {name: x for name, x in other.tensors().items() if name in average}
        assert_close(found, average, f"a checkpoint for {shape}")
        other.train(range(2))
        other.wrapper.close()


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    assert sorted(got) == sorted(want), what
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5, msg=f"{what}: {name}")


def test_calls_give_the_states_of_whole_models() -> None:
    assert [outcome.result for outcome in run_processes(4, check_calls, timeout=100.0)] == [0, 1, 2, 3]

"""checkpoint() of replicas sharded by fully_shard, for torch.distributed.checkpoint and another sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from gossip_modules import DiLoCo, GossipDataParallel, gossip
from tests.harness.processes import run_processes
from tests.library.sharded.test_replicas import model_of, parameters_of, sharded, train

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]  # four processes, perhaps on a loaded machine
ANY_WORLD = {"planner": dcp.DefaultLoadPlanner(allow_partial_load=True)}


def made(seed: int, num_shards: int, make: Any) -> tuple[Any, torch.optim.Optimizer, int]:
    """A wrapper of a model in so many shards, its optimizer, and the number of the replica."""
    num_replicas = dist.get_world_size() // num_shards
    mesh = init_device_mesh("cpu", (num_replicas, num_shards), mesh_dim_names=("replicate", "shard"))
    replica = mesh["replicate"].get_local_rank()
    model = model_of(seed + replica)
    model[4].weight.requires_grad_(False)  # 3 rows, which two processes cannot share evenly
    inner = sharded(model, mesh["shard"]) if num_shards > 1 else model
    wrapper = make(inner, device_mesh=mesh["replicate"], algorithm=DiLoCo(sync_every=3))
    return wrapper, torch.optim.Adam(model.parameters(), lr=0.01), replica


def moments_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = (x for of in optimizer.state_dict()["state"].values() for x in of.values())
    return [x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for x in found]


def save(rank: int, folder: str) -> dict[str, list[Tensor]]:
    """Two shards of two replicas, and both again from the checkpoint."""
    torch.set_num_threads(1)
    for make in (gossip, GossipDataParallel):
        wrapper, optimizer, replica = made(0, 2, make)
        model = getattr(wrapper, "module", wrapper)
        train(wrapper, optimizer, replica, range(4))
        path = Path(folder) / make.__name__
        dcp.save({"model": wrapper.checkpoint(optimizer)}, checkpoint_id=path)
        left, moments = parameters_of(model), moments_of(optimizer)
        again, other, _ = made(7, 2, make)
        dcp.load({"model": again.checkpoint(other)}, checkpoint_id=path)
        assert all(map(torch.equal, parameters_of(getattr(again, "module", again)), left))
        for each, stepped in ((wrapper, optimizer), (again, other)):
            train(each, stepped, replica, range(4, 7))
        assert all(map(torch.equal, parameters_of(model), parameters_of(getattr(again, "module", again))))
        state = {"model": wrapper.state_dict()}
        dcp.save(state, checkpoint_id=path / "patchwork")
        dcp.load(state, checkpoint_id=path / "patchwork")
        with pytest.raises(ValueError, match=r"ave and load model.checkpoint\(optimizer\) with"):
            wrapper.load_state_dict(state["model"])
        again.close()
        wrapper.close()
    return {"model": left, "moments": moments, "buffers": [b.clone() for b in model.buffers()]}


def load(folder: str, num_shards: int) -> list[list[Tensor]]:
    wrapper, optimizer, replica = made(7, num_shards, GossipDataParallel)
    dcp.load({"model": wrapper.checkpoint(optimizer)}, checkpoint_id=f"{folder}/GossipDataParallel", **ANY_WORLD)
    found = [parameters_of(wrapper.module), moments_of(optimizer)]
    train(wrapper, optimizer, replica, range(2))
    wrapper.close()
    return found


def load_twice(rank: int, folder: str) -> list[list[list[Tensor]]]:
    """Whole models; then one replica in two shards."""
    torch.set_num_threads(1)
    return [load(folder, num_shards) for num_shards in (1, 2)]


def test_another_sharding_begins_with_the_average(tmp_path: Path) -> None:
    saved = [outcome.result for outcome in run_processes(4, save, str(tmp_path), timeout=100.0)]
    mean = [(x + y) / 2 for x, y in zip(saved[0]["model"], saved[2]["model"], strict=True)]
    for outcome in run_processes(2, load_twice, str(tmp_path), timeout=100.0):
        (model, begun), (shards, moments) = outcome.result
        torch.testing.assert_close(model, mean)
        assert not begun, "the optimizers of other shards begin anew"
        torch.testing.assert_close(shards, mean)
        expected = [(x + y) / 2 for x, y in zip(saved[0]["moments"], saved[2]["moments"], strict=True)]
        torch.testing.assert_close(moments, expected)

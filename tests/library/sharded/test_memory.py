"""A model that is too large for the memory of one process trains in shards."""

from __future__ import annotations

import resource
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gossip_modules import GossipDataParallel
from tests.harness.processes import run_processes

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux limits the data of a process"),
]
WIDTH, LAYERS, LIMIT = 3072, 8, 820  # 288 MB of parameters; MB of data for each process


def train_within_a_limit(rank: int, is_sharded: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with open("/proc/self/status", encoding="utf-8") as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + (LIMIT << 20),) * 2)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for part in (*model, model) if is_sharded else ():
        fully_shard(part, mesh=mesh["shard"])
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter.to_local() if is_sharded else parameter, std=0.01)  # type: ignore[attr-defined]
    wrapper = GossipDataParallel(model, device_mesh=mesh["replicate"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        wrapper(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()
    assert wrapper.comm_stats()["num_rounds"] == 3
    wrapper.close()


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_model_trains_in_shards_that_fits_in_no_process(is_sharded: bool) -> None:
    outcomes = run_processes(4, train_within_a_limit, is_sharded, expect_result=False, timeout=180.0)
    errors = [outcome.error for outcome in outcomes]
    assert errors == [""] * 4 if is_sharded else any("can't allocate memory" in error for error in errors), errors

"""Names of backends: every NCCL that torch has gets the wire and the batches of NCCL, whatever it calls itself."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import connect
from gossip_modules.transport.process_group import backend_of
from tests.harness.named_group import NamedGroup
from tests.harness.processes import run_processes
from tests.harness.ranks import CPU, TIMEOUT, solo_group

CUDA = torch.device("cuda", 0)
# How torch 2.15's answer, by the names "nccl" or "nccl2", "nccl-lazy", "nccl4py", "nccl-legacy" (as all before it).
NCCLS = ("nccl2", "nccl-lazy", "nccl4py", "nccl")


@pytest.mark.parametrize("name", [*NCCLS, "NCCL"])
def test_every_nccl_keeps_cuda_messages_on_the_gpu(name: str) -> None:
    group = NamedGroup(name, dist.HashStore(), 0, 1, TIMEOUT)
    transport = connect(group, module_device=CUDA, timeout=TIMEOUT)
    assert (transport.device, transport.backend) == (CUDA, "nccl")


@pytest.mark.parametrize(("name", "backend"), [("Gloo", "gloo"), ("mpi4py", "mpi4py"), ("ucc", "ucc")])
def test_every_other_backend_keeps_its_name(name: str, backend: str) -> None:
    group = NamedGroup(name, dist.HashStore(), 0, 1, TIMEOUT)
    assert backend_of(group, CPU) == backend
    assert connect(group, module_device=CUDA, timeout=TIMEOUT).device == CPU


def test_torch_names_gloo_as_we_do() -> None:
    assert backend_of(solo_group(), CPU) == "gloo"
    with pytest.raises(RuntimeError, match="cuda"):
        backend_of(solo_group(), CUDA)


def talk_by_every_name(rank: int, folder: str) -> list[tuple[str, list[int], list[timedelta | None]]]:
    """One round over a group like the default one, by each name: the name, the sizes of batches, how was waited."""
    made: list[NamedGroup] = []
    sizes: list[int] = []
    post = dist.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        sizes.append(len(p2p_op_list))
        return post(p2p_op_list)

    dist.batch_isend_irecv = batch_isend_irecv  # this process ends with the test
    seen = []
    for name in NCCLS:

        def make(options: Any, _: Any, name: str = name) -> NamedGroup:
            made.append(NamedGroup(name, options.store, options.group_rank, options.group_size, options.timeout))
            return made[-1]

        # A name that torch gives no group: as "nccl-legacy", which calls itself "nccl".
        dist.Backend.register_backend(f"made-as-{name}", make, extended_api=True, devices=["cpu"])
        store = dist.FileStore(f"{folder}/{name}", 2)
        dist.init_process_group(f"cpu:made-as-{name}", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
        transport = connect(timeout=TIMEOUT)
        assert len(made) == 2, "the default group and one like it"
        assert transport.group is made[1]
        made[1].timeouts.clear()
        x = torch.full((3,), float(rank))
        transport.exchange({1 - rank: [x]}, {1 - rank: [inbox := torch.zeros(3)]}, tag=0).wait()
        assert torch.equal(inbox, 1.0 - x)
        seen.append((made[1].name(), sizes[:], made[1].timeouts))
        made.clear()
        sizes.clear()
        dist.destroy_process_group()
    return seen


@pytest.mark.e2e
def test_every_nccl_gets_its_round_as_one_batch(tmp_path: Path) -> None:
    """And its wait without a timeout, which would block the host: works of NCCL are in stream order."""
    want = [(name, [2], [None, None]) for name in NCCLS]
    for outcome in run_processes(2, talk_by_every_name, str(tmp_path), backend=None):
        assert outcome.result == want

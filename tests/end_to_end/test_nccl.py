"""Ranks over NCCL equal ranks over Gloo: on one card too, where NCCL takes each rank for a host of its own.

One job of two processes and one of four take all cases, as a process needs seconds for CUDA and NCCL.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    D2,
    DPSGD,
    AllReduceDataParallel,
    BilatGossipDataParallel,
    Choco,
    DeepSqueeze,
    DiLoCo,
    GossipDataParallel,
    GradientTracking,
    GroupAverageDataParallel,
    LocalSGD,
    Moniqua,
    PowerGossip,
    RingGraph,
    SignNorm,
    StreamingDiLoCo,
)
from gossip_modules.graph_manager import NPeerDynamicDirectedExponentialGraph
from tests.harness.problems import fill_, mlp, net, sgd, train_step
from tests.harness.processes import Outcome, run_processes
from tests.harness.progress import local_of
from tests.harness.reference import flatten
from tests.library.wrappers.test_oracle import FixedStaleness, irregular_digraph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.timeout(300),  # the first test trains all cases of its job
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 6
TOLERANCE = 2e-6  # of float32 values below one
Case = Callable[[int], list[Tensor]]


def trained(make: Callable[..., Any], dtype: torch.dtype = torch.float32, **arguments: Any) -> Case:
    """A case: train `make(model, **arguments)`, then read the model, before and after an average."""

    def case(rank: int) -> list[Tensor]:
        model = (net(rank) if dtype is torch.float32 else mlp(rank)).to("cuda", dtype)
        wrapper = make(model, **arguments)
        optimizer = sgd(model)
        for step in range(STEPS):
            train_step(wrapper, optimizer, rank, step)
        wrapper.flush()
        before = flatten(model)
        wrapper.average_()
        wrapper.close()
        return [before, flatten(model)]

    return case


def gossip(**arguments: Any) -> Case:
    """A case of GossipDataParallel whose ranks begin with models of their own."""
    return trained(GossipDataParallel, init_sync=False, **arguments)


def in_chunks(rank: int, *, overlap: bool) -> list[Tensor]:
    """A model of five chunks."""
    model = nn.Sequential(*(fill_(nn.Linear(2048, 2048), rank + i) for i in range(5))).cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.02)
    wrapper = GossipDataParallel(model, overlap=overlap, init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 2048, generator=torch.Generator().manual_seed(rank)).cuda()
    for _ in range(STEPS):
        optimizer.zero_grad()
        wrapper(x).square().mean().backward()
        optimizer.step()
    wrapper.flush()
    wrapper.close()
    return [flatten(model)]


def two_wrappers(rank: int) -> list[Tensor]:
    """Two models that take turns."""
    models = [net(rank + 5 * i).cuda() for i in range(2)]
    wrappers = [GossipDataParallel(model, overlap=i == 1) for i, model in enumerate(models)]
    optimizers = [sgd(model) for model in models]
    for step in range(STEPS):
        for wrapper, optimizer in zip(wrappers, optimizers, strict=True):
            train_step(wrapper, optimizer, rank, step)
    for wrapper in wrappers:
        wrapper.flush()
        wrapper.close()
    return list(map(flatten, models))


def resumed(rank: int) -> list[Tensor]:
    """A checkpoint in the middle, loaded by another wrapper."""
    model, twin = net(rank).cuda(), net(9).cuda()
    wrapper = GossipDataParallel(model, overlap=True, init_sync=False)
    optimizer = sgd(model)
    for step in range(STEPS):
        train_step(wrapper, optimizer, rank, step)
    distance = wrapper.consensus_distance()
    state = wrapper.state_dict()
    wrapper.close()
    other = GossipDataParallel(twin, overlap=True, init_sync=False)
    other.load_state_dict(state)
    optimizer = sgd(twin)
    for step in range(STEPS):
        train_step(other, optimizer, rank, step)
    with other.averaged():
        mean = flatten(twin)
    other.close()
    return [torch.tensor([distance]), mean, flatten(twin)]


PAIR: Mapping[str, Case] = {
    "SGP": gossip(graph=irregular_digraph(2)),
    "Overlap SGP": gossip(graph=irregular_digraph(2), overlap=True),
    "staleness 2": trained(FixedStaleness, init_sync=False, graph=irregular_digraph(2), overlap=True, max_staleness=2),
    "D-PSGD": gossip(algorithm=DPSGD(), graph=RingGraph(2)),
    "bfloat16": gossip(dtype=torch.bfloat16),
    "bfloat16, overlap": gossip(dtype=torch.bfloat16, overlap=True),
    "D2": gossip(algorithm=D2(), graph=RingGraph(2)),
    "gradient tracking": gossip(algorithm=GradientTracking(), graph=RingGraph(2)),
    "CHOCO": gossip(algorithm=Choco(SignNorm(64), step_size=0.3)),
    "DeepSqueeze": gossip(algorithm=DeepSqueeze(SignNorm(64), step_size=0.2)),
    "Moniqua": gossip(algorithm=Moniqua(20.0)),
    "PowerGossip": gossip(algorithm=PowerGossip(rank=2, check_every=1)),
    "PowerGossip, overlap": gossip(algorithm=PowerGossip(rank=2), overlap=True),
    "local SGD": trained(GossipDataParallel, algorithm=LocalSGD(sync_every=2)),
    "DiLoCo": trained(GossipDataParallel, algorithm=DiLoCo(2)),
    "DiLoCo, late": trained(GossipDataParallel, algorithm=DiLoCo(3, delay=1)),
    "Streaming DiLoCo": trained(GossipDataParallel, algorithm=StreamingDiLoCo(4, fragments=2, delay=2)),
    "all-reduce": trained(AllReduceDataParallel),
    "chunks": functools.partial(in_chunks, overlap=False),
    "chunks, overlap": functools.partial(in_chunks, overlap=True),
    "two wrappers": two_wrappers,
    "checkpoint": resumed,
}
FOUR: Mapping[str, Case] = {
    "SGP": gossip(graph=irregular_digraph(4)),
    "Overlap SGP, two peers": gossip(overlap=True, graph=NPeerDynamicDirectedExponentialGraph(4, peers_per_itr=2)),
    "D-PSGD on a ring": gossip(algorithm=DPSGD(), graph=RingGraph(4)),
    "nodes of two": trained(GossipDataParallel, nprocs_per_node=2),
    "nodes of two, overlap": trained(GossipDataParallel, nprocs_per_node=2, overlap=True),
    "DiLoCo": trained(GossipDataParallel, algorithm=DiLoCo(2)),
}


JOBS = {2: PAIR, 4: FOUR}


def train_all(rank: int) -> dict[str, list[Tensor]]:
    """The results of all cases for this number of ranks, each over a group of its own."""
    results = {}
    for name, case in JOBS[dist.get_world_size()].items():
        print(f"rank {rank}: {name}", file=sys.stderr, flush=True)  # the last line names a case that hangs
        results[name] = case(rank)
        torch.cuda.synchronize()
    return results


@functools.cache
def outcomes(world_size: int, backend: str) -> list[Outcome]:
    """The processes of one job."""
    return run_processes(world_size, train_all, backend=backend, timeout=120)


@pytest.mark.parametrize(("n", "name"), [(n, name) for n, cases in JOBS.items() for name in cases])
def test_ranks_over_nccl_equal_ranks_over_gloo(n: int, name: str) -> None:
    for over_nccl, over_gloo in zip(outcomes(n, "nccl"), outcomes(n, "gloo"), strict=True):
        for got, want in zip(over_nccl.result[name], over_gloo.result[name], strict=True):
            torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=TOLERANCE)


def wires(rank: int) -> list[str]:
    """The backends that wrappers choose where the default group has NCCL only."""
    found = []
    for make in (GossipDataParallel, AllReduceDataParallel, BilatGossipDataParallel, GroupAverageDataParallel):
        model = mlp().cuda()
        wrapper = make(model)
        transport = wrapper._transport if isinstance(wrapper, AllReduceDataParallel) else local_of(wrapper).transport
        found.append(f"{make.__name__}: {transport.backend}, {transport.device.type}")
        optimizer = sgd(model)
        for step in range(STEPS):
            train_step(wrapper, optimizer, rank, step)
        wrapper.average_()
        assert bool(flatten(model).isfinite().all())
        wrapper.close()
    return found


def test_wrappers_choose_nccl_where_they_can() -> None:
    for outcome in run_processes(2, wires, backend="nccl"):
        assert outcome.result == [
            "GossipDataParallel: nccl, cuda",
            "AllReduceDataParallel: nccl, cuda",
            "BilatGossipDataParallel: gloo, cpu",
            "GroupAverageDataParallel: gloo, cpu",
        ]


def lose_a_peer(rank: int, overlap: bool) -> str:
    """Rank 1 ends without a word in step 3."""
    wrapper = GossipDataParallel(mlp(rank).cuda(), overlap=overlap, timeout=5)
    optimizer = sgd(wrapper)
    for step in range(1000):
        if rank == 1 and step == 3:
            os._exit(3)
        train_step(wrapper, optimizer, rank, step)
        torch.cuda.synchronize()
    return "trained to the end"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_ends_where_its_peer_is_gone(overlap: bool) -> None:
    """torch ends the process when it has had the time for a report, which the harness makes short."""
    survivor, gone = run_processes(2, lose_a_peer, overlap, backend="nccl", expect_result=False)
    assert gone.exit_code == 3
    assert survivor.exit_code not in (None, 0), survivor


def share_a_card(rank: int) -> None:
    """Ranks of one host on one card."""
    GossipDataParallel(mlp(rank).cuda())


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="needs a single card")
def test_ranks_that_share_a_card_get_a_remedy() -> None:
    for outcome in run_processes(2, share_a_card, backend="cpu:gloo,cuda:nccl", expect_result=False):
        assert "NCCL takes one GPU per rank" in outcome.error
        assert "comm_device='cpu'" in outcome.error

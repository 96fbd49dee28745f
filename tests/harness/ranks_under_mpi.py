"""Ranks under mpirun, and what they do in turn: `mpirun ... python -m tests.ranks_under_mpi CHECK ... FOLDER`."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossip_modules as gm
from gossip_modules.mpi import init_mpi_process_group, register_mpi_backend
from gossip_modules.mpi.group import MpiProcessGroup
from gossip_modules.transport.connect import connect

if TYPE_CHECKING:
    from train.job.world import World

RECIPES = ("sgp", "ar")
DTYPES = (torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64)
REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
PATIENCE = timedelta(seconds=0.5)  # with ranks that never come


def messages_and_collectives(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """What each operation gives to this rank, by name."""
    rank, n = group.rank(), group.size()
    generator = torch.Generator().manual_seed(rank)
    results: dict[str, Tensor] = {}
    for dtype, kind in itertools.product(DTYPES, REDUCTIONS):
        x = torch.randint(1, 4, (7,), generator=generator).to(dtype)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(kind)
        group.allreduce([x], options).wait()
        results[f"all-reduce {kind.name} {dtype}"] = x

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    root = n - 1
    broadcast, reduce = dist.BroadcastOptions(), dist.ReduceOptions()
    gather, scatter = dist.GatherOptions(), dist.ScatterOptions()
    broadcast.rootRank = reduce.rootRank = gather.rootRank = scatter.rootRank = root
    group.broadcast([x := draw(3, 5)], broadcast).wait()
    results["broadcast"] = x
    group.reduce([x := draw(9)], reduce).wait()
    results["reduce"] = x if rank == root else torch.zeros(())  # elsewhere it is not said what is left
    group.allgather([parts := [torch.empty(2, 3) for _ in range(n)]], [draw(2, 3)]).wait()
    results["all-gather"] = torch.stack(parts)
    group.gather([parts] if rank == root else [], [draw(2, 3)], gather).wait()
    results["gather"] = torch.stack(parts)
    group.scatter([x := torch.empty(4)], [list(draw(n, 4).unbind())] if rank == root else [], scatter).wait()
    results["scatter"] = x
    group.barrier().wait()

    # Two messages to each neighbour, received in the other order: tags tell them apart.
    after, before = (rank + 1) % n, (rank - 1) % n
    first, second = torch.empty(50_000), torch.empty(3, dtype=torch.bfloat16)
    works = [group.send([draw(50_000)], after, 5), group.send([draw(3).bfloat16()], after, 6)]
    group.recv([second], before, 6).wait()
    group.recv([first], before, 5).wait()
    for work in works:
        work.wait()
    results.update(first=first, second=second)

    heard = torch.zeros(n)
    if rank == 0:
        for _ in range(n - 1):
            work = group.recv_anysource([x := torch.empty(1)], 7)
            work.wait()
            heard[work._source_rank()] = x[0]
    else:
        group.send([draw(1)], 0, 7).wait()
    results["from any rank"] = heard
    group.barrier().wait()
    return results


def training(make_group: Callable[[], dist.ProcessGroup]) -> dict[str, Tensor]:
    """Models of gossip wrappers after a few steps, by method; torch's global generator is left alone."""
    results = {}
    methods: dict[str, dict[str, object]] = {
        "sgp": {},
        "osgp": {"overlap": True},
        "irregular push-sum": {"graph": "star"},
        "choco": {"algorithm": gm.Choco(gm.SignNorm(), step_size=0.45)},
        "pga, half the bytes": {"schedule": gm.Schedule(average_every=2), "wire_dtype": torch.bfloat16},
    }
    for method, options in methods.items():
        group = make_group()
        generator = torch.Generator().manual_seed(group.rank())
        model = nn.Linear(5, 3)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 15).view(3, 5))
            model.bias.zero_()
        if options.get("graph"):
            options = {"graph": gm.graph_manager.NetworkXGraph(nx.star_graph(group.size() - 1))}
        wrapper = gm.GossipDataParallel(model, process_group=group, **options)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
        for _ in range(6):
            optimizer.zero_grad()
            wrapper(torch.randn(4, 5, generator=generator)).square().mean().backward()
            optimizer.step()
        wrapper.eval()
        results[f"{method}: own"] = model.weight.detach().clone()
        with wrapper.averaged():
            results[f"{method}: averaged"] = model.weight.detach().clone()
        wrapper.close()
    return results


def check_operations(folder: Path) -> None:
    """Everything that works, on 4 ranks; what Gloo threads do as well is left in `folder`."""
    init_mpi_process_group(timeout=timedelta(seconds=30))
    register_mpi_backend()  # again
    rank, n = dist.get_rank(), dist.get_world_size()

    def make_group() -> dist.ProcessGroup:
        group = dist.new_group(backend="mpi4py")
        assert isinstance(group, dist.ProcessGroup)
        return group

    torch.save({**messages_and_collectives(make_group()), **training(make_group)}, folder / f"{rank}.pt")

    # What torch.distributed's own functions make of a group.
    for dtype in (torch.float16, torch.bfloat16, torch.complex64):
        dist.all_reduce(x := torch.full((3,), rank + 0.5).to(dtype))
        assert torch.equal(x, torch.full((3,), n * n / 2).to(dtype))
    dist.all_reduce(x := torch.tensor([rank, 1.0]), dist.ReduceOp.AVG)
    assert x.tolist() == [(n - 1) / 2, 1.0]
    dist.all_reduce(x := torch.tensor([rank > 0, True, False]), dist.ReduceOp.MIN)
    assert x.tolist() == [False, True, False]
    values: list[object] = [None] * n
    dist.all_gather_object(values, {"rank": rank, "text": "x" * rank})
    assert values == [{"rank": i, "text": "x" * i} for i in range(n)]
    world = dist.group.WORLD
    assert world is not None
    single = getattr(world, "all_gather_single", world._allgather_base)
    single(x := torch.empty(2 * n), torch.tensor([rank, 1.0])).wait()
    assert x.view(n, 2)[:, 0].tolist() == list(range(n))
    dist.all_to_all_single(x := torch.empty(n), rank * n + torch.arange(n, dtype=torch.float32))
    assert x.tolist() == [i * n + rank for i in range(n)]
    received = torch.empty(4)
    operations = [
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % n),
        dist.P2POp(dist.irecv, received, (rank - 1) % n),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.tolist() == [(rank - 1) % n] * 4
    odd = dist.new_group([1, 3])
    if rank in (1, 3):
        assert isinstance(odd, dist.ProcessGroup)
        dist.all_reduce(x := torch.ones(1), group=odd)
        assert x.item() == 2
    dist.barrier()
    gloo = dist.new_group(backend="gloo")  # meets through the store in rank 0
    assert isinstance(gloo, dist.ProcessGroup)
    dist.barrier(gloo)
    assert gm.Progress().add(1) in range(1, n + 1)

    data_parallel = gm.AllReduceDataParallel(nn.Linear(2, 1), bucket_cap_mb=1)
    for _ in range(2):
        data_parallel.zero_grad()
        data_parallel(torch.tensor([[1.0, rank]])).sum().backward()
        assert data_parallel.module.weight.grad.tolist() == [[1.0, (n - 1) / 2]]

    # Mistakes.
    other = make_group()
    assert isinstance(other, MpiProcessGroup)
    with pytest.raises(ValueError, match=r"shape \(3, 2\) that is not contiguous, expected x.contiguous"):
        other.send([torch.zeros(2, 3).t()], 0, 1)
    with pytest.raises(ValueError, match=r"reduction SUM of torch.bool, expected one of MIN, MAX, PRODUCT"):
        dist.all_reduce(torch.tensor([True]))
    with pytest.raises(ValueError, match=r"reduction AVG of torch.int64"):
        dist.all_reduce(torch.tensor([1]), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="tag -1, expected 0 to"):
        other.recv([torch.zeros(1)], 0, -1)
    if rank == 1:
        other.send([torch.zeros(2)], 0, 1).wait()
    elif rank == 0:
        with pytest.raises(
            RuntimeError, match=r"12 bytes from rank 1 \(tag 1\): got a message of 8 bytes, expected 12"
        ):
            other.recv([torch.zeros(3)], 1, 1).wait()
        # A receive that nobody answers is taken back, and its memory is free again.
        with pytest.raises(
            RuntimeError, match=r"^rank 0: receive of 4 bytes from rank 2 \(tag 8\): not complete after 0.05 s"
        ):
            other.recv([torch.zeros(1)], 2, 8).wait(timedelta(seconds=0.05))
        listening = other.recv_anysource([torch.zeros(1)], 9)
        other.abort()
        with pytest.raises(RuntimeError, match=r"from any rank .*: the process group was closed"):
            listening.wait()
    dist.barrier()
    other.shutdown()
    other.shutdown()
    for start in (lambda: other.send([torch.zeros(1)], 0, 1), other.barrier):
        with pytest.raises(RuntimeError, match="the process group is closed; make a new one"):
            start()
    if rank in (1, 3):  # last: torch counts the groups that only some ranks make
        assert connect(ranks=[1, 3]).names == [1, 3]
    dist.destroy_process_group()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gossip-")]


def check_failures(folder: Path) -> None:
    """Of 4 ranks 1 never comes; all that wait for it say so in time, and the one that raises ends the job."""
    if hasattr(dist.Backend, "_ensure_backend_registered"):  # this torch asks its plugins for "mpi"
        register_mpi_backend()
        dist.init_process_group("mpi", timeout=timedelta(seconds=30))
    else:
        init_mpi_process_group(timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    group = dist.new_group(backend="mpi4py", timeout=PATIENCE)
    assert isinstance(group, dist.ProcessGroup)
    if rank == 1:
        threading.Event().wait()  # until the job is aborted
    transport = connect(group, timeout=PATIENCE)
    x = torch.zeros(2)
    late = rf"failed after \d+\.\d s \(timeout {PATIENCE.total_seconds():g} s\)"
    with pytest.raises(TimeoutError, match=rf"^rank {rank}: round 3: receive from rank 1 {late}.*rank 1 \(tag"):
        transport.exchange({}, {1: [x]}, tag=3).wait()
    with pytest.raises(
        RuntimeError, match=rf"^rank {rank}: all-reduce among ranks \[0, 1, 2, 3\]: not complete after 0.5 s"
    ):
        group.allreduce([x]).wait()
    others = dist.new_group([0, 2, 3], backend="mpi4py", use_local_synchronization=True)
    assert isinstance(others, dist.ProcessGroup)
    dist.barrier(others)
    with pytest.raises((TimeoutError, ConnectionError), match=r"averaging among ranks .*: rank 1 did not take part"):
        transport.all_reduce(x, what="averaging")
    with pytest.raises(RuntimeError, match=r"ranks \[1\] have not come within 0.5 s"):
        dist.new_group(backend="mpi4py", timeout=PATIENCE)
    (folder / f"{rank}.txt").write_text("all said so", encoding="utf-8")
    dist.barrier(others)
    if rank != 0:
        threading.Event().wait()
    raise LookupError("this rank has an error of its own")


def train_recipes(world: World, folder: Path) -> None:
    """The main job of each of RECIPES, its logs in `folder`."""
    from tests.harness.training import train  # seconds of imports that the other checks do without
    from train.tasks.images.config import Config

    for recipe in RECIPES:
        train(Config(recipe=recipe, epochs=2, out_dir=str(folder / recipe)), world)


def check_training(folder: Path) -> None:
    """The main job's loss curves on 2 ranks."""
    from train.job.world import start_world

    world = start_world("mpi", timedelta(minutes=5))
    assert world.size == 2
    train_recipes(world, folder)
    dist.destroy_process_group()


def train_over_gloo(rank: int, folder: str) -> None:
    """What `check_training` does, in one of 2 processes over Gloo."""
    from tests.harness.training import gloo_world

    train_recipes(gloo_world(), Path(folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    checks = {check.__name__: check for check in (check_operations, check_failures, check_training)}
    *names, target = sys.argv[1:]
    for name in names:
        checks[name](Path(target))

"""Sharded replicas that are each one worker of a membership: they fall and join as one, and average alike."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gossip_modules import (
    AllReduceDataParallel,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    Membership,
    RingGraph,
)
from gossip_modules.extend import PushSum
from gossip_modules.flat.vector import FlatVector
from gossip_modules.membership.generations import Generations
from gossip_modules.membership.links import LinkTransport, Vote, alone, connect_links
from gossip_modules.membership.replica import ReplicaProcesses
from gossip_modules.membership.serve import serve
from gossip_modules.mixing_manager import UniformMixing
from gossip_modules.transport.process_group import ProcessGroupTransport
from tests.harness.processes import run_processes
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, thread_group
from tests.library.membership.stores import exchange_over
from tests.library.sharded.test_replicas import has_exact_shards, model_of, parameters_of, sgd, sharded

SHARDS = 2
NUM_STEPS = 4
SECONDS = 40.0
OPTIONS: dict[str, dict[str, Any]] = {
    "SGP": {"graph": RingGraph},
    "Overlap SGP": {"overlap": True},
    "DiLoCo": {"algorithm": DiLoCo(sync_every=2)},
}


def begin_replica(replica: int, shard: int, folder: str) -> Any:
    """The mesh of one replica, whose processes are a world of their own."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / str(replica)), SHARDS)
    dist.init_process_group("gloo", store=store, rank=shard, world_size=SHARDS, timeout=timedelta(seconds=SECONDS))
    return init_device_mesh("cpu", (SHARDS,), mesh_dim_names=("shard",))


def wrapped(model: Any, port: int, *, name: str = "job", **options: Any) -> tuple[Any, Any, Membership]:
    """The wrapper, the optimizer and the membership of three workers."""
    address = f"127.0.0.1:{port}"
    membership = Membership(address, min_workers=3, name=name, timeout=SECONDS / 2, min_deadline=10.0)
    wrapper = GossipDataParallel(model, membership=membership, **options)
    optimizer = sgd(model)
    membership.track(optimizer=optimizer)
    return wrapper, optimizer, membership


def train(wrapper: Any, optimizer: torch.optim.Optimizer, membership: Membership, step: int) -> None:
    """All processes of a worker have the batches of its rank."""
    optimizer.zero_grad()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * membership.rank + step))
    wrapper(x).square().mean().backward()
    optimizer.step()


def run_without_faults(model: Any, port: int, **options: Any) -> tuple[int, list[Tensor]]:
    """The rank of this worker; its parameters and its weight after all steps, the average, and the distance."""
    wrapper, optimizer, membership = wrapped(model, port, **options)
    for step in membership.steps(NUM_STEPS):
        train(wrapper, optimizer, membership, step)
    wrapper.flush()
    left = [*parameters_of(model), wrapper._local.buffer.vector.push_sum_weight.clone()]
    average = wrapper.averaged_state_dict(rank0_only=False, full=True)
    left += [average[name] for name, _ in model.named_parameters()]
    left += [torch.tensor(wrapper.consensus_distance())]
    rank = membership.rank
    assert wrapper.comm_stats()["num_rounds"] > 0
    wrapper.close()
    return rank, left


def without_faults(rank: int, port: int, folder: str) -> dict[str, Any]:
    replica, shard = divmod(rank, SHARDS)
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = begin_replica(replica, shard, folder)
    if not has_exact_shards({"shard": mesh}):  # type: ignore[arg-type]
        return {}
    results = {}
    for name, options in OPTIONS.items():
        model = sharded(model_of(replica), mesh)
        results[name] = run_without_faults(model, port, name=name, **options)
    frozen = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    parallelize_module(frozen, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    wrapper, *_ = wrapped(frozen, port, name="frozen shards")
    assert wrapper.worker.endswith(f".{shard}"), "also where all shards are frozen the processes are one worker"
    wrapper.close()
    for cls in (AllReduceDataParallel, GroupAverageDataParallel):
        with pytest.raises(ValueError, match=r"sharded over processes .* with a membership, expected a whole model"):
            cls(sharded(model_of(0), mesh), membership=Membership(f"127.0.0.1:{port}", min_workers=1))
    with pytest.raises(ValueError, match=r"rank 1: name of the job: got job 1, expected job 0; wrap"):
        wrapped(sharded(model_of(0), mesh), port, name=f"job {shard}")
    with pytest.raises(ValueError, match="got nprocs_per_node=2 with a module that is sharded"):
        wrapped(sharded(model_of(0), mesh), port, nprocs_per_node=2)
    dist.destroy_process_group()
    return results


@pytest.fixture
def port() -> Iterator[int]:
    store = serve(0, host="127.0.0.1")
    yield store.port
    del store  # it answers for as long as it lives


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_without_faults_models_are_those_of_whole_workers(port: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_processes(3 * SHARDS, without_faults, port, folder, backend=None, timeout=100.0)
    if not outcomes[0].result:
        pytest.skip(f"fully_shard of torch {torch.__version__} computes other gradients over Gloo")
    for name, options in OPTIONS.items():
        firsts = [number // SHARDS for number, outcome in enumerate(outcomes) if outcome.result[name][0] == 0]

        model = model_of(firsts[0])

        def body(_: Any, name: str = name, options: Mapping[str, Any] = options, model: Any = model) -> Any:
            return run_without_faults(copy.deepcopy(model), port, name=f"whole {name}", **options)

        whole = dict(run_ranks(3, body))
        ranks = sorted(outcome.result[name][0] for outcome in outcomes)
        assert ranks == [0, 0, 1, 1, 2, 2]
        for outcome in outcomes:
            rank, got = outcome.result[name]
            # Gloo adds three numbers in an order that depends on their place in the vector.
            torch.testing.assert_close(got, whole[rank], rtol=0, atol=1e-6)
            if name != "DiLoCo":
                num_left = len(got) - len(list(model.parameters())) - 1
                assert all(map(torch.equal, got[:num_left], whole[rank][:num_left])), name


def falling(rank: int, port: int, folder: str, dies: int | None) -> dict[str, Any]:
    """Three replicas. The second one loses a process, and a fourth takes its place; or it loses a link, and falls."""
    replica, shard = divmod(rank, SHARDS)
    mesh = begin_replica(replica, shard, folder)
    gone = Path(folder) / "gone"
    while replica == 3 and not gone.exists():
        time.sleep(0.05)
    model = sharded(model_of(replica), mesh)
    wrapper, optimizer, membership = wrapped(model, port, graph=RingGraph)
    starts: list[tuple[int, bool]] = []
    weights, generations, num_after = {}, {}, 0
    for step in membership.steps(1 << 20):
        starts += [] if starts else [(step, bool(optimizer.state))]
        if replica == 1 and step == 4 and shard == (1 if dies is None else dies):
            if dies is None:
                membership.transport.break_link((membership.rank + 1) % 3)
            else:
                gone.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        train(wrapper, optimizer, membership, step)
        weights[step] = wrapper._local.buffer.vector.push_sum_weight.item()
        generations[step] = membership.generation
        num_after += step > 4 and membership.world_size == 3 and membership.generation >= 3
        if num_after == 5:
            break
        time.sleep(0.1)  # the others leave the processor to the replica that joins
    state = {
        "place": (membership.rank, shard),
        "size": membership.world_size,
        "members": membership.members,
        "starts": starts,
        "weights": weights,
        "generations": generations,
        "left": torch.cat([x.flatten() for x in parameters_of(model)]),
    }
    wrapper.close()
    dist.destroy_process_group()
    return state


@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dies", [0, 1, None], ids=["the first process dies", "another one dies", "a link breaks"])
def test_a_replica_falls_and_joins_as_one(port: int, dies: int | None) -> None:
    num_replicas = 3 if dies is None else 4
    with tempfile.TemporaryDirectory() as folder:
        args: Any = (port, folder, dies)
        outcomes = run_processes(
            num_replicas * SHARDS, falling, *args, expect_result=False, backend=None, timeout=100.0
        )
    fallen = [] if dies is None else [outcomes.pop(SHARDS) for _ in range(SHARDS)]
    if dies is not None:
        killed, other = fallen[dies], fallen[1 - dies]
        assert killed.exit_code == -signal.SIGKILL
        assert "onnection" in other.error
        assert other.seconds < SECONDS
    results = [outcome.result for outcome in outcomes]
    assert all(results), outcomes
    assert sorted(result["place"] for result in results) == [(i, j) for i in range(3) for j in range(SHARDS)]
    for one, two in zip(results[::2], results[1::2], strict=True):
        for name in ("size", "members", "starts", "weights", "generations"):
            assert one[name] == two[name], f"the shards of a replica are averaged alike: {name}"
        assert torch.equal(one["left"], two["left"])
        assert bool(one["left"].isfinite().all())
    assert {result["members"] for result in results} == {results[0]["members"]}
    assert 3 in results[0]["members"], "a replica has joined"
    if dies is not None:
        ((first, has_state),) = results[-1]["starts"]
        assert first > 4
        assert has_state, "the state of the optimizer came from the donor"


def vote_of(groups: list[dist.ProcessGroup]) -> Vote:
    return Vote(*(ProcessGroupTransport(g, device=CPU, timeout=TIMEOUT, names=range(g.size())) for g in groups))


def test_processes_that_lose_different_peers_average_alike() -> None:
    """A link of one process breaks, before a round, in it and before a collective: all of the replica leave it out."""
    size = 3
    mixing = UniformMixing(RingGraph(size, peers_per_itr=2))
    links, inside = [dist.HashStore() for _ in range(SHARDS)], [dist.HashStore() for _ in range(2 * size)]
    posted = threading.Barrier(size * SHARDS)

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        replica, shard = divmod(group.rank(), SHARDS)
        transport: LinkTransport = connect_links(
            exchange_over(links[shard], replica, size),
            replica,
            size,
            range(size),
            store=links[shard],
            names=range(size),
            timeout=TIMEOUT,
            patience=TIMEOUT,
            on_lost=lambda peer, error, is_closed: None,
        )
        transport.vote_by(vote_of([thread_group(inside[2 * replica + k], shard, SHARDS) for k in range(2)]))
        mixer = PushSum()
        mixer.bind(mixing, transport)
        s, seen = FlatVector.over(torch.tensor([1.0 + replica])), []
        for t in range(4):
            if t == 1 and (replica, shard) == (0, 1):
                transport.break_link(1)
            if t == 2 and (replica, shard) == (2, 0):
                posted.wait()
                transport.break_link(0)
            mixer.start(s, t)
            if t == 2 and (replica, shard) != (2, 0):
                posted.wait()
            mixer.finish(s)
            seen.append(torch.cat([s.segments[0], s.push_sum_weight, torch.tensor(sorted(transport.lost))]))
            # From t = 1 on all processes of place 1 have lost their common group, and those of place 0 have not.
            with contextlib.nullcontext() if t == 0 else pytest.raises(ConnectionError):
                transport.all_reduce(torch.ones(1), what="a sum")
            with contextlib.nullcontext() if t == 0 else pytest.raises(ConnectionError), transport.as_one_collective():
                for _ in range(2 - shard):
                    transport.all_reduce(torch.ones(1), what="one of another number of sums")
        transport.close()
        assert transport.vote is not None
        transport.vote.close()
        return seen

    results = run_ranks(size * SHARDS, body)
    for one, two in zip(results[::2], results[1::2], strict=True):
        assert all(map(torch.equal, one, two))
    mass = torch.stack([models[-1][:2] for models in results[::2]]).sum(0)
    torch.testing.assert_close(mass, torch.tensor([6.0, 3.0], dtype=mass.dtype))
    assert [models[-1][2:].tolist() for models in results[::2]] == [[1.0, 2.0], [0.0], [0.0]]


def _repeat(act: Callable[[], object]) -> None:
    while True:
        act()


@pytest.mark.parametrize(("ends", "is_joining"), [(0, False), (2, False), (2, True)])
def test_the_processes_of_a_replica_name_the_one_that_has_ended(ends: int, is_joining: bool) -> None:
    """Also where the first process waits for other workers; none of them waits for the whole timeout."""
    num_processes = 3
    stores = [dist.HashStore() for _ in range(3)]

    def body(group: dist.ProcessGroup) -> str:
        rank = group.rank()
        membership = Membership(dist.HashStore(), min_workers=2, min_deadline=20.0)
        membership.job.participant = Mock()
        control, *votes = [thread_group(store, rank, num_processes) for store in stores]
        transport = ProcessGroupTransport(control, device=CPU, timeout=TIMEOUT, names=range(num_processes))
        processes = membership.node = ReplicaProcesses(membership, transport, vote_of(votes))
        assert processes.as_one(lambda: None) is None
        if rank == ends:
            # As at the end of its process, but that its control messages are still answered.
            threading.Timer(0.2 if is_joining else 0.0, partial(processes._monitor.close, is_met=True)).start()
        act = membership._come if is_joining else lambda: None
        with pytest.raises(ConnectionError) as raised:
            _repeat(partial(processes.as_one, act))
        if rank != ends:
            with pytest.raises(ConnectionError, match="the replica falls"):
                processes.vote.any(False)
        membership.release()
        processes.close()
        return str(raised.value)

    told = run_ranks(num_processes, body)
    for rank in {*range(num_processes)} - {ends}:
        assert f"process {ends} of this replica has ended: the replica falls" in told[rank]
    if is_joining:
        assert "this worker has failed before the job began" in told[0]


@pytest.mark.parametrize("shard", [0, 1])
def test_links_of_a_generation_that_another_process_may_begin_outlive_the_store(shard: int) -> None:
    """The first process may have read that it has formed, and another one may not have, when the store went."""
    roster = SimpleNamespace(view=None)
    generations = Generations(SimpleNamespace(job=SimpleNamespace(shard=shard), roster=roster))
    generations.formed = {2: alone(TIMEOUT)}
    links = generations.formed[2]
    generations.form_again()
    assert (2 in generations.formed) == bool(shard)
    links.close()

"""Several processes per node: n nodes of g processes equal n ranks with g times the batch."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import DiLoCo, GossipDataParallel, Schedule
from gossip_modules.extend import ProcessGroupTransport
from gossip_modules.graph_manager import GraphManager, NetworkXGraph, NPeerDynamicDirectedExponentialGraph
from gossip_modules.worlds.world import ModelWorld
from gossip_modules.wrappers.node import Node
from tests.harness.problems import adamw, batch, loss_of, mlp, numerator, sgd, train_step
from tests.harness.processes import run_processes
from tests.harness.ranks import CPU, TIMEOUT, run_ranks
from tests.harness.reference import Oracle, flatten, uniform

NUM_STEPS = 6
PER_NODE = 2


def zero(module: nn.Module) -> torch.optim.Optimizer:
    """`adamw`, each process of the node with the state of some parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    node = range(dist.get_rank() // PER_NODE * PER_NODE, (dist.get_rank() // PER_NODE + 1) * PER_NODE)
    group = dist.new_group(list(node), use_local_synchronization=True)
    settings = adamw(module).param_groups[0]
    options = {name: settings[name] for name in ("lr", "weight_decay", "eps")}
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, process_group=group, **options)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "zero": zero}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("adamw", {"overlap": True}),
    ("zero", {}),
    ("sgd", {"overlap": True, "max_staleness": 1}),
    ("adamw", {"schedule": Schedule(gossip_every=2, average_every=2)}),
]


def graph_of(num_nodes: int) -> GraphManager:
    """Two nodes: the default graph. Three: an irregular digraph, on which the push-sum weight moves."""
    if num_nodes == 2:
        return NPeerDynamicDirectedExponentialGraph(2)
    return NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))


def node_loss(model: nn.Module, node: int, step: int) -> Tensor:
    """The loss on the batches of all processes of a node as one batch."""
    parts = [batch(PER_NODE * node + i, step) for i in range(PER_NODE)]
    x, y = (torch.cat(tensors).double() for tensors in zip(*parts, strict=True))
    return nn.functional.mse_loss(model(x), y)


def raise_and_go_on(rank: int, *, is_sick: bool, **options: Any) -> None:
    """Where the shard of one process has infinities all processes of the node raise, and their next step works."""
    wrapper = GossipDataParallel(mlp(), nprocs_per_node=PER_NODE, timeout=timedelta(seconds=20), **options)
    loss_of(wrapper, rank, 0)
    wrapper.flush()
    last = list(wrapper.parameters())[-1].detach()
    saved = last.clone()
    if is_sick:
        last[-1] = float("inf")  # of the last shard
    has_raised = False
    try:
        for step in (1, 2):
            loss_of(wrapper, rank, step)
    except FloatingPointError as error:
        has_raised = True
        is_told = "another process of its node has found infinities or NaN" in str(error)
        assert is_told is (rank % PER_NODE == 0 and wrapper.overlap)  # else it has seen them in the whole or its shard
    if is_sick:
        last.copy_(saved)
    assert has_raised or not is_sick
    for step in (
        (3, 4, 5) if has_raised else (3,)
    ):  # ranks without an error have waited for the rounds of ranks with one
        loss_of(wrapper, rank, step)
    wrapper.flush()
    assert bool(flatten(wrapper.module).isfinite().all())
    wrapper.average_()
    wrapper.close()


def body(rank: int, num_nodes: int) -> dict[str, Any]:
    """All cases in one start: after every step of each the parameters; then what is left."""
    cases = []
    for name, options in CASES:
        wrapper = GossipDataParallel(
            mlp(rank // PER_NODE), graph=graph_of(num_nodes), nprocs_per_node=PER_NODE, init_sync=False, **options
        )
        optimizer = OPTIMIZERS[name](wrapper)
        steps = []
        for step in range(NUM_STEPS):
            train_step(wrapper, optimizer, rank, step)
            steps.append(numerator(wrapper))
        wrapper.flush()
        flushed = flatten(wrapper.module)
        distance = wrapper.consensus_distance()
        with wrapper.averaged():
            average = flatten(wrapper.module)
        stats = wrapper.comm_stats()
        wrapper.close()
        cases.append({"x": torch.stack(steps), "z": flushed, "average": average, "distance": distance, **stats})
    if num_nodes == 2:  # each hears the other one in every round
        for options in ({"push_sum": False}, {"overlap": True}):
            raise_and_go_on(rank, is_sick=rank >= PER_NODE, **options)
    # Accumulation reduces inside the node once; Join is refused.
    wrapper = GossipDataParallel(mlp(), graph=graph_of(num_nodes), nprocs_per_node=PER_NODE)
    with wrapper.no_sync():
        loss_of(wrapper, rank, 0).backward()
    loss_of(wrapper, rank, 1).backward()
    gradient = torch.cat([p.grad.flatten() for p in wrapper.parameters() if p.grad is not None])
    with pytest.raises(ValueError, match=r"several processes hold together .* inside Join, expected a whole"):
        wrapper.join_hook()
    wrapper.close()
    return {"cases": cases, "gradient": gradient}


def test_messages_between_the_processes_of_a_node_are_counted() -> None:
    """Over NCCL they have a second connection for it, in CPU memory."""

    def body(group: dist.ProcessGroup) -> None:
        node = object.__new__(Node)
        node.transport, other = (ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT) for _ in range(2))
        for control in (node.transport, other):
            node.control = control
            before = node.num_bytes_sent
            assert not ModelWorld(control).agree(group.rank() == 0)
            assert node.num_bytes_sent == before + 4  # 2 (g - 1) / g of a float32
        node.close()

    run_ranks(PER_NODE, body)


@pytest.mark.e2e
@pytest.mark.parametrize("num_nodes", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_nodes_equal_ranks_with_a_larger_batch(num_nodes: int) -> None:
    results = [outcome.result for outcome in run_processes(PER_NODE * num_nodes, body, num_nodes)]
    for i, (name, options) in enumerate(CASES):
        schedule = options.get("schedule", Schedule())
        models = [mlp(node).double() for node in range(num_nodes)]
        oracle = Oracle(
            models,
            [(sgd if name == "sgd" else adamw)(model) for model in models],
            uniform(graph_of(num_nodes)),
            gossip_every=schedule.gossip_every,
            average_every=schedule.average_every,
            overlap=bool(options.get("overlap")),
            max_staleness=int(options.get("max_staleness", 0)),
        )
        steps = list(oracle.run(NUM_STEPS, node_loss))
        last = oracle.flush()
        mean = last.numerators.mean(0)
        distance = (last.estimates - mean).pow(2).sum(1).mean().sqrt()
        for rank, result in enumerate(results):
            got, node = result["cases"][i], rank // PER_NODE
            want = torch.stack([step.numerators[node] for step in steps])
            torch.testing.assert_close(got["x"], want, rtol=0, atol=1e-6)
            torch.testing.assert_close(got["z"], last.estimates[node], rtol=0, atol=1e-6)
            torch.testing.assert_close(got["average"], mean, rtol=0, atol=1e-6)
            assert got["distance"] == pytest.approx(float(distance), rel=1e-4, abs=1e-6)
            assert torch.equal(got["x"], results[PER_NODE * node]["cases"][i]["x"]), "a node holds one model"
            assert got["bytes_sent"] > 0
    for result in results:  # all nodes started from rank 0, but have batches of their own
        assert bool(result["gradient"].isfinite().all())
    for rank in range(0, len(results), PER_NODE):
        assert torch.equal(results[rank]["gradient"], results[rank + 1]["gradient"])


def share_buffers(rank: int) -> dict[str, Any]:
    """BatchNorm on two nodes of two; then one process alone evaluates."""
    results: dict[str, Any] = {}
    node_step = range(2)
    for name, momentum in (("frozen", 0.0), ("running", 0.1)):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 2))
        mean = model.get_buffer("1.running_mean")
        wrapper = GossipDataParallel(model, nprocs_per_node=PER_NODE, timeout=timedelta(seconds=10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        mean.fill_(float(rank))
        loss_of(wrapper, rank, 0)
        results[f"{name} after a round"] = mean.clone()
        mean.fill_(float(rank))
        wrapper.average_()
        results[f"{name} averaged"] = mean.clone()
        for step in node_step:
            train_step(wrapper, optimizer, rank, step)
        if rank == 0:
            wrapper.eval()
            with torch.no_grad():
                wrapper(batch(rank, 9)[0])
            wrapper.train()
        for step in node_step:
            train_step(wrapper, optimizer, rank, step)
        wrapper.average_()
        results[f"{name} at the end"] = flatten(model)
        results[f"{name} rounds"] = wrapper.comm_stats()["num_rounds"]
        wrapper.close()
    return results


@pytest.mark.soak
@pytest.mark.e2e
def test_buffers_are_those_of_local_rank_0_and_one_process_may_evaluate_alone() -> None:
    results = [outcome.result for outcome in run_processes(2 * PER_NODE, share_buffers)]
    for result in results:
        # Local ranks 0 are ranks 0 and 2: the nodes have 0 and 2, whose average is 1.
        assert torch.equal(result["frozen after a round"], torch.full((4,), 1.0))
        for name in ("frozen", "running"):
            assert torch.equal(result[f"{name} averaged"], torch.full((4,), 1.0))
            assert torch.equal(result[f"{name} at the end"], results[0][f"{name} at the end"])
            assert result[f"{name} rounds"] == 4  # the first two forwards are of one optimizer step


def copy_and_close(rank: int) -> dict[str, Tensor]:
    """Copies of a node before and after its end; then one process alone trains on."""
    wrapper = GossipDataParallel(mlp(), nprocs_per_node=PER_NODE, timeout=timedelta(seconds=10))
    train_step(wrapper, sgd(wrapper), rank, 0)
    early = copy.deepcopy(wrapper)
    wrapper.close()
    train_step(early, sgd(early), rank, 1)  # which still gossips
    early.close()
    late = copy.deepcopy(wrapper)
    results = {"early": flatten(early.module), "late before": flatten(late.module)}
    auto = GossipDataParallel(mlp(), nprocs_per_node=PER_NODE, overlap="auto")
    optimizer = sgd(auto)
    for step in range(10):
        train_step(auto, optimizer, rank, step)
    assert auto.overlap_choice is not None
    results["measured"] = torch.tensor([auto.overlap_choice.step_seconds, auto.overlap_choice.round_seconds])
    auto.close()
    if rank == 0:
        for model in (wrapper, late):
            train_step(model, sgd(model), rank, 2)
            with model.no_sync():
                loss_of(model, rank, 3).backward()
    return {**results, "closed": flatten(wrapper.module), "late": flatten(late.module)}


@pytest.mark.e2e
def test_after_close_a_process_of_a_node_is_alone() -> None:
    first, second = (outcome.result for outcome in run_processes(PER_NODE, copy_and_close))
    for name in ("early", "late before", "measured"):
        assert torch.equal(first[name], second[name])
    for name in ("closed", "late"):
        assert torch.equal(second[name], second["late before"])
        assert not torch.equal(first[name], second[name])
    assert torch.equal(first["closed"], first["late"])


class Halves(nn.Module):
    """Two vectors; a node of two processes cuts the model between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(64, dtype=torch.float64)) for _ in range(2))

    def forward(self, node: int, step: int) -> Tensor:
        """A loss whose gradient of `a` is equal on all nodes; the gradient of `b` is opposite until step 5."""
        sign = 1.0 if step > 5 else 1.0 - 2.0 * node
        return self.a.sum() + sign * self.b.sum()


def adaptive_steps(wrapper: GossipDataParallel, node: int) -> Tensor:
    """The first entries of both vectors before each optimizer step, float64 [14, 2]."""
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    steps = []
    for step in range(14):
        loss = wrapper(node, step)
        steps.append(torch.stack([x.detach()[0] for x in wrapper.parameters()]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    wrapper.close()
    return torch.stack(steps)


ADAPTIVE = DiLoCo(3, lr=1.0, momentum=0.0, delay=1, arrival="adaptive")


def decide_in_node(rank: int) -> tuple[Tensor, str]:
    """The steps with adaptive arrival; then the error where the processes of a node have counted other tokens."""
    steps = adaptive_steps(GossipDataParallel(Halves(), nprocs_per_node=PER_NODE, algorithm=ADAPTIVE), rank // PER_NODE)
    wrapper = GossipDataParallel(Halves(), nprocs_per_node=PER_NODE, algorithm=DiLoCo(1, weighted_by="tokens"))
    wrapper(rank // PER_NODE, 0).backward()
    torch.optim.SGD(wrapper.parameters(), lr=0.1).step()
    wrapper.count_tokens(3 + rank)
    try:
        wrapper(rank // PER_NODE, 1)
    except ValueError as error:
        return steps, str(error)
    return steps, ""


@pytest.mark.e2e
def test_the_processes_of_a_node_decide_by_the_whole_model() -> None:
    """The drifts of `a` agree and those of `b` do not; both halves go the way of ranks with a whole model."""

    def whole(group: dist.ProcessGroup) -> Tensor:
        return adaptive_steps(GossipDataParallel(Halves(), process_group=group, algorithm=ADAPTIVE), group.rank())

    expected = run_ranks(2, whole)
    assert not torch.equal(expected[0][:, 0].diff(), expected[0][:, 0].diff()[:1].expand(13))  # some steps are dropped
    for rank, outcome in enumerate(run_processes(2 * PER_NODE, decide_in_node)):
        steps, error = outcome.result
        torch.testing.assert_close(steps, expected[rank // PER_NODE], rtol=0, atol=1e-12)
        assert f"got {3 + rank} tokens in 1 steps on this process, and other numbers" in error

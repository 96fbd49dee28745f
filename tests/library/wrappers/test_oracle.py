"""Every wrapper equals the dense single-process oracle, step by step; and no gradient step is ever lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import GossipDataParallel, RingGraph, Schedule
from gossip_modules.engine.lockstep import LockstepEngine
from gossip_modules.extend import OverlapEngine
from gossip_modules.graph_manager import (
    CompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    GraphManager,
    HypercubeGraph,
    NetworkXGraph,
    NPeerDynamicDirectedExponentialGraph,
    TorusGraph,
)
from gossip_modules.rounds.mixer import Mixer
from gossip_modules.wrappers.base import GossipWrapper
from tests.harness.cases import each_once
from tests.harness.problems import MakeOptimizer, adamw, loss_of, mlp, net, numerator, sgd, train
from tests.harness.ranks import run_ranks
from tests.harness.reference import Matrix, Oracle, Snapshot, flatten, metropolis, uniform

TOLERANCE = 1e-6  # of float32 values below one, against float64


class FixedStaleness(GossipDataParallel):
    """Overlap SGP that always uses its staleness in full: so it is a function of the data, and has an oracle."""

    def _make_engine(self, gossiper: Mixer, schedule: Schedule) -> LockstepEngine:
        return OverlapEngine(gossiper, schedule, max_staleness=self.max_staleness, is_eager=False)


def irregular_digraph(n: int, **options: Any) -> GraphManager:
    """A directed cycle and shortcuts from rank 0 to every second rank: strongly connected, degrees differ."""
    graph = nx.cycle_graph(n, create_using=nx.DiGraph)
    graph.add_edges_from((0, j) for j in range(2, n, 2))
    return NetworkXGraph(graph, **options)


def irregular_graph(n: int) -> GraphManager:
    """A path with a triangle at its end: undirected, degrees differ."""
    graph = nx.path_graph(n)
    graph.add_edge(0, min(2, n - 1))
    return NetworkXGraph(graph)


def is_symmetric(graph: GraphManager) -> bool:
    """By definition, over more rounds than any test runs."""
    n = graph.world_size
    return all(i in graph.out_peers(j, t) for t in range(16) for i in range(n) for j in graph.out_peers(i, t))


def is_regular(graph: GraphManager) -> bool:
    """Whether the uniform matrix of every round has rows that sum to one."""
    return all(bool((uniform(graph)(t).sum(1) - 1).abs().max() < 1e-12) for t in range(16))


def oracle(
    graph: GraphManager, optimizer: MakeOptimizer, num_steps: int, *, push_sum: bool = True, **options: Any
) -> list[Snapshot]:
    """The oracle's steps, and after them its flushed state."""
    matrix: Matrix = metropolis(graph) if not push_sum and is_symmetric(graph) else uniform(graph)
    models = [net(rank).double() for rank in range(graph.world_size)]
    reference = Oracle(models, [optimizer(model) for model in models], matrix, **options)
    return [*reference.run(num_steps, loss_of), reference.flush()]


def assert_equal(ranks: Sequence[Snapshot], expected: Sequence[Snapshot], tolerance: float = TOLERANCE) -> None:
    """Every rank at every step: estimate, numerator and push-sum weight."""
    for i, name in enumerate(Snapshot._fields):
        got = torch.stack([rank[i] for rank in ranks], dim=1)
        want = torch.stack([step[i] for step in expected])
        error = (got - want).abs() / want.abs().clamp(min=1)
        assert got.shape == want.shape
        assert error.max() < tolerance, f"{name}: off by {error.flatten(1).amax(1).tolist()} at steps 0, 1, ..."


def run(
    group: dist.ProcessGroup,
    make: Callable[..., GossipWrapper],
    optimizer: MakeOptimizer,
    num_steps: int,
    device: str = "cpu",
    **options: Any,
) -> Snapshot:
    """One rank of the library: its steps, then what is left after flush()."""
    wrapper = make(net(group.rank()).to(device), init_sync=False, process_group=group, **options)
    steps = train(wrapper, optimizer(wrapper.module), group.rank(), num_steps)
    wrapper.flush()
    weight = wrapper.get_extra_state()["weight"].cpu()
    z = flatten(wrapper.module)
    wrapper.close()
    return Snapshot(*(torch.cat([x, y]) for x, y in zip(steps, (z[None], z[None] * weight, weight), strict=True)))


GRAPHS: dict[str, Callable[[int], GraphManager]] = {
    "DynamicDirectedExponentialGraph": DynamicDirectedExponentialGraph,
    "NPeerDynamicDirectedExponentialGraph": NPeerDynamicDirectedExponentialGraph,
    "DynamicBipartiteExponentialGraph": DynamicBipartiteExponentialGraph,
    "DynamicDirectedLinearGraph": DynamicDirectedLinearGraph,
    "DynamicBipartiteLinearGraph": DynamicBipartiteLinearGraph,
    "RingGraph": RingGraph,
    "TorusGraph": TorusGraph,
    "HypercubeGraph": HypercubeGraph,
    "CompleteGraph": CompleteGraph,
    "irregular digraph": irregular_digraph,
    "irregular graph": irregular_graph,
}


def is_possible(name: str, n: int) -> bool:
    """Whether a graph of this kind exists for n ranks."""
    if "Bipartite" in name:
        return n % 2 == 0
    return n in {"HypercubeGraph": (2, 4, 8), "TorusGraph": (2, 3, 4, 6, 8, 9)}.get(name, range(2, 10))


# One size for each graph; the others are for the soak tests, since weights have contract suites of their own.
SIZES = {"DynamicDirectedExponentialGraph": 8, "DynamicBipartiteLinearGraph": 4, "HypercubeGraph": 4, "RingGraph": 2}
SIZES |= {"DynamicBipartiteExponentialGraph": 8, "TorusGraph": 4, "CompleteGraph": 3, "irregular graph": 4}
CASES = [
    pytest.param(name, n, marks=() if n == SIZES.get(name, 5) else pytest.mark.soak)
    for name in GRAPHS
    for n in range(2, 10)
    if is_possible(name, n)
]


# A run is push_sum and an optimizer, here by their indices; two runs that differ in both are a pair. The two pairs are
# all four runs: every graph has them over the sizes 2 and 4, and each size has both optimizers and algorithms.
PAIRS = [((0, i), (1, 1 - i)) for i in (0, 1)]
OPTIMIZERS = [sgd, adamw]


@pytest.mark.parametrize(("name", "n"), CASES)
def test_synchronous_wrappers_equal_the_oracle(name: str, n: int) -> None:
    graph = GRAPHS[name](n)
    num_steps = min(max(graph.period + 1, 4), 7)
    push_sums = (True, False) if is_symmetric(graph) or is_regular(graph) else (True, True)
    cases = [(push_sums[i], OPTIMIZERS[j]) for i, j in PAIRS[n // 2 % 2]]

    def body(group: dist.ProcessGroup) -> list[Snapshot]:
        options: dict[str, Any] = {"graph": GRAPHS[name](n)}
        return [run(group, GossipDataParallel, opt, num_steps, push_sum=push, **options) for push, opt in cases]

    ranks = run_ranks(n, body)
    for i, (push_sum, optimizer) in enumerate(cases):
        assert_equal([rank[i] for rank in ranks], oracle(graph, optimizer, num_steps, push_sum=push_sum))


SCHEDULES: list[tuple[dict[str, Any], GraphManager]] = [
    ({"gossip_every": 2}, NPeerDynamicDirectedExponentialGraph(4)),
    ({"gossip_every": 3, "average_every": 2}, irregular_digraph(5)),
    ({"average_every": 3}, RingGraph(5)),
    ({"average_every": 1}, irregular_digraph(4)),
    ({}, NPeerDynamicDirectedExponentialGraph(6, peers_per_itr={0: 2, 3: 1, 5: 3})),
    ({}, DynamicBipartiteExponentialGraph(6, peers_per_itr={0: 1, 4: 2})),
    ({"gossip_every": 2}, irregular_digraph(5, peers_per_itr={0: 2, 2: 1})),
]


@pytest.mark.parametrize(("case", "overlap"), [*each_once(range(len(SCHEDULES)), [True, False]), (1, True)])
def test_schedules_equal_the_oracle(case: int, overlap: bool) -> None:
    schedule, graph = SCHEDULES[case]
    optimizer = OPTIMIZERS[(case + overlap) % 2]

    def body(group: dist.ProcessGroup) -> Snapshot:
        options: dict[str, Any] = {"graph": graph, "schedule": Schedule(**schedule), "overlap": overlap}
        return run(group, GossipDataParallel, optimizer, 9, **options)

    ranks = run_ranks(graph.world_size, body)
    assert_equal(ranks, oracle(graph, optimizer, 9, overlap=overlap, **schedule))


@pytest.mark.parametrize(
    ("name", "max_staleness"), each_once(["NPeerDynamicDirectedExponentialGraph", "irregular digraph"], range(5))
)
def test_overlap_at_a_fixed_staleness_equals_the_oracle(name: str, max_staleness: int) -> None:
    """Both optimizers for every staleness, one on each graph; and both on each graph."""
    graph = GRAPHS[name](5)
    optimizer = OPTIMIZERS[(max_staleness + (name == "irregular digraph")) % 2]
    options: dict[str, Any] = {"overlap": True, "max_staleness": max_staleness}
    ranks = run_ranks(5, lambda group: run(group, FixedStaleness, optimizer, 11, graph=graph, **options))
    assert_equal(ranks, oracle(graph, optimizer, 11, **options))


@pytest.mark.parametrize("name", ["RingGraph", "DynamicBipartiteExponentialGraph", "irregular graph"])
def test_overlapped_push_pull_equals_the_oracle(name: str) -> None:
    """D-PSGD with overlap; with max_staleness=0 the engine has no choice, so the wrapper itself has an oracle."""
    graph = GRAPHS[name](4)
    options: dict[str, Any] = {"overlap": True, "push_sum": False}

    def body(group: dist.ProcessGroup) -> list[Snapshot]:
        return [run(group, GossipDataParallel, optimizer, 8, graph=graph, **options) for optimizer in (sgd, adamw)]

    ranks = run_ranks(4, body)
    for i, optimizer in enumerate((sgd, adamw)):
        assert_equal([rank[i] for rank in ranks], oracle(graph, optimizer, 8, **options))


@pytest.mark.parametrize(
    ("name", "max_staleness"), each_once(["NPeerDynamicDirectedExponentialGraph", "irregular digraph"], range(5))
)
def test_mass_is_conserved_with_gradient_steps_in_flight(name: str, max_staleness: int) -> None:
    """sum_i x_i = sum_i x_i(0) + all that the optimizers did, and sum_i w_i = n, whenever a round is applied."""

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = mlp(group.rank())
        x = flatten(model)  # what this rank put in: its start and its updates, float64 [d]
        wrapper = GossipDataParallel(
            model,
            graph=GRAPHS[name](4),
            overlap=True,
            max_staleness=max_staleness,
            init_sync=False,
            process_group=group,
        )
        optimizer = sgd(model)
        for step in range(12):
            optimizer.zero_grad()
            loss_of(wrapper, group.rank(), step).backward()
            before = numerator(wrapper)
            optimizer.step()
            x += numerator(wrapper) - before
        wrapper.flush()
        weight = wrapper.get_extra_state()["weight"]
        assert wrapper.comm_stats()["num_rounds"] == -(-12 // (max_staleness + 1))
        wrapper.close()
        return flatten(model) * weight - x, weight

    ranks = run_ranks(4, body)
    assert torch.stack([lost for lost, _ in ranks]).sum(0).abs().max() < TOLERANCE
    assert max(float(lost.abs().max()) for lost, _ in ranks) > 1e-3, "nothing was mixed"
    assert float(torch.stack([weight for _, weight in ranks]).sum()) == pytest.approx(4, abs=1e-12)

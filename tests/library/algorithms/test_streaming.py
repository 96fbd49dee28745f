"""Outer steps of fragments, which travel under training: each method computes what its paper says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    QSGD,
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    GossipDataParallel,
    LocalSGD,
    NoLoCo,
    PowerGossip,
    RingGraph,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from gossip_modules.extend import FlatBuffer, OuterMethod
from gossip_modules.graph_manager import DynamicBipartiteExponentialGraph
from gossip_modules.rounds.periodic import cut
from tests.harness.problems import fill_, mlp, net
from tests.harness.progress import engine_of
from tests.harness.quadratics import CURVATURES, LEARNING_RATE, MINIMA, START, descended, solve
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten

NUM_STEPS, NUM_RANKS = 13, 3


class Block(nn.Module):
    """A vector and a matrix; in the flat vector matrices are first."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((70,), start, dtype=torch.float64))
        self.weight = nn.Parameter(torch.full((2, 40), -start, dtype=torch.float64))


def train(outer: OuterMethod) -> list[Tensor]:
    """float64 [3, 300]: bias, weight, bias, weight of all ranks, after each step."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        rank = group.rank()
        model = nn.Module()
        model.one, model.two = Block(0.5), Block(2.0)
        model.forward = lambda: sum(
            CURVATURES[rank] / 2 * (x - MINIMA[rank]).square().sum() for x in model.parameters()
        )
        wrapper = GossipDataParallel(model, process_group=group, algorithm=outer)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        seen = []
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = wrapper()
            seen.append(torch.cat([x.detach().flatten() for x in model.parameters()]))
            loss.backward()
            optimizer.step()
        wrapper.close()
        return seen

    return [torch.stack(models) for models in zip(*run_ranks(NUM_RANKS, body), strict=True)]


def streamed(pieces: Sequence[Tensor], every: int, delay: int, own_weight: float) -> list[Tensor]:
    """Algorithm 2: all models [n, d] at each step; pieces: the elements of each fragment."""
    x = torch.cat([torch.full((1, size), value) for value, size in ((0.5, 70), (-0.5, 80), (2.0, 70), (-2.0, 80))], 1)
    x = x.double().expand(NUM_RANKS, -1).clone()
    phi, m, mean = x[0].clone(), torch.zeros(x.shape[1]).double(), {}
    seen = []
    for k in range(NUM_STEPS):
        for p, piece in enumerate(pieces):
            first = p * every // len(pieces)
            if k >= max(first, 1) and (k - first) % every == 0:
                mean[p, k + delay] = (phi[piece] - x[:, piece]).mean(0)
            if (p, k) in mean:
                drift = mean.pop((p, k))
                m[piece] = 0.9 * m[piece] + drift
                phi[piece] -= 0.7 * (drift + 0.9 * m[piece])
                x[:, piece] = own_weight * x[:, piece] + (1 - own_weight) * phi[piece]
        seen.append(x.clone())
        x = descended(x.T, 1).T
    return seen


def runs_of(*stops: int) -> list[Tensor]:
    return list(torch.arange(300).tensor_split(stops))


@pytest.mark.parametrize(
    ("outer", "pieces"),
    [
        (DiLoCo(4), runs_of()),
        (StreamingDiLoCo(4, fragments=1, delay=3), runs_of()),
        (StreamingDiLoCo(5, fragments=3, delay=2, own_weight=0.25), runs_of(128, 256)),
        (StreamingDiLoCo(2, fragments=5, delay=1), runs_of(64, 128, 192, 256)),  # several in one step
        (StreamingDiLoCo(4, fragments=[["two"], ["one.bias", "one.weight"]], delay=0), [*runs_of(150)[::-1]]),
    ],
    ids=["diloco", "late", "equal-runs", "more-than-steps", "by-name"],
)
def test_streaming_is_its_law(outer: OuterMethod, pieces: list[Tensor]) -> None:
    expected = streamed(pieces, outer.sync_every, int(outer.delay), outer.kept)
    for found, law in zip(train(outer), expected, strict=True):
        torch.testing.assert_close(found, law, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("outer", "num_ranks"),
    [(StreamingDiLoCo(5, fragments=1, delay=0), 5), (EagerDiLoCo(5), 1), (DiLoCo(5), 1)],
    ids=["streaming", "eager-alone", "snoo"],
)
def test_special_cases_are_diloco(outer: OuterMethod, num_ranks: int) -> None:
    phi, m = torch.full((num_ranks,), START, dtype=torch.float64), torch.zeros(1).double()
    for _ in range(4):
        drift = (phi - descended(phi, 5)).mean()
        m = 0.9 * m + drift
        phi = phi - 0.7 * (drift + 0.9 * m)
    torch.testing.assert_close(solve(lambda: {"algorithm": outer}, num_ranks=num_ranks), phi, rtol=0, atol=1e-12)
    if num_ranks == 5:
        assert abs(float(phi[0]) - 0.7702157507) < 1e-9


@pytest.mark.parametrize(
    "outer",
    [LocalSGD(5), LocalSGD(5, fragments=1, delay=2, own_weight=0.0), LocalSGD(5, anchor_device="cpu")],
    ids=["at-once", "late", "in-host-memory"],
)
def test_local_sgd_is_its_law(outer: LocalSGD) -> None:
    """With a delay the difference to the average is added, so that steps under way stay."""
    x, late = torch.full((5,), START, dtype=torch.float64), {}
    for k in range(1, 21):
        x = descended(x, 1)
        if k % 5 == 0:
            late[k + int(outer.delay)] = x.mean() - x
        x = x + late.pop(k, 0.0)
    for change in late.values():  # close() ends the round in flight
        x = x + change
    torch.testing.assert_close(solve(lambda: {"algorithm": outer}), x, rtol=0, atol=1e-12)


def test_eager_is_its_law() -> None:
    phi, m, late = (torch.full((5,), value, dtype=torch.float64) for value in (START, 0.0, 0.0))
    for _ in range(4):
        drift = phi - descended(phi, 5)
        gradient = drift / 5 + late
        m = 0.9 * m + gradient
        phi = phi - 0.7 * (gradient + 0.9 * m)
        late = drift.mean() - drift / 5
    found = solve(lambda: {"algorithm": EagerDiLoCo(5)})
    torch.testing.assert_close(found, phi, rtol=0, atol=1e-12)
    assert found.std() > 0.01


def test_gossip_travels_late_too() -> None:
    """GASLoC's outer step of a rank is in what is sent: with a delay its result comes tau steps later."""
    found = solve(lambda: {"algorithm": GASLoC(5, delay=2), "graph": RingGraph(5, peers_per_itr=2)})
    at_once = solve(lambda: {"algorithm": GASLoC(5), "graph": RingGraph(5, peers_per_itr=2)})
    assert found.isfinite().all()
    assert 1e-3 < float((found - at_once).abs().max()) < 1


@pytest.mark.parametrize("fragments", [1, 2])
def test_each_fragment_meets_every_matrix_of_a_graph(fragments: int) -> None:
    """The default graph of four ranks has two matrices, whose product is the exact average."""
    graph = DynamicBipartiteExponentialGraph(4)
    assert graph.period == 2

    def body(group: dist.ProcessGroup) -> Tensor:
        model = nn.Linear(20, 20)
        outer = GASLoC(2, lr=1.0, momentum=0.0, step_size=1.0, fragments=fragments)
        wrapper = GossipDataParallel(model, process_group=group, algorithm=outer, graph=graph, push_sum=False)
        fill_(model, group.rank())
        for _ in range(5):  # two outer steps of each
            wrapper(torch.zeros(1, 20))
        wrapper.close()
        return flatten(model)

    models = torch.stack(run_ranks(4, body))
    torch.testing.assert_close(models, models.mean(0).expand_as(models))


@pytest.mark.parametrize(
    ("outer", "num_models"),
    [
        *((DiLoCo(2), 3), (StreamingDiLoCo(2, fragments=2), 3), (EagerDiLoCo(2), 4), (SparseLoCo(2), 3)),
        *((DiLoCo(2, lr=1.0, momentum=0.0), 2), (DiLoCo(2, anchor_device="cpu"), 3)),
        *((DiLoCo(2, compressor=QSGD(4)), 4), (EagerDiLoCo(2, compressor=QSGD(4)), 5)),
    ],
    ids=["diloco", "streaming", "eager", "sparse", "localsgd", "in-host-memory", "compressed", "compressed-eager"],
)
def test_memory_is_as_the_pages_say(outer: OuterMethod, num_models: int) -> None:
    """Copies of the model that the engine keeps: tensors that share memory count once."""
    model = nn.Linear(64, 64)
    wrapper = GossipDataParallel(model, process_group=solo_group(), algorithm=outer)
    for _ in range(7):
        wrapper(torch.zeros(1, 64))
    wrapper.flush()
    gossiper: Any = engine_of(wrapper).mixer
    found: dict[int, int] = {}
    for driver in gossiper.drivers:
        memory = driver.memory
        states = [values for outer in memory.optimizers.values() for values in outer.optimizer.state.values()]
        moments = [x for values in states for x in values.values() if torch.is_tensor(x) and x.dim()]
        vectors = [x for entry in memory.entries.values() for x in entry.vector.parts]
        scratch = [vector.flat.raw for vector in memory._scratch.values()]
        for x in (*vectors, *scratch, *moments):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    wrapper.close()
    size = sum(x.nbytes for x in model.parameters())
    assert sum(found.values()) / size == pytest.approx(num_models, rel=0.02)  # aligned to 64 bytes


@pytest.mark.parametrize("make", [mlp, net])
@pytest.mark.parametrize("num_fragments", [1, 2, 5])
def test_equal_runs_have_each_element_once(make: Callable[[], nn.Module], num_fragments: int) -> None:
    buffer = FlatBuffer(make())
    fragments = cut(buffer.vector.layout, num_fragments, buffer.places())
    counts = [torch.zeros(segment.numel) for segment in buffer.vector.layout.segments]
    for fragment in fragments:
        for k, first, last in fragment.ranges:
            counts[k][first:last] += 1
        own = sum(segment.numel for segment in fragment.layout.segments)
        assert abs(own - sum(map(len, counts)) / num_fragments) <= 64
    assert all((count == 1).all() for count in counts)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiLoCo(fragments=0), "DiLoCo: got fragments=0, expected their number, at least 1, or for each"),
        (lambda: DiLoCo(fragments=[]), r"got fragments=\[\], expected their number"),
        (lambda: StreamingDiLoCo(4, delay=4), "got delay=4 with sync_every=4, expected 0 <= delay <= 3 optimizer"),
        (lambda: NoLoCo(own_weight=1.0), "NoLoCo: got own_weight=1.0, expected 0 <= own_weight < 1"),
        (lambda: SlowMo(4, gossip_every=1, delay=1), "got gossip_every=1 with delay=1 and fragments=1"),
        (lambda: EagerDiLoCo(0), "EagerDiLoCo: got sync_every=0"),
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_fragments_that_do_not_fit_the_model_are_refused() -> None:
    wrapper = GossipDataParallel(mlp(), process_group=solo_group(), algorithm=StreamingDiLoCo(fragments=[["0"], ["1"]]))
    with pytest.raises(ValueError, match=r"0 of them with '2.weight', expected each trained tensor in exactly one"):
        wrapper(torch.zeros(2, 3))
    wrapper.close()
    with pytest.raises(
        ValueError,
        match=r"but \['head', '0.w'\] are names of no module, .* expected names such as \['0', '1', '2'\]",
    ):
        GossipDataParallel(mlp(), process_group=solo_group(), algorithm=DiLoCo(fragments=[["0", "head"], ["2", "0.w"]]))


def test_each_fragment_has_links_of_its_own_below_it() -> None:
    """PowerGossip below GASLoC: models that differ come together, in fragments and late."""

    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        model = nn.Linear(20, 10)
        outer = GASLoC(2, momentum=0.0, fragments=2, delay=1)
        graph = RingGraph(3, peers_per_itr=2)
        wrapper = GossipDataParallel(model, process_group=group, algorithm=outer.over(PowerGossip()), graph=graph)
        wrapper(torch.zeros(1, 20))
        fill_(model, group.rank())
        first = wrapper.consensus_distance()
        for _ in range(60):
            wrapper(torch.zeros(1, 20))
        last = wrapper.consensus_distance()
        wrapper.close()
        return first, last

    for first, last in run_ranks(3, body):
        assert last < first / 3

"""The simulator: its numbers against dense oracles, event loops in plain Python, the library's gossip, and facts."""

from __future__ import annotations

import doctest
import importlib
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossip_modules as gm
from gossip_modules.graph_manager.butterfly_groups import ButterflyGroups
from gossip_modules.graph_manager.named_graphs import GRAPHS, named_graph
from gossip_modules.schedule import Action
from gossip_modules.simulate import (
    Choice,
    ComputeModel,
    Consensus,
    Digits,
    LinkModel,
    Prediction,
    Problem,
    Setting,
    advise,
    best,
    simulate,
)
from gossip_modules.simulate.__main__ import main
from gossip_modules.simulate.asynchronous import BilateralMethod
from gossip_modules.simulate.clocks import BucketClock, Clock, OverlapClock, SyncClock, bucket_bytes
from gossip_modules.simulate.codes import code_rows
from gossip_modules.simulate.delays import Message, Network
from gossip_modules.simulate.gossip import ChocoRule, DeepSqueezeRule, LockstepMethod, MoniquaRule, Plain, Rule
from gossip_modules.simulate.groups import GroupMethod
from gossip_modules.simulate.methods import METHODS, make_method
from gossip_modules.simulate.mixing import SimulatedMixing, mixing_for
from gossip_modules.simulate.power_gossip import PowerGossipRule
from tests.harness.ranks import CPU, TIMEOUT, run_ranks

ROOT = Path(__file__).resolve().parents[3]
EVEN = ComputeModel(seconds=0.15, overhead_seconds=0.01)
UNEVEN = ComputeModel(
    seconds=0.1, overhead_seconds=0.02, rank_spread=0.3, step_spread=0.4, straggle_share=0.2, straggle_factor=5, seed=3
)
LINKS = LinkModel(rate_bit_s=1e9)
CLUSTER = Setting(8, 11_175_000, EVEN, LINKS)  # 44.7 MB


def irregular(n: int, *, is_directed: bool) -> gm.GraphManager:
    """A ring with chords from rank 0: degrees differ."""
    graph = nx.cycle_graph(n, create_using=nx.DiGraph if is_directed else nx.Graph)
    graph.add_edges_from((0, j) for j in range(2, n - 1, 2))
    return gm.NetworkXGraph(graph)


def graphs(n: int) -> dict[str, gm.GraphManager]:
    """All kinds that exist for n ranks, with one peer and with more."""
    found: dict[str, gm.GraphManager] = {}
    for name in GRAPHS:
        for peers in (1, 2, None):
            try:
                found[f"{name} {peers}"] = named_graph(name, n, peers)
            except ValueError:
                continue  # no such size
    found["matcha"] = gm.MatchaGraph(nx.cycle_graph(n), budget=0.5, seed=1)
    return {**found, "undirected": irregular(n, is_directed=False), "directed": irregular(n, is_directed=True)}


CASES = [
    pytest.param(graph, push_sum, id=f"{name} n={n} {'push-sum' if push_sum else 'push-pull'}")
    for n in (3, 4, 6, 8)
    for name, graph in graphs(n).items()
    for push_sum in (True, False)
    if push_sum or graph.is_symmetric
]


def lockstep(graph: gm.GraphManager, rule: Rule, *, push_sum: bool = False) -> LockstepMethod:
    network = Network(LINKS, graph.world_size)
    mixing = SimulatedMixing(mixing_for(graph, push_sum=push_sum))
    return LockstepMethod(rule, mixing, gm.Schedule(), SyncClock(EVEN, network, Message(1e6)))


@pytest.mark.parametrize(("graph", "push_sum"), CASES)
def test_consensus_equals_the_product_of_dense_matrices(graph: gm.GraphManager, push_sum: bool) -> None:
    mixing = mixing_for(graph, push_sum=push_sum)
    method = lockstep(graph, Plain(), push_sum=push_sum)
    x = Consensus(seed=2).start(graph.world_size)
    expected, weights = x.clone(), torch.ones(graph.world_size, 1, dtype=torch.float64)
    for t in range(min(12, mixing.period + 2 if mixing.period else 12)):
        method.forward(x)
        expected, weights = mixing.matrix(t) @ expected, mixing.matrix(t) @ weights
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(method.estimates(x), expected / weights, rtol=0, atol=1e-6)


def test_weights_of_its_own_and_schedules_of_peers_are_simulated() -> None:
    graph = gm.NPeerDynamicDirectedExponentialGraph(6, peers_per_itr={0: 2, 3: 1})
    matrices = [gm.UniformMixing(graph).matrix(t) for t in range(8)]
    simulated = SimulatedMixing(gm.UniformMixing(graph))
    ring = gm.RingGraph(6, peers_per_itr=2)
    skewed = gm.MatrixMixing(ring, 0.3 * torch.eye(6) + 0.7 * gm.UniformMixing(ring).matrix(0))
    for t, matrix in enumerate(matrices):
        eye = torch.eye(6, dtype=torch.float64)
        torch.testing.assert_close(simulated.round(t).mix(eye), matrix, rtol=0, atol=1e-12)
        torch.testing.assert_close(SimulatedMixing(skewed).round(t).mix(eye), skewed.matrix(t), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "compressor",
    [
        *(
            gm.SignNorm(),
            gm.SignNorm(64),
            gm.SignNorm(None),
            gm.TopK(0.1),
            gm.RandomK(0.2, seed=3),
            gm.Cast(torch.bfloat16),
        ),
        *(gm.RandomK(0.2, unbiased=True), gm.QSGD(8), gm.QSGD(4, bucket_size=64, seed=5), gm.QSGD(2, unbiased=True)),
    ],
    ids=repr,
)
def test_codes_of_all_rows_are_those_of_the_compressor(compressor: gm.Compressor, dtype: torch.dtype) -> None:
    x = torch.randn(5, 150, generator=torch.Generator().manual_seed(1), dtype=dtype)
    x[3] = 0
    for t in (0, 7):
        for row, coded in zip(x, code_rows(compressor, x, t)):
            message, expected = compressor.message_like(row), torch.zeros_like(row)
            compressor.compress(row, message, t=t)
            compressor.add_decompressed(message, expected)
            torch.testing.assert_close(coded, expected, rtol=1e-5, atol=1e-6)


def test_a_code_of_its_own_is_computed_row_by_row() -> None:
    class Wrapped(gm.Compressor):
        def num_bytes(self, d: int, dtype: torch.dtype) -> int:
            return 2 * d

        def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
            gm.Cast(torch.float16).compress(x, message)

        def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
            gm.Cast(torch.float16).add_decompressed(message, target, alpha=alpha)

        def __repr__(self) -> str:
            return "Wrapped()"

    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(code_rows(Wrapped(), x, 0), x.half().float(), rtol=0, atol=0)


GOSSIPERS: dict[str, tuple[Callable[[], gm.Gossiper], Callable[[], Rule]]] = {
    "choco": (lambda: gm.Choco(gm.SignNorm(), step_size=0.3), lambda: ChocoRule(gm.SignNorm(), step_size=0.3)),
    "deepsqueeze": (
        lambda: gm.DeepSqueeze(gm.QSGD(8), step_size=0.5),
        lambda: DeepSqueezeRule(gm.QSGD(8), step_size=0.5),
    ),
    "moniqua": (lambda: gm.Moniqua(9.0, step_size=0.9, seed=4), lambda: MoniquaRule(theta=9.0, step_size=0.9, seed=4)),
}


@pytest.mark.parametrize("name", GOSSIPERS)
def test_coded_gossip_is_that_of_the_library(name: str) -> None:
    make, make_rule = GOSSIPERS[name]
    ring = gm.RingGraph(4, peers_per_itr=2)
    start = torch.randn(4, 60, generator=torch.Generator().manual_seed(1))

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        gossiper = make()
        gossiper.bind(gm.MetropolisHastingsMixing(ring), gm.ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT))
        x = start[group.rank()].clone()[None]  # a matrix, as lossy codes are of matrices and vectors alike
        return [gossiper.mix(x, t).clone()[0] for t in range(4)]

    ranks = run_ranks(4, body)
    method, x = lockstep(ring, make_rule()), start.clone()
    for t in range(4):
        method.forward(x)
        torch.testing.assert_close(x, torch.stack([rank[t] for rank in ranks]), rtol=0, atol=1e-5)


def test_moniqua_says_when_neighbours_are_too_far_apart() -> None:
    method = lockstep(gm.RingGraph(4, peers_per_itr=2), MoniquaRule(theta=0.01))
    with pytest.raises(
        RuntimeError, match=r"differ by 4\.56 in round 0, expected less than theta=0\.01; give a larger"
    ):
        method.forward(Consensus().start(4))
    with pytest.raises(ValueError, match=r"in round 0, expected less than theta=0\.5; give a larger --theta"):
        simulate("moniqua:ring", replace(CLUSTER, theta=0.5), Consensus())
    nothing = torch.full((4, 3), math.nan)
    assert (
        lockstep(gm.RingGraph(4, peers_per_itr=2), MoniquaRule(1.0))
        .rule.correction(
            nothing, SimulatedMixing(gm.MetropolisHastingsMixing(gm.RingGraph(4, peers_per_itr=2))).round(0), 0
        )
        .isnan()
        .all()
    ), "what has diverged is an error of infinity, not of theta"


def test_moniqua_as_it_is_chosen_is_the_engine_that_a_user_can_have() -> None:
    """By name, with the theta that `simulate` found and says: number by number those of the real gossiper."""
    setting = replace(CLUSTER, world_size=4, seed=3)
    prediction = simulate("moniqua:ring", setting, Consensus(), max_steps=40)
    theta = prediction.options["theta"]
    start = Consensus().start(4)
    largest = float((start - start.roll(1, dims=0)).abs().max())
    assert largest < theta <= 2 * largest
    ring, num_rounds = gm.RingGraph(4, peers_per_itr=2), 40

    def body(group: dist.ProcessGroup) -> Tensor:
        gossiper = gm.Moniqua(theta, step_size=prediction.options["step_size"], seed=3)
        gossiper.bind(gm.MetropolisHastingsMixing(ring), gm.ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT))
        x = start[group.rank()].clone()[None]
        return torch.stack([gossiper.mix(x, t).clone()[0] for t in range(num_rounds)])

    real = torch.stack(run_ranks(4, body), dim=1)
    method, x = make_method(Choice.parse("moniqua:ring"), replace(setting, theta=theta)), start.clone()
    while torch.equal(x, start):
        method.forward(x)
    problem = Consensus()
    problem.start(4)
    for t in range(num_rounds - 1):
        torch.testing.assert_close(x, real[t], rtol=0, atol=1e-12)
        method.forward(x)
    # A fixed grid: what the engine cannot reach, the simulator must not promise.
    assert not prediction.has_reached
    assert prediction.error == pytest.approx(problem.error(real[-1]), rel=0.5)


def test_the_options_of_the_best_are_in_the_advice() -> None:
    plain = prediction("sgp", error=0.3, seconds=2.0)
    chosen = replace(prediction("moniqua", error=0.3, seconds=1.0), options={"theta": 4.0, "step_size": 1.0})
    sentences = advise([chosen, plain], CLUSTER).sentences
    assert "It was simulated with theta=4 and step_size=1; train with the same." in sentences
    assert not any("simulated with" in sentence for sentence in advise([plain], CLUSTER).sentences)


@pytest.mark.parametrize("name", ["bipartite-exponential 1", "ring 2", "matcha", "hypercube None"])
def test_power_gossip_of_full_rank_is_plain_gossip_of_differences(name: str) -> None:
    """With rank = columns the projection is exact, whatever the basis is."""
    graph = graphs(8)[name]
    coded, plain = (lockstep(graph, rule) for rule in (PowerGossipRule((8, 8), rank=8), Plain()))
    x, y = Consensus().start(8), Consensus().start(8)
    for _ in range(7):
        coded.forward(x)
        plain.forward(y)
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


def test_power_iteration_finds_the_largest_difference() -> None:
    """Two workers whose difference has rank one: after an iteration the rest of it is gone, as in plain gossip."""
    u, v = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = torch.stack([torch.zeros(64, dtype=torch.float64), torch.outer(u, v).flatten()])
    lockstep(gm.RingGraph(2), PowerGossipRule((8, 8), num_iterations=2)).forward(x)
    assert float((x[0] - x[1]).norm()) < 1e-9 * float(u.norm() * v.norm())


CONSERVING = ["dpsgd", "sgp", "osgp", "matcha", "choco", "deepsqueeze", "moniqua", "powergossip", "localsgd"]


@pytest.mark.parametrize("name", [*CONSERVING, "choco:ring:topk", "dpsgd:torus", "osgp:linear", "dpsgd:matcha0"])
def test_doubly_stochastic_methods_keep_the_mean(name: str) -> None:
    method = make_method(Choice.parse(name), replace(CLUSTER, compute=UNEVEN, theta=16.0))
    x = Consensus().start(8)
    mean = x.mean(0)
    for _ in range(25):
        method.forward(x)
        torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_ad_psgd_keeps_the_sum_with_what_is_in_flight(n: int) -> None:
    method = make_method(Choice.parse("adpsgd"), replace(CLUSTER, world_size=n, compute=UNEVEN))
    assert isinstance(method, BilateralMethod)
    x = Consensus().start(n)
    mean = x.mean(0)
    for _ in range(60):
        method.forward(x)
        torch.testing.assert_close((x + method.in_flight).mean(0), mean, rtol=0, atol=1e-12)
    assert method.is_stepping is not None
    assert Consensus().start(n).sub(x).abs().max() > 0.1, "nothing was mixed"


def test_all_reduce_learns_like_sgd_on_the_mean_gradient() -> None:
    problem, n = Digits(seed=4), 6
    model = nn.Linear(37, 10, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=problem.learning_rate)
    method, x = make_method(Choice.parse("allreduce"), replace(CLUSTER, world_size=n)), problem.start(n)
    for step in range(12):
        method.forward(x)
        batch = torch.from_numpy(problem.batches(n, step).reshape(-1))
        loss = nn.functional.cross_entropy(model(problem.images[batch]), problem.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update = problem.update(x, step)
        assert update is not None
        x += update
    expected = model.weight.detach().T.flatten()
    torch.testing.assert_close(x.mean(0), expected, rtol=1e-4, atol=1e-5)
    assert float(expected.norm()) > 0.5, "nothing was learnt"


def test_a_method_of_its_own_is_simulated_like_a_named_one() -> None:
    """Any graph, weights, rule, schedule and clock: here those of D-PSGD on a ring, with lazier weights."""
    ring = gm.RingGraph(8, peers_per_itr=2)
    lazy = gm.MatrixMixing(ring, (torch.eye(8) + gm.UniformMixing(ring).matrix(0)) / 2)
    clock = SyncClock(EVEN, CLUSTER.network, CLUSTER.network.plain_message(CLUSTER.model_bytes))
    method = LockstepMethod(Plain(), SimulatedMixing(lazy), gm.Schedule(), clock)
    own, named = simulate(method, CLUSTER, Consensus()), simulate("dpsgd:ring", CLUSTER, Consensus())
    assert own.step_seconds == pytest.approx(named.step_seconds)
    assert own.num_steps > 1.5 * named.num_steps
    assert own.name == "LockstepMethod"
    with pytest.raises(ValueError, match="got a method of 8 workers in a setting of 4, expected as many; make it for"):
        simulate(method, replace(CLUSTER, world_size=4), Consensus())


def test_label_skew_gives_workers_digits_of_their_own() -> None:
    even, skewed = Digits(), Digits(label_skew=1.0)
    own = skewed.labels[torch.from_numpy(skewed.batches(30, 0))]
    assert (own == torch.arange(30)[:, None] % 10).all()
    assert len(even.labels[torch.from_numpy(even.batches(300, 0))].unique()) == 10
    parted, together = (
        simulate("localsgd", replace(CLUSTER, local_steps=20), p, max_steps=19).disagreement for p in (skewed, even)
    )
    assert parted > 2 * together


# Time.


def exchange_of(network: Network, mixing: gm.MixingManager, i: int, t: int, message: Message) -> float:
    """Of rank i in round t, by the definition, link by link."""
    graph, wire = mixing.graph, network.links.wire_seconds(message.num_bytes)
    peers = graph.in_peers(i, t)
    if not peers:
        return 0.0
    loads = [len(peers) * network.slowness[i], *(len(graph.out_peers(j, t)) * network.slowness[j] for j in peers)]
    return wire * float(max(loads)) + network.links.latency_s + len(peers) * message.decode_seconds


def event_loop(
    compute: ComputeModel, network: Network, mixing: gm.MixingManager, message: Message, steps: int, *, overlap: bool
) -> list[list[float]]:
    """Starts of all steps of all ranks: rank by rank, in plain Python."""
    n = network.num_ranks
    here, under_way = [0.0] * n, [0.0] * n
    starts: list[list[float]] = []
    for k in range(steps):
        if k:
            durations = compute.step_seconds(k - 1, num_ranks=n)
            here = [starts[-1][i] + float(durations[i]) for i in range(n)]
        if overlap:
            copies = 2 * network.links.memory_seconds(message.num_bytes)
            begin = [max(here[i], under_way[i]) + copies for i in range(n)]
        else:
            begin = here
        done = [
            max(begin[j] for j in (i, *mixing.graph.in_peers(i, k)))
            + message.encode_seconds
            + exchange_of(network, mixing, i, k, message)
            for i in range(n)
        ]
        starts.append(begin if overlap else done)
        under_way = done
    return starts


def clock_starts(clock: Clock, mixing: gm.MixingManager | None, steps: int, action: Action) -> list[list[float]]:
    starts = []
    for t in range(steps):
        clock.advance(action, None if mixing is None else SimulatedMixing(mixing).round(t))
        starts.append(clock.starts.tolist())
    return starts


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("name", ["npeer-exponential 1", "ring 2", "undirected", "directed", "bipartite-complete 1"])
@pytest.mark.parametrize("n", [4, 5, 6])
def test_rounds_take_what_an_event_loop_says(n: int, name: str, overlap: bool) -> None:
    links = LinkModel(rate_bit_s=2e9, latency_s=0.003, slow_share=0.3, slow_factor=4, seed=n)
    network, message = Network(links, n), Message(1.5e7, encode_seconds=0.01, decode_seconds=0.02)
    mixing = mixing_for(graphs(n)[name], push_sum=True)
    clock = (OverlapClock if overlap else SyncClock)(UNEVEN, network, message)
    expected = event_loop(UNEVEN, network, mixing, message, 15, overlap=overlap)
    got = clock_starts(clock, mixing, 15, Action.GOSSIP)
    for k, (mine, theirs) in enumerate(zip(got, expected)):
        assert mine == pytest.approx(theirs, rel=1e-12), f"step {k}"


@pytest.mark.parametrize("n", [4, 5, 6])
@pytest.mark.parametrize("megabytes", [0.5, 30, 60])
def test_buckets_take_what_an_event_loop_says(n: int, megabytes: float) -> None:
    network, size = Network(LinkModel(rate_bit_s=2e9, latency_s=0.003), n), megabytes * 1e6
    got = clock_starts(BucketClock(UNEVEN, network, Message(size)), None, 10, Action.AVERAGE)
    start = 0.0
    for k in range(1, 10):
        compute = UNEVEN.compute_seconds(k - 1, num_ranks=n).tolist()
        free, reduced = 0.0, 0.0
        for bucket in bucket_bytes(size):
            reduced += bucket
            ready = max(start + 0.02 + c / 3 + 2 / 3 * c * (reduced / size) for c in compute)
            hop = 8 * bucket / n / (2e9 * 0.957) + 0.003
            free = max(free, ready) + 2 * (n - 1) * hop
        start = free
        assert got[k] == pytest.approx([start] * n, rel=1e-12)


def test_periodic_averages_wait_for_the_slowest_and_no_other_step_does() -> None:
    n, size = 5, 1e7
    network = Network(LINKS, n)
    method = make_method(Choice.parse("localsgd"), Setting(n, int(size / 4), UNEVEN, LINKS, local_steps=4))
    x, here = Consensus().start(n), [0.0] * n
    for k in range(13):
        method.forward(x)
        if k % 4 == 0:
            here = [max(here) + network.all_reduce_seconds(size)] * n
        assert method.starts.tolist() == pytest.approx(here, rel=1e-12)
        durations = UNEVEN.step_seconds(k, num_ranks=n).tolist()
        here = [a + b for a, b in zip(here, durations)]


@pytest.mark.parametrize("n", [4, 5, 6])
def test_wait_avoiding_groups_take_what_an_event_loop_says(n: int) -> None:
    links, message, period = LinkModel(rate_bit_s=4e9, latency_s=0.001), Message(1e7), 4
    network = Network(links, n)
    method = GroupMethod(UNEVEN, network, message, ButterflyGroups(n), sync_period=period)
    x = Consensus().start(n)
    here, late, done = [0.0] * n, [False] * n, 0.0
    phase = links.wire_seconds(message.num_bytes) + links.latency_s
    num_phases = int(math.log2(ButterflyGroups(n).group_size)) + (2 if n in (5, 6) else 0)
    for version in range(16):
        method.forward(x)
        durations = UNEVEN.step_seconds(version, num_ranks=n).tolist()
        if version % period == period - 1:
            done = max([done, *here]) + network.all_reduce_seconds(message.num_bytes)
            stepping, late = list(range(n)), [False] * n
            starts = dict.fromkeys(stepping, done)
        else:
            begin = max(done, min(here[i] for i in range(n) if not late[i])) + math.ceil(math.log2(n)) * 0.001
            merging = [i for i in range(n) if late[i] and here[i] <= begin]
            on_time = [i for i in range(n) if not late[i] and here[i] <= begin]
            starts = {i: max(here[i], done) for i in merging}
            done = begin + num_phases * phase
            starts.update(dict.fromkeys(on_time, done))
            late = [i not in starts for i in range(n)]
        assert method.is_stepping is not None
        assert set(method.is_stepping.nonzero().flatten().tolist()) == set(starts)
        for i, start in starts.items():
            assert method.starts[i] == pytest.approx(start, rel=1e-12)
            here[i] = start + durations[i]


@pytest.mark.parametrize("name", ["adpsgd", "dpwa"])
def test_asynchronous_ranks_never_wait(name: str) -> None:
    """Each step starts when the one before has ended and the copies are made; faster ranks take more steps."""
    setting = replace(CLUSTER, world_size=6, compute=replace(UNEVEN, step_spread=0.0, straggle_share=0.0))
    method, x = make_method(Choice.parse(name), setting), Consensus().start(6)
    copies = 2 * LINKS.memory_seconds(setting.model_bytes)
    durations = setting.compute.step_seconds(0, num_ranks=6)
    steps = torch.zeros(6)
    for _ in range(80):
        method.forward(x)
        assert method.is_stepping is not None
        steps += method.is_stepping
    for rank in range(6):
        expected = float(steps[rank]) * copies + (float(steps[rank]) - 1) * float(durations[rank])
        assert method.starts[rank] == pytest.approx(expected, rel=1e-9)
    order = torch.from_numpy(durations).argsort()
    assert (steps[order].diff() <= 0).all()
    assert steps[order[0]] > 1.3 * steps[order[-1]]


MEASURED = {"allreduce": 0.791, "sgp": 0.5495, "dpsgd": 0.550, "osgp": 0.401}
"""Seconds per step on the emulated cluster: 8 hosts, 1 Gbit/s, 44.7 MB, 150 ms of waited compute and 10 around it."""


@pytest.mark.parametrize("name", MEASURED)
def test_steps_take_what_was_measured_within_15_percent(name: str) -> None:
    prediction = simulate(name, CLUSTER, Digits(), target=1e-9, max_steps=40)
    assert prediction.step_seconds == pytest.approx(MEASURED[name], rel=0.15)


def test_an_all_reduce_and_an_exchange_take_what_was_measured() -> None:
    network = CLUSTER.network
    assert network.all_reduce_seconds(44.7e6) == pytest.approx(0.650, rel=0.15)
    assert LINKS.wire_seconds(44.7e6) == pytest.approx(0.374, rel=0.01)
    local = simulate("sgp", replace(CLUSTER, world_size=1), Digits(), target=1e-9, max_steps=10)
    assert local.step_seconds == pytest.approx(0.160, rel=1e-9)


# Predictions.


@pytest.mark.parametrize("problem", [Consensus(), Digits()], ids=["consensus", "digits"])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_in_every_world(name: str, n: int, problem: Problem) -> None:
    prediction = simulate(name, replace(CLUSTER, world_size=n), problem, max_steps=6)
    assert math.isfinite(prediction.error)
    assert prediction.seconds >= 0
    assert 0 <= prediction.waiting_share <= 1
    if n == 1:
        assert prediction.rank_bytes == prediction.waiting_share == prediction.disagreement == 0


def test_consensus_by_all_reduce_is_one_average() -> None:
    prediction = simulate("allreduce", CLUSTER, Consensus(), target=1e-9)
    assert prediction.num_steps == 1
    assert prediction.seconds == prediction.step_seconds == CLUSTER.network.all_reduce_seconds(CLUSTER.model_bytes)


def test_predictions_are_a_function_of_the_seed() -> None:
    setting = replace(CLUSTER, compute=UNEVEN)
    for name in ("dpwa", "adpsgd", "wagma", "matcha", "powergossip"):
        once, again = (simulate(name, setting, Digits(seed=1), max_steps=12) for _ in range(2))
        assert once == again
    other = simulate("dpwa", replace(setting, compute=replace(UNEVEN, seed=4)), Digits(seed=1), max_steps=12)
    assert other != simulate("dpwa", setting, Digits(seed=1), max_steps=12)


def test_bytes_are_those_of_the_messages() -> None:
    size = 4 * 11_175_000
    rounds = {"sgp": 4 * size, "dpsgd:ring": 8 * size, "allreduce": 3 * 2 * 7 / 8 * size}
    for name, expected in rounds.items():
        assert simulate(name, CLUSTER, Digits(), target=1e-9, max_steps=3).rank_bytes == pytest.approx(expected)
    coded = simulate("choco:ring:sign", CLUSTER, Digits(), target=1e-9, max_steps=1)
    assert coded.rank_bytes == 2 * 2 * gm.SignNorm().num_bytes(11_175_000, torch.float32)


def prediction(method: str, *, error: float, seconds: float, disagreement: float = 0.0) -> Prediction:
    return Prediction(
        Choice(method, "", ""), 0.4, error, 10.0, seconds / 10, seconds, 1e6, 0.5, disagreement, max_disagreement=0.2
    )


def test_the_best_reaches_the_target_and_agrees() -> None:
    predictions = [
        prediction("sgp", error=0.39, seconds=9.0),
        prediction("dpwa", error=0.39, seconds=1.0, disagreement=0.5),
        prediction("choco", error=0.41, seconds=2.0),
        prediction("allreduce", error=0.4, seconds=18.0),
        prediction("moniqua", error=math.nan, seconds=1.0),
    ]
    advice = advise(predictions, CLUSTER)
    assert advice.best is best(predictions) is predictions[0]
    assert advice.sentences[0].startswith("Choose sgp: 9.0 s to the target, 2.00 times faster than allreduce")
    assert "the wire bounds it" in advice.sentences[1] or "copies, codes" in advice.sentences[1]
    assert advice.sentences[2].startswith("Not weighed: dpwa: the target was reached, but workers' models differ")


def test_advice_says_what_to_change_where_nothing_works() -> None:
    far = [prediction("sgp", error=0.5, seconds=9.0), prediction("moniqua", error=math.nan, seconds=1.0)]
    advice = advise(far, CLUSTER)
    assert advice.best is None
    assert advice.sentences[0].startswith("No method reaches the target of 0.4: the nearest is sgp with 0.5 after 10")
    assert "--max-steps" in advice.sentences[1]
    apart = advise([prediction("dpwa", error=0.3, seconds=9.0, disagreement=0.5)], CLUSTER)
    assert apart.best is None
    assert apart.sentences[0].startswith("No method reaches the target with workers that agree: dpwa gets there")


def test_advice_on_methods_that_diverge_is_a_lower_step_size() -> None:
    advice = advise([prediction("choco", error=math.inf, seconds=9.0, disagreement=math.nan)], CLUSTER)
    assert advice.best is None
    assert "--step-size" in advice.sentences[1]
    assert "--max-steps" not in advice.sentences[1]


def test_advice_blames_no_wire_that_compute_hides() -> None:
    # 44.7 MB take 0.12 s at 3 Gbit/s, less than any step.
    slow = replace(CLUSTER, compute=replace(EVEN, straggle_share=0.02), links=LinkModel(rate_bit_s=3e9))
    chosen = simulate("osgp", slow, Digits(), target=0.5)
    assert chosen.is_overlapped
    assert LINKS.wire_seconds(44.7e6) / 3 > chosen.waiting_share * chosen.step_seconds / 2, "enough to be suspected"
    assert "waiting for slow workers" in advise([chosen], slow).sentences[1]
    assert "the wire bounds it" in advise([simulate("osgp", CLUSTER, Digits(), target=0.5)], CLUSTER).sentences[1]
    assert not simulate("sgp", slow, Digits(), max_steps=1).is_overlapped


def test_advice_counts_the_compute_of_stragglers() -> None:
    slow = replace(CLUSTER, compute=replace(EVEN, straggle_share=1.0, straggle_factor=3.0))
    # 3 x 0.15 s, and 0.01 s around it.
    assert "Its step has 0.460 s of compute" in advise([prediction("sgp", error=0.3, seconds=9.0)], slow).sentences[1]


def test_advice_names_what_bounds_a_step() -> None:
    fast = replace(CLUSTER, links=LinkModel(rate_bit_s=1e14, latency_s=0.0, memory_byte_s=1e13))
    chosen = simulate("sgp", fast, Digits(), target=0.5)
    assert "compute bounds it" in advise([chosen], fast).sentences[1]
    assert "the only one" in advise([chosen], fast).sentences[0]
    wire = advise([simulate("sgp", CLUSTER, Digits(), target=0.5)], CLUSTER)
    assert "the wire bounds it" in wire.sentences[1]
    uneven = replace(fast, compute=UNEVEN)
    assert "waiting for slow workers" in advise([simulate("sgp", uneven, Digits(), target=0.5)], uneven).sentences[1]


# What cannot be.


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--world-size 0", "got '0', expected a whole number of at least 1, at most 4096"),
        ("--world-size 5000", "got '5000', expected a whole number of at least 1, at most 4096"),
        ("--world-size 2.5", "got '2.5', expected a whole number"),
        ("--world-size 4 --rate-gbit nan", "rate-gbit: got 'nan', expected a number above 0"),
        ("--world-size 4 --rate-gbit -1", "got '-1', expected a number above 0"),
        ("--world-size 4 --rate-gbit inf", "got 'inf', expected a number above 0"),
        ("--world-size 4 --compute-ms 0", "got '0', expected a number above 0"),
        ("--world-size 4 --latency-ms x", "got 'x', expected a number of at least 0, at most .*; change it"),
        ("--world-size 4 --straggle-share 1.5", "got '1.5', expected a number of at least 0, at most 1"),
        ("--world-size 4 --straggle-factor 0.5", "got '0.5', expected a number of at least 1"),
        ("--world-size 4 --rate-gbit 1e-320", r"got '1e-320', expected a number above 0 \(that is, 1e-12 or more\)"),
        ("--world-size 4 --parameters 1e30", r"got '1e30', expected a whole number of at least 1, at most 1e\+15"),
        ("--world-size 4 --step-spread 500", "got '500', expected a number of at least 0, at most 5"),
        (f"--world-size 4 --seed {10**30}", "got '1000.*', expected a whole number of at least 0, at most"),
        ("--world-size 4 --methods sgp:star", "got graph='star' of sgp, expected exponential, .*; e.g. dpsgd:ring"),
        ("--world-size 4 --methods adam", "got method='adam', expected <method>.*allreduce.*; e.g. sgp"),
        ("--world-size 4 --methods sgp sgp:npeer-exponential", "got methods sgp and sgp:npeer-exponential, which are"),
        ("--world-size 4 --methods sgp:ring:sign", "got code='sign' of sgp, expected no code for it"),
        ("--world-size 4 --methods dpwa:ring", "got graph='ring' of dpwa, expected no graph for it"),
        ("--world-size 4 --methods choco:ring:zip", "got code='zip' of choco, expected sign, topk"),
        ("--world-size 6 --methods dpsgd:hypercube", "got world_size=6, expected a power of two"),
        (
            "--world-size 6 --methods choco:bipartite-exponential",
            "expected an undirected graph that never changes; take",
        ),
        ("--world-size 6 --methods moniqua:exponential", "got moniqua on .*, expected an undirected graph; take"),
        (
            "--world-size 6 --methods adpsgd:ring",
            "got adpsgd on .*, expected a bipartite graph with one peer per round",
        ),
        ("--world-size 600 --methods matcha", "got matcha with 600 workers, expected at most 512"),
        ("--world-size 4 --methods sgp --peers 4", "got peers_per_itr=4, expected 1 to 3"),
        ("--world-size 4 --problem consensus --label-skew 0.5", "got label_skew=0.5 for consensus, expected it for"),
        ("--world-size 4 --problem maze", "argument --problem: invalid choice: 'maze'"),
        ("", "required: --world-size"),
    ],
)
def test_bad_input_is_one_line(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    code: Any = None
    try:
        code = main(arguments.split())
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    with pytest.raises(ValueError, match=expected):  # a regex
        raise ValueError(said.err)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: ComputeModel(seconds=0.0), "got seconds=0.0, expected a positive number; its unit is in its name"),
        (lambda: ComputeModel(seconds=math.nan), "got seconds=nan, expected a positive number"),
        (lambda: ComputeModel(seconds=1, step_spread=-1), "got step_spread=-1, expected a number of at least 0"),
        (lambda: ComputeModel(seconds=1, straggle_share=2), "got straggle_share=2, expected a share from 0 to 1"),
        (lambda: LinkModel(rate_bit_s=-1e9), "got rate_bit_s=-1000000000.0, expected a positive number"),
        (lambda: LinkModel(rate_bit_s=1e9, slow_factor=0.5), "got slow_factor=0.5, expected a number of at least 1"),
        (lambda: LinkModel(rate_bit_s=1e9, latency_s=math.inf), "got latency_s=inf, expected"),
        (lambda: replace(CLUSTER, world_size=0), "got world_size=0, expected a whole number of at least 1"),
        (lambda: replace(CLUSTER, num_parameters=-5), "got num_parameters=-5, expected a whole number"),
        (lambda: replace(CLUSTER, step_size=math.nan), "got step_size=nan, expected above 0 and at most 2"),
        (lambda: replace(CLUSTER, theta=0.0), "got theta=0.0, expected a positive number; leave it out"),
        (lambda: Digits(learning_rate=math.nan), "got learning_rate=nan, expected a positive number"),
        (lambda: Digits(label_skew=-1), "got label_skew=-1, expected a share"),
        (lambda: Digits(batch_size=0), "got batch_size=0, expected at least 1"),
        (lambda: simulate("sgp", CLUSTER, Digits(), target=math.nan), "got target=nan and max_steps=320, expected"),
        (lambda: simulate("sgp", CLUSTER, Digits(), max_steps=0), "and max_steps=0, expected"),
    ],
)
def test_numbers_out_of_range_are_named(make: Callable[[], Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make()


def test_the_command_prints_a_table_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--problem consensus --target 1e-6 --world-size 8 --methods sgp osgp choco:ring:topk"
    assert main(arguments.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "8 workers, 25 M parameters, 250 ms of compute, 1 Gbit/s; distance from the mean to 1e-06"
    )
    assert " ".join(lines[2].split()) == "method graph steps s per step s to target MB per rank waiting disagreement"
    assert lines[3].startswith(("sgp", "osgp"))
    assert "choco:topk" in lines[5]
    assert "not reached" in lines[5]
    assert lines[7].startswith("Choose ")


def test_of_all_methods_those_that_do_not_fit_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world-size", "8", "--peers", "2", "--max-steps", "4"]) == 0
    said = capsys.readouterr().out
    assert "Left out: got adpsgd on DynamicBipartiteExponentialGraph(8, peers_per_itr=2), expected a bipartite" in said
    assert "Left out: got choco on HypercubeGraph" in said
    assert "sgp " in said


@pytest.mark.e2e
@pytest.mark.timeout(180)  # starting Python takes most of it, and many times as long on a busy machine
def test_the_command_runs_without_warning() -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "gossip_modules.simulate",
        "--world-size",
        "12",
        "--max-steps",
        "20",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "No method reaches the target" in result.stdout


@pytest.mark.parametrize("name", ["", ".mixing", ".delays", ".clocks", ".codes", ".problems", ".methods"])
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"gossip_modules.simulate{name}")
    assert doctest.testmod(module).failed == 0

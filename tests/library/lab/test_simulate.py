"""The simulator's arithmetic is that of the library."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gossip_modules as gm
from gossip_modules.algorithms.d_psgd import DPSGD
from gossip_modules.algorithms.moniqua import Moniqua
from gossip_modules.algorithms.power_gossip import PowerGossip
from gossip_modules.graph_manager.named_graphs import default_graph_name
from gossip_modules.lab import Consensus, Digits, LabPlan, advise, simulate
from gossip_modules.lab.asynchronous import Bilateral
from gossip_modules.lab.clock import MessageCost, StepClock, WorkerLinks
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.lab.plan import Running
from gossip_modules.mixing_manager.graph_weights import default_mixing
from gossip_modules.rounds.algorithm import Algorithm
from gossip_modules.rounds.rows import StackedMixing
from gossip_modules.rounds.stacked import Stacked
from tests.library.lab.simulations import (
    CLUSTER,
    EVEN,
    LINKS,
    UNEVEN,
    Rounds,
    digits,
    graphs,
    made,
    prediction,
    start,
    workers,
)

CASES = [
    pytest.param(graph, push_sum, id=f"{name} n={n} {'push-sum' if push_sum else 'push-pull'}")
    for n in (3, 8)
    for name, graph in graphs(n).items()
    for push_sum in (True, False)
    if push_sum or graph.is_symmetric
]


def lockstep(graph: gm.graph_manager.GraphManager, algorithm: Algorithm, *, push_sum: bool = False) -> Rounds:
    ranks = workers(graph.world_size)
    driver = Stacked(algorithm, default_mixing(graph, push_sum=push_sum), shapes=[(8, 8)])
    return Rounds(Running(driver, StepClock(EVEN, WorkerLinks(LINKS, ranks), MessageCost(1e6))))


@pytest.mark.parametrize("peers", [1, 2])
@pytest.mark.parametrize("n", [7, 8, 9, 25])
def test_d_psgd_is_simulated_on_its_default_graph(n: int, peers: int) -> None:
    setting = replace(CLUSTER, world_size=n)
    plan = LabPlan.of("dpsgd", peers_per_itr=peers)
    assert plan.resolved(n).graph == default_graph_name(n, push_sum=False, peers_per_itr=peers)
    assert made(plan, setting) is not None
    assert LabPlan.of("adpsgd").resolved(n).graph == ("bipartite-complete" if n % 2 else "bipartite-exponential")
    assert LabPlan.of("gasloc").resolved(9).graph == "torus"


@pytest.mark.parametrize(("graph", "push_sum"), CASES)
def test_consensus_equals_the_product_of_dense_matrices(graph: gm.graph_manager.GraphManager, push_sum: bool) -> None:
    mixing = default_mixing(graph, push_sum=push_sum)
    method = lockstep(graph, DPSGD(), push_sum=push_sum)
    x = start(graph.world_size, 2)
    expected, weights = x.clone(), torch.ones(graph.world_size, 1, dtype=torch.float64)
    for t in range(min(12, mixing.period + 2 if mixing.period else 12)):
        method.forward(x)
        expected, weights = mixing.matrix(t) @ expected, mixing.matrix(t) @ weights
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(method.driver.estimates(x), expected / weights, rtol=0, atol=1e-6)


def test_weights_of_its_own_and_schedules_of_peers_are_simulated() -> None:
    graph = gm.graph_manager.NPeerDynamicDirectedExponentialGraph(6, peers_per_itr={0: 2, 3: 1})
    matrices = [gm.mixing_manager.UniformMixing(graph).matrix(t) for t in range(8)]
    simulated = StackedMixing(gm.mixing_manager.UniformMixing(graph))
    ring = gm.RingGraph(6, peers_per_itr=2)
    skewed = gm.mixing_manager.MatrixMixing(
        ring, 0.3 * torch.eye(6) + 0.7 * gm.mixing_manager.UniformMixing(ring).matrix(0)
    )
    for t, matrix in enumerate(matrices):
        eye = torch.eye(6, dtype=torch.float64)
        torch.testing.assert_close(simulated.round(t).mix(eye), matrix, rtol=0, atol=1e-12)
        torch.testing.assert_close(StackedMixing(skewed).round(t).mix(eye), skewed.matrix(t), rtol=0, atol=1e-12)


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
            gm.compression.Cast(torch.bfloat16),
            gm.compression.Identity(),
        ),
        *(gm.RandomK(0.2, unbiased=True), gm.QSGD(8), gm.QSGD(4, bucket_size=64, seed=5), gm.QSGD(2, unbiased=True)),
    ],
    ids=repr,
)
def test_codes_of_all_rows_are_those_of_the_compressor(
    compressor: gm.compression.Compressor, dtype: torch.dtype
) -> None:
    x = torch.randn(5, 150, generator=torch.Generator().manual_seed(1), dtype=dtype)
    x[3] = 0
    for t in (0, 7):
        for row, coded in zip(x, compressor.decompressed(x, t=t)):
            message, expected = compressor.message_like(row), torch.zeros_like(row)
            compressor.compress(row, message, t=t)
            compressor.add_decompressed(message, expected)
            torch.testing.assert_close(coded, expected, rtol=1e-5, atol=1e-6)


def test_a_code_of_its_own_is_computed_row_by_row() -> None:
    class Wrapped(gm.compression.Compressor):
        def num_bytes(self, d: int, dtype: torch.dtype) -> int:
            return 2 * d

        def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
            gm.compression.Cast(torch.float16).compress(x, message)

        def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
            gm.compression.Cast(torch.float16).add_decompressed(message, target, alpha=alpha)

        def __repr__(self) -> str:
            return "Wrapped()"

    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(Wrapped().decompressed(x), x.half().float(), rtol=0, atol=0)


def test_moniqua_refuses_neighbours_that_are_too_far_apart() -> None:
    method = lockstep(gm.RingGraph(4, peers_per_itr=2), Moniqua(0.01))
    with pytest.raises(RuntimeError, match=r"more than theta=0\.01, or is not finite, expected less; pass a larger"):
        method.forward(start(4))
    with pytest.raises(ValueError, match=r"more than theta=0\.5"):
        simulate("Moniqua(theta=0.5):ring", CLUSTER, Consensus())


def test_the_theta_of_a_prediction_is_one_that_a_run_can_have() -> None:
    """The least power of two that no neighbours differ by; and what a fixed grid cannot reach is not promised."""
    setting = replace(CLUSTER, world_size=4, seed=3)
    found = simulate("moniqua:ring", setting, Consensus(), max_steps=40)
    theta, x = found.plan.chosen.made.theta, start(4)
    largest = float((x - x.roll(1, dims=0)).abs().max())
    assert largest < theta <= 2 * largest
    assert not found.has_reached


def ring(n: int) -> gm.mixing_manager.MixingManager:
    return gm.mixing_manager.MetropolisHastingsMixing(gm.RingGraph(n, peers_per_itr=2))


def test_the_options_of_the_best_are_in_the_advice() -> None:
    plain = prediction("sgp", error=0.3, seconds=2.0)
    chosen = prediction("matcha", error=0.3, seconds=1.0)
    chosen = replace(chosen, plan=chosen.plan.with_settings(budget=0.25))
    sentences = advise([chosen, plain], CLUSTER).sentences
    launch = f"torchrun --standalone --nproc-per-node {CLUSTER.world_size} -m train.gossip_sgd"
    command = f'{launch} --algorithm "MATCHA(budget=0.25)"'
    assert any(sentence.startswith(f"To train like this: {command} (") for sentence in sentences)
    assert not any("simulated with" in sentence for sentence in advise([plain], CLUSTER).sentences)


@pytest.mark.parametrize("name", ["bipartite-exponential 1", "ring 2", "matcha", "hypercube None"])
def test_power_gossip_of_full_rank_is_plain_gossip_of_differences(name: str) -> None:
    """With rank = columns the projection is exact, whatever the basis is."""
    graph = graphs(8)[name]
    coded, plain = (lockstep(graph, rule) for rule in (PowerGossip(rank=8, step_size=1.0), DPSGD()))
    x, y = start(8), start(8)
    for _ in range(7):
        coded.forward(x)
        plain.forward(y)
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


def test_power_iteration_finds_the_largest_difference() -> None:
    """Two workers whose difference has rank one: after an iteration the rest of it is gone, as in plain gossip."""
    u, v = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = torch.stack([torch.zeros(64, dtype=torch.float64), torch.outer(u, v).flatten()])
    lockstep(gm.RingGraph(2), PowerGossip(num_iterations=2)).forward(x)
    assert float((x[0] - x[1]).norm()) < 1e-9 * float(u.norm() * v.norm())


CONSERVING = ["dpsgd", "sgp", "osgp", "matcha", "choco", "deepsqueeze", "moniqua", "powergossip", "localsgd"]


@pytest.mark.parametrize("name", [*CONSERVING, "choco:ring:topk", "dpsgd:torus", "osgp:linear", "dpsgd:matcha0"])
def test_doubly_stochastic_methods_keep_the_mean(name: str) -> None:
    plan = LabPlan.of(name)
    method = made(plan.with_settings(theta=16.0), replace(CLUSTER, compute=UNEVEN))
    x = start(8)
    mean = x.mean(0)
    for _ in range(25):
        method.forward(x)
        torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_ad_psgd_keeps_the_sum_with_messages_in_flight(n: int) -> None:
    method = made("adpsgd", replace(CLUSTER, world_size=n, compute=UNEVEN))
    assert isinstance(method.driver, Bilateral)
    x = start(n)
    mean = x.mean(0)
    for _ in range(60):
        method.forward(x)
        torch.testing.assert_close((x + method.driver.in_flight).mean(0), mean, rtol=0, atol=1e-12)
    assert method.is_stepping is not None
    assert start(n).sub(x).abs().max() > 0.1, "nothing was mixed"


def test_all_reduce_learns_like_sgd_on_the_mean_gradient() -> None:
    problem, n = Digits(seed=4), 6
    model = nn.Linear(37, 10, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=problem.learning_rate)
    training = LabTraining(LabPlan.of("ar"), replace(CLUSTER, world_size=n), problem)
    for step, _ in enumerate(training.run(12)):
        if step < 12:
            batch = torch.from_numpy(problem.indices(n, step).reshape(-1))
            loss = nn.functional.cross_entropy(model(problem.images[batch]), problem.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    x = training.models.x
    expected = model.weight.detach().T.flatten()
    torch.testing.assert_close(x.mean(0), expected, rtol=1e-4, atol=1e-5)
    assert float(expected.norm()) > 0.5, "nothing was learnt"


def test_a_graph_of_its_own_is_simulated_like_a_named_one() -> None:
    own = simulate(LabPlan.of("dpsgd", graph=gm.RingGraph(8, peers_per_itr=2)), CLUSTER, Consensus())
    named = simulate("dpsgd:ring", CLUSTER, Consensus())
    assert replace(own, plan=named.plan) == named
    assert own.name == "dpsgd on RingGraph(8, peers_per_itr=2)"


def test_label_skew_gives_workers_digits_of_their_own() -> None:
    even, skewed = digits(), Digits(label_skew=1.0)
    own = skewed.labels[torch.from_numpy(skewed.indices(30, 0))]
    assert (own == torch.arange(30)[:, None] % 10).all()
    assert len(even.labels[torch.from_numpy(even.indices(300, 0))].unique()) == 10
    parted, together = (simulate("LocalSGD(20)", CLUSTER, p, max_steps=19).disagreement for p in (skewed, even))
    assert parted > 2 * together

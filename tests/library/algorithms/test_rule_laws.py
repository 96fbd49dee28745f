"""Each algorithm for uneven data computes what its paper says, and reaches what its paper promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    D2,
    EXTRA,
    KGT,
    DecentLaM,
    ExactDiffusion,
    GossipDataParallel,
    GradientTracking,
    PowerGossip,
    ProxSkip,
    QGDSGDm,
    RingGraph,
    Schedule,
    SignNorm,
)
from gossip_modules.algorithms.choco import Choco
from gossip_modules.algorithms.d_psgd import DPSGD
from gossip_modules.extend import Algorithm, SGDStep
from gossip_modules.graph_manager import BaseGraph, DynamicBipartiteExponentialGraph, NetworkXGraph
from gossip_modules.mixing_manager import MetropolisHastingsMixing, MixingManager, UniformMixing, default_mixing
from gossip_modules.rounds.stacked import Stacked
from tests.harness.problems import loss_of, mlp
from tests.harness.quadratics import CURVATURES, LEARNING_RATE, MINIMA, START, plain_sgd, solve, train_rows
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten

RING = RingGraph(5, peers_per_itr=2)
W = MetropolisHastingsMixing(RING).matrix(0).double()
OPTIMUM = 0.8
A, B = (torch.tensor(values, dtype=torch.float64) for values in (CURVATURES, MINIMA))

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(*, lr: float = LEARNING_RATE, momentum: float = 0.9, nesterov: bool = False) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov)


def gradient(x: Tensor) -> Tensor:
    return A * (x - B)


GOLDEN = [
    (None, plain_sgd, (0.7374770574, 0.5163239877, 0.6174802266, 0.8897665641, 0.9046333857)),
    (None, sgd(), (0.6329045059, -0.5900952860, -0.0694835608, 1.4398064848, 1.3054625712)),
    (D2(), plain_sgd, (0.7630639598, 0.7631002605, 0.7629286348, 0.7628287135, 0.7629770749)),
    (ExactDiffusion(), plain_sgd, (0.7626268126, 0.7665165690, 0.7630669650, 0.7571970864, 0.7568583988)),
    (QGDSGDm(), sgd(), (0.8369341056, 0.6151370547, 0.7131683618, 0.9847689816, 1.0030627369)),
]


@pytest.mark.parametrize(("rule", "make_optimizer", "expected"), GOLDEN, ids=["dpsgd", "dsgdm", "d2", "exact", "qg"])
def test_golden_values_of_every_rank(rule: Algorithm | None, make_optimizer: Make, expected: tuple[float, ...]) -> None:
    found = solve(lambda: {"algorithm": rule, "push_sum": False, "graph": RING}, make_optimizer=make_optimizer)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", [QGDSGDm, DecentLaM])
def test_a_step_that_grad_scaler_leaves_out_inside_step_is_none(rule: Callable[[], Algorithm]) -> None:
    """A fused optimizer is called in any case, and finds out itself; others are not called."""

    def trained(*, is_fused: bool) -> list[Tensor]:
        def body(group: dist.ProcessGroup) -> Tensor:
            model = mlp(group.rank())
            wrapper = GossipDataParallel(
                model, process_group=group, algorithm=rule(), push_sum=False, graph=RingGraph(3, peers_per_itr=2)
            )
            optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05, momentum=0.9, fused=is_fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
            for step in range(6):
                optimizer.zero_grad()
                loss = loss_of(wrapper, group.rank(), step)
                if step in (0, 3) and group.rank() == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            wrapper.close()
            return flatten(model)

        return run_ranks(3, body)

    for found, expected in zip(trained(is_fused=True), trained(is_fused=False), strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def start() -> Tensor:
    return torch.full((5,), START, dtype=torch.float64)


def tracking(num_steps: int, eta: float) -> Tensor:
    x = start()
    g = y = gradient(x)
    for _ in range(num_steps):
        x = W @ (x - eta * y)
        y = W @ (y + gradient(x) - g)
        g = gradient(x)
    return x


def decentlam(num_steps: int, eta: float, b: float) -> Tensor:
    x, m = start(), torch.zeros(5, dtype=torch.float64)
    for _ in range(num_steps):
        m = b * m + (x - W @ (x - eta * gradient(x))) / eta
        x = x - eta * m
    return x


def quasi_global(num_steps: int, eta: float, b: float, mu: float, matrices: Callable[[int], Tensor]) -> Tensor:
    """With Nesterov's step: the direction is g + b m."""
    x, mh = start(), torch.zeros(5, dtype=torch.float64)
    for t in range(num_steps):
        m = b * mh + gradient(x)
        new = matrices(t + 1) @ (x - eta * (gradient(x) + b * m))  # round 0 came before the first step
        mh = mu * mh + (1 - mu) * (x - new) / eta
        x = new
    return x


def extra(num_steps: int, eta: float) -> Tensor:
    """Equation 2.13 of the paper, with (I + W) / 2 as its second matrix."""
    before = start()
    x = W @ before - eta * gradient(before)
    for _ in range(num_steps - 1):
        both = before + W @ before
        before, x = x, x + W @ x - both / 2 - eta * (gradient(x) - gradient(before))
    return x


LAWS = [
    (EXTRA(), plain_sgd, lambda: extra(20, 0.05)),
    (GradientTracking(), plain_sgd, lambda: tracking(20, 0.05)),
    (DecentLaM(), sgd(momentum=0.5), lambda: decentlam(20, 0.05, 0.5)),
    (QGDSGDm(mu=0.7), sgd(nesterov=True), lambda: quasi_global(20, 0.05, 0.9, 0.7, lambda t: W)),
]


@pytest.mark.parametrize(("rule", "make_optimizer", "law"), LAWS, ids=["extra", "tracking", "decentlam", "nesterov"])
def test_every_rank_follows_the_law(rule: Algorithm, make_optimizer: Make, law: Callable[[], Tensor]) -> None:
    found = solve(lambda: {"algorithm": rule, "graph": RING}, make_optimizer=make_optimizer)
    torch.testing.assert_close(found, law(), rtol=0, atol=1e-12)
    assert found.std() > 1e-4


@pytest.mark.parametrize("rule", [EXTRA(), ExactDiffusion()], ids=repr)
def test_published_recursions_on_means_of_random_quadratics(rule: Algorithm) -> None:
    """Each rank has x A x / 2 + b x, a mean of random quadratics; the ranks are the rows of one tensor."""
    n, dim, eta, steps = 6, 4, 0.03, 60
    draws = np.random.default_rng(5)
    factors = draws.standard_normal((n, 8, dim, dim))
    a = (factors @ factors.swapaxes(-1, -2)).mean(1) / dim
    b = draws.standard_normal((n, 8, dim)).mean(1)
    mixing = MetropolisHastingsMixing(NetworkXGraph(nx.random_regular_graph(3, n, seed=2)))
    w = mixing.matrix(0).double().numpy()
    half = (np.eye(n) + w) / 2

    def u(x: np.ndarray) -> np.ndarray:
        return eta * (np.einsum("nij,nj->ni", a, x) + b)

    start = np.zeros((n, dim))
    if isinstance(rule, EXTRA):
        history = [start, w @ start - u(start)]
        while len(history) <= steps:
            x, before = history[-1], history[-2]
            history.append((np.eye(n) + w) @ x - half @ before - u(x) + u(before))
    else:  # the recursion of NIDS without a proximal operator
        history = [start, half @ (start - u(start))]
        while len(history) <= steps:
            x, before = history[-1], history[-2]
            history.append(half @ (2 * x - before - u(x) + u(before)))

    rows, rounds = torch.zeros(n, dim, dtype=torch.float64), Stacked(rule, mixing)
    rounds.step(rows, 0)
    for k in range(1, steps + 1):
        rows -= torch.from_numpy(u(rows.numpy()))
        rounds.step(rows, k, sgd=SGDStep(eta, 0.0))
        assert np.abs(rows.numpy() - history[k]).max() < 1e-10
    optimum = -np.linalg.solve(a.mean(0), b.mean(0))
    assert np.abs(history[-1] - optimum).max() < np.abs(start - optimum).max()


def test_quasi_global_momentum_on_pairs_that_change() -> None:
    mixing = MetropolisHastingsMixing(DynamicBipartiteExponentialGraph(4))
    law = quasi_global_of(4, lambda t: mixing.matrix(t).double())
    found = solve(lambda: {"algorithm": QGDSGDm()}, num_ranks=4, make_optimizer=sgd())  # its default graph
    torch.testing.assert_close(found, law, rtol=0, atol=1e-12)


def quasi_global_of(n: int, matrices: Callable[[int], Tensor]) -> Tensor:
    x, mh = start()[:n], torch.zeros(n, dtype=torch.float64)
    for t in range(20):
        new = matrices(t + 1) @ (x - 0.05 * (0.9 * mh + A[:n] * (x - B[:n])))
        mh = 0.9 * mh + 0.1 * (x - new) / 0.05
        x = new
    return x


def limit(
    rule: Algorithm,
    *,
    num_steps: int = 300,
    lr: float = LEARNING_RATE,
    mixing: MixingManager | None = None,
    **options: Any,
) -> Tensor:
    """x of all ranks after so many steps, on the ring."""
    mixing = MetropolisHastingsMixing(RING) if mixing is None else mixing
    return train_rows(rule, mixing, num_steps, rate=lambda k: lr, **options)[-1]


@pytest.mark.parametrize(
    ("rule", "momentum"),
    [(D2(), 0.0), (D2(), 0.5), (ExactDiffusion(), 0.0), (EXTRA(), 0.0), (GradientTracking(), 0.0)],
    ids=["d2", "d2-momentum", "exact", "extra", "tracking"],
)
def test_ranks_with_different_data_reach_the_optimum(rule: Algorithm, momentum: float) -> None:
    assert (limit(rule, momentum=momentum) - OPTIMUM).abs().max() < 1e-9
    assert (limit(DPSGD(), momentum=momentum) - OPTIMUM).abs().max() > 0.05  # D-PSGD


@pytest.mark.parametrize(("graph", "n"), [(DynamicBipartiteExponentialGraph, 4), (BaseGraph, 5)])
def test_gradient_tracking_reaches_the_optimum_on_graphs_that_change(graph: Callable[[int], Any], n: int) -> None:
    """Each round mixes two vectors, both by W(t), so that both meet all the graphs of an even period."""
    found = limit(GradientTracking(), mixing=default_mixing(graph(n), push_sum=False))
    optimum = float((A[:n] * B[:n]).sum() / A[:n].sum())
    assert (found - optimum).abs().max() < 1e-9


def test_the_bias_of_momentum_is_smaller_where_it_sees_the_round() -> None:
    """D-PSGD stays beside the optimum, with momentum further; DecentLaM has the bias of D-PSGD without momentum."""

    def bias(rule: Algorithm, momentum: float) -> float:
        return float((limit(rule, num_steps=600, momentum=momentum, lr=0.02) - OPTIMUM).abs().max())

    plain, local = bias(DPSGD(), 0.0), bias(DPSGD(), 0.8)
    assert bias(DecentLaM(), 0.8) == pytest.approx(plain, rel=1e-3)
    assert plain > 0.05
    assert local > 3 * plain
    assert bias(QGDSGDm(), 0.8) < local / 2


@pytest.mark.parametrize("n", [2, 4, 5])
def test_the_default_weights_of_d2_serve_any_number_of_ranks(n: int) -> None:
    mixing = D2().default_mixing(n)
    D2().check(mixing)
    assert mixing.weights(0, 0).own == pytest.approx({2: 1 / 2, 4: 1 / 2, 5: 1 / 3}[n])


def test_the_limit_of_d2_is_that_of_its_recursion() -> None:
    """z^2 = w (2 z - 1) for an eigenvalue w of the weights."""
    for n, is_stable in ((5, True), (4, False)):  # the lowest eigenvalues are -0.206 and -1/3
        mixing = MetropolisHastingsMixing(RingGraph(n, peers_per_itr=2))
        lowest = float(torch.linalg.eigvalsh(mixing.matrix(0))[0])
        companion = torch.tensor([[2 * lowest, -lowest], [1.0, 0.0]], dtype=torch.float64)
        assert bool(torch.linalg.eigvals(companion).abs().max() < 1 - 1e-9) == is_stable
        if is_stable:
            D2().check(mixing)
        else:
            with pytest.raises(ValueError, match=r"an eigenvalue of -0\.3333, expected all above -1/3: .*take Exact"):
                D2().check(mixing)
        ExactDiffusion().check(mixing)


@pytest.mark.parametrize(
    ("rule", "mixing", "message"),
    [
        (D2(), lambda: UniformMixing(RingGraph(5)), r"D2: got .*, expected symmetric weights on an undirected graph"),
        (
            DecentLaM(),
            lambda: MetropolisHastingsMixing(DynamicBipartiteExponentialGraph(4)),
            r"DecentLaM: got .* of period 2, expected a graph that never changes, .*; take a ring",
        ),
        (ExactDiffusion(), lambda: UniformMixing(RingGraph(5)), "ExactDiffusion: got .*, expected symmetric"),
        (
            GradientTracking(),
            lambda: UniformMixing(NetworkXGraph(nx.star_graph(3))),
            "GradientTracking: got .*, expected doubly stochastic weights, which keep the mean",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(rule: Algorithm, mixing: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule.check(mixing())


def test_a_share_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"QGDSGDm: got mu=1.0, expected 0 <= mu < 1, or None for the momentum of"):
        QGDSGDm(mu=1.0)
    with pytest.raises(ValueError, match=r"QGDSGDm: got mu='0.9', expected 0 <= mu < 1, or None for the momentum of"):
        QGDSGDm(mu="0.9")  # type: ignore[arg-type]


def descent_of(rates: Tensor, num_steps: int) -> float:
    """The x where steps of SGD, so many on each rank, move the mean of the models no more."""
    shares = 1 - (1 - rates) ** num_steps
    return float((shares * B).sum() / shares.sum())


@pytest.mark.parametrize("rule", [D2(), ExactDiffusion(), EXTRA(), GradientTracking(), ProxSkip(0.9)], ids=repr)
def test_two_steps_between_rounds_count_as_one(rule: Algorithm) -> None:
    found = limit(rule, schedule=Schedule(2))
    assert (found - descent_of(LEARNING_RATE * A, 2)).abs().max() < 1e-12


@pytest.mark.parametrize(
    "rule",
    [D2(), ExactDiffusion(), EXTRA(), GradientTracking(), KGT(2), ProxSkip(0.7), QGDSGDm(), DecentLaM()],
    ids=repr,
)
def test_exact_averages_between_rounds_take_all_ranks_to_one_model(rule: Algorithm) -> None:
    """Without a new beginning after each of them D2 would take ranks further apart with each."""
    momentum = 0.5 if rule.needs_sgd else 0.0
    lr, schedule = LEARNING_RATE * (1 - momentum), Schedule(average_every=4)
    found = limit(rule, num_steps=103, momentum=momentum, lr=lr, schedule=schedule)
    assert found.std() < 1e-12, "step 103 averages"
    assert abs(found.mean() - OPTIMUM) < 0.05


@pytest.mark.parametrize("rule", [D2(), ExactDiffusion(), EXTRA(), GradientTracking(), KGT(2), ProxSkip(0.7)], ids=repr)
def test_a_narrow_wire_takes_the_mean_nowhere(rule: Algorithm) -> None:
    """What one rank gives away its peers get, so that sums stay; the resolution of bfloat16 at 0.8 is 0.004."""
    found = limit(rule, wire_dtype=torch.bfloat16)
    assert (found - OPTIMUM).abs().max() < 0.008
    assert (found - OPTIMUM).abs().max() > 1e-6, "the wire is narrow"


@pytest.mark.parametrize("rule", [D2(), ExactDiffusion(), EXTRA(), ProxSkip(), QGDSGDm(), DecentLaM()], ids=repr)
@pytest.mark.parametrize("inner", [Choco(SignNorm(), step_size=0.3), PowerGossip()], ids=lambda x: type(x).__name__)
def test_compressed_gossip_below_is_refused(rule: Algorithm, inner: Algorithm) -> None:
    """What a compressed round leaves out comes again with what the rule keeps: models of matrices drift apart."""
    with pytest.raises(
        ValueError, match=r"expected plain gossip: the memory of the outer algorithm repeats the changes"
    ):
        solve(lambda: {"algorithm": rule.over(inner), "graph": RING})

"""Each outer method computes what its paper says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import DiLoCo, GASLoC, GossipDataParallel, NoLoCo, RingGraph, SlowMo
from gossip_modules.extend import FlatBuffer, OuterMethod
from gossip_modules.graph_manager import CompleteGraph, HypercubeGraph, NetworkXGraph, RandomMatchingGraph
from gossip_modules.mixing_manager import GraphMixing, MetropolisHastingsMixing, MixingManager, UniformMixing
from tests.harness.problems import adamw, mlp, train_step
from tests.harness.quadratics import START, descended, solve
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten

RING = RingGraph(5, peers_per_itr=2)


def complete() -> CompleteGraph:
    """Every rank is a neighbour of every other one."""
    return CompleteGraph(5, peers_per_itr=4)


@pytest.mark.parametrize(
    ("make_options", "expected"),
    [
        (lambda: {"algorithm": DiLoCo(5)}, 0.7702157507),
        (lambda: {"algorithm": SlowMo(5)}, 0.7307994909),
        (lambda: {"algorithm": SlowMo(5, lr=0.7, momentum=0.9)}, 0.8018335365),
        (lambda: {"algorithm": GASLoC(5, step_size=1.0), "graph": complete()}, 0.7702157507),  # as DiLoCo
    ],
    ids=["diloco", "slowmo", "slowmo-heavy-ball", "gasloc-complete"],
)
def test_golden_values(make_options: Callable[[], dict[str, Any]], expected: float) -> None:
    torch.testing.assert_close(solve(make_options), torch.full((5,), expected, dtype=torch.float64), rtol=0, atol=1e-9)


def matrices(mixing: MixingManager, num_rounds: int) -> list[Tensor]:
    return [mixing.matrix(t).double() for t in range(num_rounds)]


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_gasloc_on_a_ring_is_its_law(alpha: float) -> None:
    phi = torch.full((5,), START, dtype=torch.float64)
    before = phi
    for w in matrices(MetropolisHastingsMixing(RING), 4):
        y = phi + 0.7 * (descended(phi, 5) - phi)
        e = y + 0.9 * (y - before)
        phi, before = e + alpha * (w @ e - e), y
    found = solve(lambda: {"algorithm": GASLoC(5, step_size=alpha), "graph": RING})
    torch.testing.assert_close(found, phi, rtol=0, atol=1e-12)
    assert found.std() > 0.1


def test_gasloc_with_another_optimizer_steps_by_the_own_drift_and_mixes_the_result() -> None:
    phi, m = torch.full((5,), START, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for w in matrices(MetropolisHastingsMixing(RING), 4):
        drift = phi - descended(phi, 5)
        m = 0.9 * m + drift
        e = phi - 0.7 * (drift + 0.9 * m)
        phi = e + 0.5 * (w @ e - e)

    def nesterov(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)

    found = solve(lambda: {"algorithm": GASLoC(5, optimizer=nesterov), "graph": RING})
    torch.testing.assert_close(found, phi, rtol=0, atol=1e-12)


def test_the_limit_of_gasloc_is_that_of_its_recursion() -> None:
    """z^2 = w ((1 + g) z - g) for an eigenvalue w of the weights: a hypercube of 16 ranks has -0.6."""
    mixing = MetropolisHastingsMixing(HypercubeGraph(16, peers_per_itr=4))
    lowest = float(torch.linalg.eigvalsh(mixing.matrix(0))[0])
    assert lowest == pytest.approx(-0.6)
    for momentum in (0.3, 0.37):  # the limit is 1/3
        companion = torch.tensor([[lowest * (1 + momentum), -lowest * momentum], [1.0, 0.0]])
        is_stable = bool(torch.linalg.eigvals(companion).abs().max() < 1)
        assert is_stable == (momentum < 1 / 3)
        outer = GASLoC(momentum=momentum, step_size=1.0)
        if is_stable:
            outer.check(mixing)
        else:
            with pytest.raises(
                ValueError, match=r"GASLoC: got step_size=1 and momentum=0.37 on .*cube.* grow 1\.0\d* ti"
            ):
                outer.check(mixing)
    GASLoC(momentum=0.99).check(mixing)


@pytest.mark.parametrize("n", [4, 5])
@pytest.mark.parametrize("pull", [None, 0.4])
def test_noloco_is_its_law(n: int, pull: float | None) -> None:
    phi, m = torch.full((n,), START, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    c = 0.7 if pull is None else pull
    for w in matrices(GraphMixing(RandomMatchingGraph(n, seed=3)), 4):
        m = 0.5 * m + 0.7 * (w @ (descended(phi, 5) - phi)) + c * (w @ phi - phi)
        phi = phi + m
    found = solve(lambda: {"algorithm": NoLoCo(5, pull=pull, seed=3)}, num_ranks=n)
    torch.testing.assert_close(found, phi, rtol=0, atol=1e-12)


def test_noloco_mixes_on_a_graph_that_is_named() -> None:
    found = solve(lambda: {"algorithm": NoLoCo(5), "graph": complete()})
    torch.testing.assert_close(found, found.mean().expand(5), rtol=0, atol=1e-12)


def test_slowmo_with_gossip_between_outer_steps() -> None:
    """On a graph on which push-sum weights move; an outer step makes them one."""
    graph = NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))
    phi, u = torch.full((3,), START, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    w = UniformMixing(graph).matrix(0).double()
    for outer_step in range(2):
        x, weights = phi, torch.ones(3, dtype=torch.float64)
        for k in range(4):
            if k or not outer_step:  # an outer step takes the place of a round
                x, weights = w @ x, w @ weights
            z = x / weights
            x = x + descended(z, 1) - z
        u = 0.5 * u + (phi - x.mean())
        phi = phi - u
    found = solve(lambda: {"algorithm": SlowMo(4, gossip_every=1), "graph": graph}, num_steps=8, num_ranks=3)
    torch.testing.assert_close(found, phi, rtol=0, atol=1e-12)


SYNC_EVERY, NUM_OUTER_STEPS = 3, 4


@pytest.mark.parametrize(
    ("outer", "reference"),
    [
        (DiLoCo(SYNC_EVERY), lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)),
        (
            DiLoCo(SYNC_EVERY, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01)),
            lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        ),
    ],
    ids=["nesterov", "adam"],
)
def test_diloco_is_torchs_optimizer_on_the_mean_drift_to_the_bit(outer: OuterMethod, reference: Any) -> None:
    def body(group: dist.ProcessGroup) -> list[Tensor]:
        model = mlp()
        wrapper, optimizer = GossipDataParallel(model, process_group=group, algorithm=outer), adamw(model)
        steps = []
        for step in range(SYNC_EVERY * NUM_OUTER_STEPS + 1):
            train_step(wrapper, optimizer, group.rank(), step)
            steps.append(flatten(model))
        assert wrapper.comm_stats()["num_rounds"] == NUM_OUTER_STEPS
        wrapper.close()
        return steps

    results = run_ranks(2, body)
    models = [mlp(), mlp()]
    vectors = [FlatBuffer(model).vector.segments[0] for model in models]
    optimizers = [adamw(model) for model in models]
    phi = vectors[0].clone()
    outer_optimizer = reference([phi])
    for step in range(SYNC_EVERY * NUM_OUTER_STEPS + 1):
        if step and step % SYNC_EVERY == 0:
            phi.grad = ((phi - vectors[0]) + (phi - vectors[1])) / 2
            outer_optimizer.step()
            for x in vectors:
                x.copy_(phi)
        for rank, model in enumerate(models):
            train_step(model, optimizers[rank], rank, step)
            assert torch.equal(results[rank][step], flatten(model)), (rank, step)


def test_diloco_without_momentum_is_local_sgd() -> None:
    phi = torch.full((5,), START, dtype=torch.float64)
    for _ in range(4):
        phi = descended(phi, 5).mean().expand(5)
    found = solve(lambda: {"algorithm": DiLoCo(5, lr=1.0, momentum=0.0)})
    torch.testing.assert_close(found, phi, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiLoCo(0), "DiLoCo: got sync_every=0, expected a whole number of at least 1, .*; 30 to 500"),
        (lambda: GASLoC(1.5), "GASLoC: got sync_every=1.5"),  # type: ignore[arg-type]
        (lambda: DiLoCo(lr=0.0), "DiLoCo: got lr=0.0, expected a number above 0"),
        (lambda: SlowMo(momentum=1.0), "SlowMo: got momentum=1.0, expected 0 <= momentum < 1; with 1 the momentum"),
        (lambda: SlowMo(gossip_every=-1), "got gossip_every=-1, expected a whole number of steps, or 0"),
        (
            lambda: DiLoCo(lr=0.5, optimizer=torch.optim.Adam),
            "got lr=0.5 and momentum=0.9 beside an optimizer, expected one or the other; give the rates to the",
        ),
        (lambda: GASLoC(step_size=1.5), "GASLoC: got step_size=1.5, expected at most 1, a whole round"),
        (
            lambda: NoLoCo(momentum=0.9),
            r"NoLoCo: got pull=0.7 with momentum=0.9, expected pull < 2 \(1 - momentum\^2\) = 0.38, since otherwise "
            "the differences between ranks grow",
        ),
    ],
)
def test_rates_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("pull", "is_stable"), [(0.37, True), (0.39, False)])
def test_the_limit_of_noloco_is_that_of_its_recursion(pull: float, is_stable: bool) -> None:
    """Second moments of d, a rank's distance from the mean, and m, where very many ranks meet in random pairs.

    m <- a m + c (d' - d) / 2 and d <- d + m, where d' has the moments of d and no correlation with it.
    """
    a, total = 0.9, torch.zeros(3, 3, dtype=torch.float64)
    for column in range(3):
        dd, dm, mm = (1.0 if row == column else 0.0 for row in range(3))
        new_mm = a * a * mm + 2 * a * (-pull / 2) * dm + pull**2 / 4 * 2 * dd
        new_dm = (a * dm - pull / 2 * dd) + new_mm
        new_dd = dd + 2 * (a * dm - pull / 2 * dd) + new_mm
        total[:, column] = torch.tensor([new_dd, new_dm, new_mm])
    assert bool(torch.linalg.eigvals(total).abs().max() < 1) == is_stable

"""K-GT and ProxSkip take local steps, follow the lines of their papers, and end at the optimum all the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gossip_modules import KGT, ExactDiffusion, LocalSGD, ProxSkip, RingGraph, Schedule
from gossip_modules.algorithms.d_psgd import DPSGD
from gossip_modules.extend import Algorithm, SGDStep
from gossip_modules.graph_manager import CompleteGraph
from gossip_modules.mixing_manager import MetropolisHastingsMixing, MixingManager, UniformMixing
from gossip_modules.rounds.stacked import Stacked
from tests.harness.quadratics import train_rows

N, DIM, ETA, STEPS = 6, 4, 0.04, 96
RING = MetropolisHastingsMixing(RingGraph(N, peers_per_itr=2))
COMPLETE = MetropolisHastingsMixing(CompleteGraph(N, peers_per_itr=N - 1))
OPTIMUM = 0.8
"""Of the five parabolas of `train_rows`."""

_DRAWS = np.random.default_rng(7)
_FACTORS = _DRAWS.standard_normal((N, 8, DIM, DIM))
A = (_FACTORS @ _FACTORS.swapaxes(-1, -2)).mean(1) / DIM
B = _DRAWS.standard_normal((N, DIM))


def gradient(x: np.ndarray) -> np.ndarray:
    """Of x A_i x / 2 + B_i x, for each row x_i."""
    return np.einsum("nij,nj->ni", A, x) + B


def trained(rule: Algorithm, mixing: MixingManager) -> list[np.ndarray]:
    """The models [N, DIM] after each step and its round."""
    rows, rounds, history = torch.zeros(N, DIM, dtype=torch.float64), Stacked(rule, mixing), []
    rounds.step(rows, 0)
    for k in range(1, STEPS + 1):
        rows -= torch.from_numpy(ETA * gradient(rows.numpy()))
        rounds.step(rows, k, sgd=SGDStep(ETA, 0.0))
        history.append(rows.numpy().copy())
    return history


def dense(mixing: MixingManager) -> np.ndarray:
    return mixing.matrix(0).double().numpy()


@pytest.mark.parametrize(("num_local", "eta_s"), [(1, 1.0), (4, 1.0), (4, 0.7)])
def test_kgt_follows_algorithm_1_of_its_paper(num_local: int, eta_s: float) -> None:
    w, x, c = dense(RING), np.zeros((N, DIM)), np.zeros((N, DIM))
    found = trained(KGT(num_local, lr=eta_s), RING)
    for t in range(STEPS // num_local):
        y = x
        for k in range(num_local):
            y = y - ETA * (gradient(y) + c)
            if k < num_local - 1:
                assert np.abs(found[t * num_local + k] - y).max() < 1e-10
        z = (x - y) / (num_local * ETA)
        c = c - z + w @ z
        x = w @ (x - num_local * ETA * eta_s * z)
        assert np.abs(found[(t + 1) * num_local - 1] - x).max() < 1e-10
    assert np.abs(c.sum(0)).max() < 1e-12
    assert np.abs(c).max() > 0.1


def coin(seed: int, k: int, p: float) -> bool:
    return bool(np.random.default_rng((seed, k)).random() < p)


@pytest.mark.parametrize(("p", "step_size"), [(0.3, 0.5), (0.3, 0.75), (1.0, 0.5)])
def test_prox_skip_follows_its_decentralised_variant(p: float, step_size: float) -> None:
    """With gamma the learning rate, and tau = s p / gamma."""
    w, x, h = dense(RING), np.zeros((N, DIM)), np.zeros((N, DIM))
    tau = step_size * p / ETA
    for k, found in enumerate(trained(ProxSkip(p, step_size=step_size, seed=3), RING), start=1):
        hat = x - ETA * (gradient(x) - h)
        x = hat
        if coin(3, k, p):
            x = hat - ETA * tau / p * (hat - w @ hat)
            h = h + p / ETA * (x - hat)
        assert np.abs(found - x).max() < 1e-10
    assert np.abs(h.sum(0)).max() < 1e-12
    assert np.abs(h).max() > 0.1


def test_prox_skip_on_a_complete_graph_is_scaffnew() -> None:
    """Algorithm 2 of the paper, whose prox is the mean of x - gamma / p h over ranks."""
    p, x, h = 0.3, np.zeros((N, DIM)), np.zeros((N, DIM))
    for k, found in enumerate(trained(ProxSkip(p, step_size=1.0), COMPLETE), start=1):
        hat = x - ETA * (gradient(x) - h)
        x = np.broadcast_to((hat - ETA / p * h).mean(0), hat.shape) if coin(0, k, p) else hat
        h = h + p / ETA * (x - hat)
        assert np.abs(found - x).max() < 1e-10


def test_prox_skip_that_never_skips_is_exact_diffusion() -> None:
    for found, expected in zip(trained(ProxSkip(1.0), RING), trained(ExactDiffusion(), RING), strict=True):
        assert np.abs(found - expected).max() < 1e-12


def distance(rule: Algorithm, num_steps: int, schedule: Schedule | None = None) -> float:
    """The largest distance of five ranks with different data from the optimum."""
    mixing = MetropolisHastingsMixing(RingGraph(5, peers_per_itr=2))
    x = train_rows(rule, mixing, num_steps, schedule=schedule or Schedule())[-1]
    return float((x - OPTIMUM).abs().max())


@pytest.mark.parametrize("rule", [KGT(5), KGT(5, lr=0.7), ProxSkip(0.2), ProxSkip(0.2, step_size=0.8)], ids=repr)
def test_local_steps_reach_the_optimum_of_different_data(rule: Algorithm) -> None:
    assert distance(rule, 800) < 1e-8


@pytest.mark.parametrize(("rule", "schedule"), [(LocalSGD(5), None), (DPSGD(), Schedule(5))], ids=["local", "dpsgd"])
def test_without_corrections_they_end_beside_it(rule: Algorithm, schedule: Schedule | None) -> None:
    assert distance(rule, 800, schedule) > 0.01


def test_a_round_goes_on_where_the_rate_drops() -> None:
    """At the optimum nothing moves, whatever the rate is, since c and h are scaled with it."""
    mixing = MetropolisHastingsMixing(RingGraph(5, peers_per_itr=2))
    for rule in (KGT(5), ProxSkip(0.2)):
        x = train_rows(rule, mixing, 900, rate=lambda k: 0.05 if k < 800 else 0.01)
        assert (x[-100:] - OPTIMUM).abs().max() < 1e-8


@pytest.mark.parametrize("rule", [KGT(3), ProxSkip(0.3)], ids=repr)
def test_silent_rounds_and_no_others_send_nothing(rule: Algorithm) -> None:
    rounds, rows, sent = Stacked(rule, RING), torch.zeros(N, DIM), 0.0
    for k in range(40):
        rounds.step(rows, k, sgd=SGDStep(ETA, 0.0) if k else None)
        sent, before = rounds.sent_bytes, sent
        assert (sent == before) == rule.is_silent(k)


def test_prox_skip_sends_in_its_share_of_the_steps() -> None:
    for seed in range(3):
        drawn = [not ProxSkip(0.2, seed=seed).is_silent(k) for k in range(4000)]
        assert abs(np.mean(drawn) - 0.2) < 4 * (0.2 * 0.8 / 4000) ** 0.5
    assert [k for k in range(40) if not ProxSkip(0.2).is_silent(k)] != [
        k for k in range(40) if not ProxSkip(0.2, seed=1).is_silent(k)
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KGT(0), "got sync_every=0, expected an integer of at least 1; pass K"),
        (lambda: KGT(lr=0.0), r"KGT: got lr=0\.0, expected a number above 0"),
        (lambda: ProxSkip(0.0), r"ProxSkip: got probability=0\.0, expected 0 < probability <= 1"),
        (lambda: ProxSkip(step_size=1.5), r"ProxSkip: got step_size=1\.5, expected 0 < step_size <= 1"),
        (lambda: ProxSkip(seed=-1), "got seed=-1, expected an integer of at least 0"),
        (
            lambda: ProxSkip(step_size=1.0).check(RING),
            r"got step_size=1\.0 and .* with an eigenvalue of -0\.3333, expected step_size <= 0\.75, so .* step_size=0",
        ),
        (
            lambda: KGT(4).check_schedule(Schedule(gossip_every=2)),
            "with KGT.*, expected gossip_every=1: each step adds its correction, .*; leave gossip_every out",
        ),
        (lambda: KGT(4).check(UniformMixing(RingGraph(6))), "KGT: got .*, expected symmetric weights"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

"""A2CiD2: rates of the graph, the law of the momentum, and the mean that exchanges keep."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules.ad_psgd.momentum import ContinuousMomentum
from gossip_modules.ad_psgd.shared_model import SharedModel
from gossip_modules.flat.vector import FlatVector
from gossip_modules.graph_manager import DynamicBipartiteLinearGraph, RingGraph
from gossip_modules.lab.asynchronous import Bilateral
from gossip_modules.lab.plan import own_pace
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.mixing_manager.graph_weights import default_mixing
from gossip_modules.mixing_manager.momentum_rates import MomentumRates
from gossip_modules.rounds.rows import StackedMixing
from tests.harness.problems import mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten
from tests.library.ad_psgd.pairs import Meeting, X, engine_of, is_active, wrap
from tests.library.lab.simulations import CLUSTER, Rounds, made


class Cycle(DynamicBipartiteLinearGraph):
    """Pairs of neighbours on a cycle, to the one side and to the other in turn."""

    def shifts(self, num_peers: int) -> Sequence[int]:
        return tuple(dict.fromkeys((1, self.world_size - 1)))


def cycle(n: int) -> Tensor:
    """Rates of one half for each link of a cycle."""
    rates = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        rates[i, (i + 1) % n] = rates[(i + 1) % n, i] = 0.5
    return rates


@pytest.mark.parametrize(
    ("n", "eta", "alpha"),
    [(8, 0.289281, 0.9877), (16, 0.142474, 1.8717), (32, 0.070418, 3.6648), (64, 0.034970, 7.2624)],
)
def test_golden_rates(n: int, eta: float, alpha: float) -> None:
    """Of a cycle lambda_2 = 1 - cos(2 pi / n), and a link has the resistance 2 (n - 1) / n."""
    found = MomentumRates.of(cycle(n))
    assert (round(found.eta, 6), round(found.alpha, 4)) == (eta, alpha)
    chi1, chi2 = 1 / (1 - math.cos(2 * math.pi / n)), (n - 1) / n
    assert found.eta == pytest.approx(1 / (2 * math.sqrt(chi1 * chi2)), abs=1e-9)
    assert found.alpha == pytest.approx(math.sqrt(chi1 / chi2) / 2, rel=1e-9)
    assert set(found.interval) == {1.0}


def test_rates_of_graphs() -> None:
    assert MomentumRates.on(Cycle(8)) == MomentumRates.of(cycle(8))
    pair = MomentumRates.on(Cycle(2))
    assert pair.eta == pytest.approx(1.0)
    assert pair.alpha == pytest.approx(0.5)  # no momentum
    assert MomentumRates.on(RingGraph(1)) == (0.0, 0.5, (math.inf,))


def test_corrections_are_those_of_two_models() -> None:
    """x and x' by hand, with gradient steps between exchanges."""
    graph, x = Cycle(16), FlatVector.over(torch.tensor([1.0, -2.0], dtype=torch.float64))
    rates, momentum = MomentumRates.on(graph), ContinuousMomentum(x.like(), graph, 1)
    shared = SharedModel(x, momentum)
    one, two = x.raw.view(torch.float64)[:2].clone(), x.raw.view(torch.float64)[:2].clone()
    for k, num_exchanges in enumerate((1, 2, 0, 1)):
        step = torch.tensor([0.1 * k, 0.3], dtype=torch.float64)
        x.segments[0].sub_(step)
        one, two = one - step, two - step
        shared.publish(x, step=k)
        total = torch.zeros(2, dtype=torch.float64)
        for number in range(num_exchanges):
            difference = torch.tensor([number + 1.0, 5.0 - k], dtype=torch.float64)  # x_j - x_i
            shared.deliver(FlatVector.over(difference.clone()), alpha=0.5, step=k)
            total += difference
        shared.collect(x)
        if num_exchanges:
            v = (1 - math.exp(-2 * rates.eta * num_exchanges)) / 2 * (two - one)
            one, two = one + v, two - v
            one, two = one + total / 2, two + rates.alpha * total
        torch.testing.assert_close(x.segments[0], one, rtol=0, atol=1e-12)
        torch.testing.assert_close(momentum.difference[0], two - one, rtol=0, atol=1e-12)


def test_a_momentum_of_other_tensors_is_refused() -> None:
    momentum = ContinuousMomentum(FlatVector.over(torch.ones(3)), Cycle(4), 0)
    for wrong in ([torch.zeros(1)], [torch.zeros(4)], [torch.zeros(3)] * 2, []):
        with pytest.raises(
            ValueError, match=r"got a continuous momentum of \[.*\] elements, expected \[3\]: other ten"
        ):
            momentum.load_state_dict({"momentum": wrong})
    momentum.load_state_dict({})
    assert not momentum.difference[0].any()


def disagreement(rates: MomentumRates, *, until: float) -> float:
    """E mean_i (x_i - mean x)^2 at a time, exactly, for x = x' of independent unit variance and events of Poisson."""
    n = len(rates.interval)
    one, twice = torch.eye(n, dtype=torch.float64), torch.eye(2 * n, dtype=torch.float64)
    flow = rates.eta * torch.kron(torch.tensor([[-1.0, 1.0], [1.0, -1.0]]).double(), one)
    moments = torch.kron(flow, twice) + torch.kron(twice, flow)
    for i in range(n):
        d = torch.zeros(n, dtype=torch.float64)
        d[i], d[(i + 1) % n] = 1.0, -1.0
        jump = twice.clone()
        jump[:n, :n] -= torch.outer(d, d) / 2
        jump[n:, :n] -= rates.alpha * torch.outer(d, d)
        moments += 0.5 * (torch.kron(jump, jump) - torch.eye(4 * n * n, dtype=torch.float64))
    start = torch.kron(torch.ones(2, 2, dtype=torch.float64), one)
    end = (torch.linalg.matrix_exp(until * moments) @ start.flatten()).view(2 * n, 2 * n)[:n, :n]
    return float(torch.trace(end) - end.sum() / n) / n


def test_the_momentum_brings_ranks_of_a_cycle_together() -> None:
    """For equal messages; 8 ranks."""
    rates = MomentumRates.of(cycle(8))
    assert disagreement(rates, until=40.0) < 0.15 * disagreement(rates._replace(eta=0.0, alpha=0.5), until=40.0)


def test_exchanges_keep_the_mean_of_both_models() -> None:
    """Without gradients ranks agree; the sum of x + (x' - x) / 2 stays, whatever exchanges were concurrent."""
    meeting, n = Meeting(8), 8

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, float]:
        wrapper = wrap(mlp(group.rank()), group, continuous_momentum=True, graph=Cycle)
        start = flatten(wrapper.module)
        share = 40 if is_active(wrapper) else 0
        meeting.run(lambda: wrapper(X), lambda: wrapper.comm_stats()["num_rounds"] >= share)
        wrapper.settle()
        momentum = engine_of(wrapper).momentum
        assert momentum is not None
        end = flatten(wrapper.module)
        total = end + torch.cat([part[: len(end)] for part in momentum.difference]) / 2
        distance = wrapper.consensus_distance()
        state = copy.deepcopy(engine_of(wrapper).state_dict())
        engine_of(wrapper).load_state_dict({**state, "momentum": [part + 1 for part in state["momentum"]]})
        assert all(map(torch.equal, momentum.difference, [part + 1 for part in state["momentum"]]))
        wrapper.close()
        return start, total, distance

    starts, ends, distances = zip(*run_ranks(n, body), strict=True)
    assert (torch.stack(starts).sum(0) - torch.stack(ends).sum(0)).abs().max() < 1e-5
    assert max(distances) < 0.05


def test_the_lab_has_momentum() -> None:
    """Workers of equal speed on a cycle: after as many ticks they are closer than with AD-PSGD."""
    distance = []
    for rates in (None, MomentumRates.on(Cycle(16))):
        clock: Any = made("adpsgd", replace(CLUSTER, world_size=16)).driver
        mixing = StackedMixing(default_mixing(Cycle(16), push_sum=False))
        method = Rounds(own_pace(Bilateral(mixing, clock.compute, clock.links, clock.message, rates=rates)))
        x = torch.randn(16, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for _ in range(120):
            method.forward(x)
        distance.append(float((x - x.mean(0)).square().mean()))
    assert distance[1] < 0.2 * distance[0]
    plan: Any = made("a2cid2", replace(CLUSTER, world_size=4)).driver
    assert plan._rates == MomentumRates.on(plan.mixing.graph)


def test_weights_of_ones_own_are_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"with continuous_momentum=True, expected one of them: the rates"):
            wrap(mlp(0), group, continuous_momentum=True, mixing=MetropolisHastingsMixing)

    run_ranks(2, body)

"""Methods for uneven data bring workers of the Lab to the known optimum of their quadratics; others end beside it."""

from __future__ import annotations

import pytest
import torch

from gossip_modules.lab import Compute, LabPlan, Network, Quadratics, Setting, simulate
from gossip_modules.lab.comparison import LabTraining

SETTING = Setting(6, None, Compute(0.1), Network("1 Gbit/s"))
STEPS = 500


def error(text: str) -> float:
    """The distance of six workers from the optimum after training, relative to the start."""
    problem = Quadratics(learning_rate=0.25)
    *_, z = LabTraining(LabPlan.of(text).resolved(SETTING.world_size), SETTING, problem).run(STEPS)
    return problem.error(z)


@pytest.mark.parametrize(
    "text",
    [
        "D2()",
        "EXTRA()",
        "ExactDiffusion()",
        "GradientTracking()",
        "KGT(sync_every=2)",
        "ProxSkip(probability=0.4)",
    ],
)
def test_methods_for_uneven_data_reach_the_optimum(text: str) -> None:
    assert error(text) < 1e-10


@pytest.mark.parametrize("text", ["DPSGD()", "LocalSGD(2)"])
def test_others_end_beside_it(text: str) -> None:
    assert error(text) > 0.01


def test_the_optimum_is_where_the_mean_gradient_is_zero() -> None:
    problem, n = Quadratics(dim=5, condition=9.0, seed=2), 4
    x = problem.optimum(n)[:, None].requires_grad_()
    losses = []
    for worker in range(n):
        factor, target = problem.batch(worker, 3, 0)
        losses.append((factor @ x - target).square().sum() / 2)
        curvatures = torch.linalg.eigvalsh(factor.mT @ factor)
        torch.testing.assert_close(curvatures[[0, -1]], torch.tensor([1 / 9, 1.0], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), x)
    assert float(gradient.abs().max()) < 1e-12
    assert float(torch.stack(losses).detach().std()) > 0.1, "workers have equal losses"


def test_a_prediction_counts_only_steps_with_messages() -> None:
    """K-GT sends twice the model in each fifth step, and D-PSGD the model in each step."""
    found, plain = (simulate(text, SETTING, Quadratics(), max_steps=100) for text in ("KGT(5):ring", "dpsgd:ring"))
    assert found.rank_bytes == pytest.approx(plain.rank_bytes * 2 / 5, rel=0.05)

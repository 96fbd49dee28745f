"""Algorithms over one another: which of them have a meaning, and what the rounds of both are together."""

from __future__ import annotations

import re

import pytest
import torch

from gossip_modules import D2, DPSGD, KGT, Choco, GASLoC, GradientTracking, NoLoCo, QGDSGDm, SignNorm, SlowMo
from gossip_modules.extend import Algorithm
from gossip_modules.rounds.algorithm import FORMER_FACTS
from tests.harness.quadratics import START, descended, solve

CHOCO = Choco(SignNorm(), step_size=0.4)


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        (QGDSGDm(), D2(), "both change the optimizer steps"),
        (GASLoC(), D2(), "both change the optimizer steps"),
        (SlowMo(gossip_every=1), QGDSGDm(), "both change the optimizer steps"),
        (GradientTracking(), CHOCO, "expected plain gossip: the outer algorithm mixes two vectors"),
        (KGT(), CHOCO, "expected plain gossip: the outer algorithm mixes two vectors"),
        (SlowMo(), CHOCO, "the outer algorithm never yields `Mix`"),
        (CHOCO, D2(), "the outer algorithm never yields `Mix`"),
        (D2(), NoLoCo(), "the inner algorithm moves an anchor at its own times"),
    ],
)
def test_an_algorithm_is_refused_below_one_with_which_it_has_no_meaning(
    outer: Algorithm, inner: Algorithm, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"got {type(outer).__name__}\(.*\)\.over\(.*{message}"):
        outer.over(inner)


def test_an_algorithm_is_made_of_parts() -> None:
    assert GradientTracking().over(DPSGD()).parts == (GradientTracking(), DPSGD())
    assert SlowMo(gossip_every=1).over(D2().over(CHOCO)).parts == (SlowMo(gossip_every=1), D2(), CHOCO)


def test_slow_momentum_over_d2_moves_the_mean_as_without_gossip_and_lets_it_start_over() -> None:
    """With the slow rates 1 and 0 an outer step is an exact average; what D2 keeps begins anew after it."""
    slow = SlowMo(3, momentum=0.0, gossip_every=1)
    w = D2().default_mixing(5).matrix(0).double()
    x, c = torch.full((5,), START, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for k in range(8):
        h = descended(x, int(k > 0))
        if k and k % 3 == 0:
            x, c = h.mean().expand(5), torch.zeros(5, dtype=torch.float64)
        else:
            x = w @ (h + c)
            c = x - h
    torch.testing.assert_close(solve(lambda: {"algorithm": slow.over(D2())}, num_steps=7), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FORMER_FACTS)
def test_a_fact_of_an_older_version_says_what_takes_its_place(name: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"Own: got {name}, which is gone: {FORMER_FACTS[name]}")):
        type("Own", (DPSGD,), {name: True})


def test_an_algorithm_may_refuse_a_membership() -> None:
    class Fixed(DPSGD):
        def for_membership(self) -> Algorithm:
            raise ValueError("the rounds need all peers")

    for algorithm in (Fixed(), GradientTracking().over(Fixed())):
        with pytest.raises(ValueError, match="the rounds need all peers"):
            algorithm.for_membership()

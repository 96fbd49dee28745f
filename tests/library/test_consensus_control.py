"""What `ConsensusControl` estimates and decides, without any ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gossip_modules import ConsensusControl, RingGraph
from gossip_modules.consensus_control import ControlLaw, Differences
from gossip_modules.graph_manager import (
    BaseGraph,
    ChainGraph,
    CompleteGraph,
    GraphManager,
    NPeerDynamicDirectedExponentialGraph,
    TorusGraph,
)
from gossip_modules.mixing_manager import MixingManager
from gossip_modules.mixing_manager.graph_weights import default_mixing

N = 8


def squared_distance(x: Tensor) -> float:
    """Xi^2 of models [n, d]."""
    return float(((x - x.mean(dim=0)) ** 2).sum() / len(x))


def squared_correction(x: Tensor, mixing: MixingManager, t: int = 0) -> float:
    """mean_i ||c_i||^2 of round t."""
    return float(((mixing.matrix(t) @ x - x) ** 2).sum() / len(x))


def weights(graph: GraphManager) -> MixingManager:
    """Doubly stochastic ones."""
    return default_mixing(graph, push_sum=not graph.is_symmetric)


def models(seed: int, n: int = N) -> Tensor:
    """Float64 [n, 5]."""
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The estimate.


@pytest.mark.parametrize(
    "graph", [RingGraph(N, peers_per_itr=2), TorusGraph(9, peers_per_itr=4), ChainGraph(5), BaseGraph(6, 2)], ids=str
)
def test_corrections_are_bounded_by_the_spectrum(graph: GraphManager) -> None:
    """(1 - l_2)^2 Xi^2 <= mean_i ||c_i||^2 <= (1 - l_n)^2 Xi^2, with equality at the eigenvectors."""
    mixing, n = weights(graph), graph.world_size
    values, vectors = torch.linalg.eigh(mixing.matrix(0))
    low, high = (1 - values[-2]) ** 2, (1 - values[0]) ** 2
    for x in (models(0, n), models(1, n), vectors[:, [0]], vectors[:, [-2]]):
        found = squared_correction(x, mixing)
        assert low * squared_distance(x) - 1e-10 <= found <= high * squared_distance(x) + 1e-10
    for k, factor in ((0, high), (-2, low)):
        x = vectors[:, [k]]
        assert squared_correction(x, mixing) == pytest.approx(float(factor * squared_distance(x)), abs=1e-10)


def test_the_estimate_is_exact_on_a_complete_graph() -> None:
    mixing = weights(CompleteGraph(N, peers_per_itr=N - 1))
    differences = Differences(mixing)
    for seed in range(3):  # whatever came before
        differences.step(seed)
        x = models(seed)
        estimate = squared_correction(x, mixing) / differences.mix(seed)
        assert estimate == pytest.approx(squared_distance(x), abs=1e-10)


@pytest.mark.parametrize(
    "graph",
    [RingGraph(N, peers_per_itr=2), NPeerDynamicDirectedExponentialGraph(6), BaseGraph(6), CompleteGraph(4)],
    ids=str,
)
def test_the_estimate_is_exact_in_the_mean_over_independent_steps(graph: GraphManager) -> None:
    """Unit steps of one rank at a time, all combinations: their mean square is that of independent random steps.

    Each column of x is what one step of one rank has become; every step adds one for each rank.
    """
    mixing, n = weights(graph), graph.world_size
    differences, x = Differences(mixing), torch.zeros(n, 0, dtype=torch.float64)
    for t, num_steps in enumerate((1, 2, 1, 1, 3)):
        differences.step(num_steps)
        x = torch.cat((x, *[torch.eye(n, dtype=torch.float64)] * num_steps), dim=1)
        gain = differences.mix(t)
        assert squared_correction(x, mixing, t) / gain == pytest.approx(squared_distance(x), abs=1e-10)
        x = mixing.matrix(t) @ x
    differences.average()
    differences.step(1)
    fresh = Differences(mixing)
    fresh.step(1)
    assert differences.mix(0) == fresh.mix(0)


def test_rounds_without_information_have_gain_0_and_large_worlds_one_for_all_directions() -> None:
    alone = Differences(weights(RingGraph(1)))
    alone.step(1)
    assert alone.mix(0) == 0
    large = weights(RingGraph(300, peers_per_itr=2))
    differences = Differences(large)
    differences.step(1)
    assert differences.mix(0) == pytest.approx(300 * ((2 / 3) ** 2 + 2 / 9) / 299, abs=1e-10)
    assert differences.covariance.numel() == 0


# The law.


def observed(law: ControlLaw, step: int, distance: float, update: float = 1.0) -> bool:
    """A round at this step, of ranks that were so far apart; whether that is too far."""
    assert law.starts_round(step)
    law.observe_update([update**2 * law.steps_between] * 4)
    is_apart = law.observe([distance**2] * 4, 1.0)
    law.adapt(law.estimate)
    return is_apart


def test_intervals_grow_by_one_and_shrink_by_half() -> None:
    law = ControlLaw(ConsensusControl(10.0, is_relative=False, max_interval=4, average_every=0))
    for step, interval in ((0, 2), (2, 3), (5, 4), (9, 4)):
        assert not observed(law, step, 4.0)
        assert law.interval == interval
        assert [law.starts_round(step + k) for k in range(1, interval)] == [False] * (interval - 1)
    assert not observed(law, 13, 7.0)  # between half the target and the target
    assert law.interval == 4
    assert observed(law, 17, 11.0)
    assert law.interval == 2
    assert law.num_skipped_steps == 1 + 2 + 3 + 3
    assert not law.is_average_due


def test_a_relative_target_follows_the_updates() -> None:
    law = ControlLaw(ConsensusControl(2.0))
    assert not observed(law, 0, 100.0)  # no update yet
    assert math.isnan(law.bound)
    assert not observed(law, 1, 1.5)
    assert law.bound == 2.0
    law.interval = 1
    assert not observed(law, 2, 2.05, update=2.0)
    assert law.bound == pytest.approx(2 * math.sqrt(0.9 + 0.1 * 4))
    law.interval = 3
    assert observed(law, 5, 3.0, update=2.0)  # its drift is that of three steps
    assert law.bound == pytest.approx(2 * math.sqrt(0.9 * 1.3 + 0.1 * 4))


def test_models_that_do_not_move_or_are_not_finite_decide_nothing() -> None:
    law = ControlLaw(ConsensusControl(2.0))
    law.starts_round(0)
    assert law.starts_round(1)
    law.observe_update([0.0, 0.0])
    assert not law.observe([1.0, 1.0], 1.0)
    law.observe_update([1.0, 1.0])
    for bad in (math.nan, math.inf):
        law.observe_update([1.0, bad])
        assert not law.observe([1.0, bad], 1.0)
        law.adapt(law.estimate)
        assert law.interval == 1
    assert not law.observe([9.0, 9.0], 0.0)  # nobody had a peer
    assert math.isnan(law.estimate)
    law.observe_update([-1.0, -1.0])  # unknown
    assert law.observe([9.0, 9.0], 1.0)


def test_exact_averages_correct_the_estimate() -> None:
    law = ControlLaw(ConsensusControl(1.0, is_relative=False, average_every=8))
    for k in range(20):
        law.observe([1.0, 3.0], 2.0)  # 1 by the gain, 2 in truth
        law.average(law.estimate, [4.0, 4.0])
        assert law.estimate == 2.0
        assert law.num_averages == k + 1
    law.observe([1.0, 3.0], 2.0)
    assert law.estimate == pytest.approx(2.0, abs=1e-3)


def test_averages_come_early_and_then_regularly() -> None:
    law = ControlLaw(ConsensusControl(1.0, average_every=8))
    due = []
    for step in range(40):
        assert law.starts_round(step)
        if law.is_average_due:
            due.append(step + 1)
            law.average(math.nan, [1.0])
    assert due == [2, 6, 14, 22, 30, 38]


def test_state_is_plain_and_whole() -> None:
    control = ConsensusControl(2.0)
    law, other = ControlLaw(control), ControlLaw(control)
    for step in range(3):
        observed(law, step * 4, 0.5)
    other.load_state_dict(law.state_dict())
    assert vars(other) == vars(law)
    other.reset()
    assert str(vars(other)) == str(vars(ControlLaw(control)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, r"got target=0.0, expected a finite number above 0: .*; start with 2.0"),
        ({"target": math.nan}, "got target=nan, expected a finite"),
        ({"target": True}, "got target=True, expected a finite"),
        ({"target": "2"}, "got target='2', expected a finite"),
        (
            {"is_relative": "1"},
            r"got is_relative='1', expected True, for a .*, or False, for one as consensus_distance",
        ),
        ({"is_relative": None}, "got is_relative=None, expected True"),
        ({"remedy": "peers"}, "got remedy='peers', expected 'average', .* or 'rounds'"),
        ({"gossip_every": 0}, "got gossip_every=0, expected a whole number of at least 1"),
        ({"max_rounds": 1.5}, "got max_rounds=1.5, expected a whole number of at least 1"),
        ({"average_every": -1}, "got average_every=-1, expected a whole number of at least 0"),
        ({"remedy": "rounds", "average_every": 1}, "got remedy='rounds' with average_every=1, expected .*'average'"),
        ({"gossip_every": 20}, "got max_interval=16 and gossip_every=20, expected no less: .*; pass a larger"),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConsensusControl(**{"target": 2.0, **options})

"""What happens at step k."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossip_modules import DPSGD, DiLoCo, LocalSGD, RingGraph, Schedule
from gossip_modules.extend import Algorithm
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.schedule import Action
from gossip_modules.wrappers.choices import Choices
from tests.harness.quadratics import CURVATURES, LEARNING_RATE, MINIMA, START, solve, train_rows


@pytest.mark.parametrize("gossip_every", [1, 2, 3])
@pytest.mark.parametrize("average_every", [0, 1, 2, 3])
def test_every_step_has_the_action_of_the_definition(gossip_every: int, average_every: int) -> None:
    """Count rounds: the H-th, 2 H-th, ... of them averages."""
    schedule = Schedule(gossip_every, average_every)
    num_rounds = 0
    for step in range(24):
        if step % gossip_every:
            expected = Action.SKIP
        else:
            num_rounds += 1
            is_average = average_every > 0 and num_rounds % average_every == 0
            expected = Action.AVERAGE if is_average else Action.GOSSIP
        assert schedule.action(step) is expected


def test_training_begins_with_averages() -> None:
    schedule = Schedule(gossip_every=4, average_until=3)
    actions = [schedule.action(step) for step in range(9)]
    assert actions == [Action.WARM_UP] * 4 + [Action.GOSSIP, *[Action.SKIP] * 3, Action.GOSSIP]
    with pytest.raises(ValueError, match="average_until=-1, expected whole"):
        Schedule(average_until=-1)


@pytest.mark.parametrize(
    "algorithm", [LocalSGD(3), DiLoCo(3, lr=0.7, momentum=0.0), None], ids=["post-local", "diloco", "gossip"]
)
def test_the_algorithm_begins_after_the_averages(algorithm: Algorithm | None) -> None:
    """Five steps as all-reduce SGD with momentum; then the algorithm, whose anchor is the model after them."""
    own: dict[str, Any] = {} if algorithm is None else {"algorithm": algorithm}
    graph = {} if algorithm is not None else {"graph": RingGraph(5, peers_per_itr=2), "push_sum": False}
    options = {"schedule": Schedule(average_until=5), **own, **graph}

    def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)

    x, m = torch.full((5,), START, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    a, b = torch.tensor(CURVATURES, dtype=torch.float64), torch.tensor(MINIMA, dtype=torch.float64)
    phi = x
    for k in range(1, 12):
        m = 0.9 * m + a * (x - b)
        x = x - LEARNING_RATE * m
        if k <= 5:
            x = phi = x.mean().expand(5)
        elif algorithm is None:
            x = (x + x.roll(1) + x.roll(-1)) / 3
        elif k % 3 == 0:
            x = phi = phi - (0.7 if isinstance(algorithm, DiLoCo) else 1.0) * (phi - x).mean()
    found = solve(lambda: options, num_steps=11, make_optimizer=momentum_sgd)
    torch.testing.assert_close(found, x, rtol=0, atol=1e-12)
    weights = MetropolisHastingsMixing(RingGraph(5, peers_per_itr=2))
    rows = train_rows(algorithm or DPSGD(), weights, 11, momentum=0.9, schedule=options["schedule"])
    torch.testing.assert_close(rows[-1], x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("outer", [DiLoCo(3, delay=1, lr=0.7, momentum=0.5), DiLoCo(4, delay=2, arrival="carry")])
def test_rows_with_a_delay_begin_with_averages_too(outer: DiLoCo) -> None:
    weights, schedule = MetropolisHastingsMixing(RingGraph(5, peers_per_itr=2)), Schedule(average_until=5)
    rows = train_rows(outer, weights, 19, schedule=schedule)
    found = solve(lambda: {"algorithm": outer, "schedule": schedule}, num_steps=19)
    torch.testing.assert_close(rows[-1], found, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("max_staleness", "average_until"), [(0, 3), (1, 4), (2, 5), (3, 5)])
def test_overlapped_averages_in_each_step_end_before_the_next_one(max_staleness: int, average_until: int) -> None:
    """All averages are those of an engine that is on time; rounds of gossip may then be late again."""
    schedule = Schedule(average_until=average_until)
    late, on_time = (
        solve(lambda: {"schedule": schedule, "overlap": True, "max_staleness": k}, num_steps=average_until)  # noqa: B023
        for k in (max_staleness, 0)
    )
    torch.testing.assert_close(late, on_time, rtol=0, atol=0)
    found = solve(lambda: {"schedule": schedule, "overlap": True, "max_staleness": max_staleness}, num_steps=20)
    assert found.isfinite().all()


def test_an_overlapped_average_is_no_common_beginning() -> None:
    choices = Choices(algorithm=DiLoCo(), schedule=Schedule(average_until=5))
    with pytest.raises(ValueError, match=r"average_until=5\) with overlap=True and DiLoCo.*; take delay"):
        choices.check(overlap=True, init_sync=True, nprocs_per_node=1)


def test_default_gossips_at_every_step() -> None:
    assert {Schedule().action(step) for step in range(10)} == {Action.GOSSIP}


@pytest.mark.parametrize("counts", [(0, 0), (-1, 0), (1, -1), (1, 2.5), (0.5, 0), (1, "8"), (1, True), (1, None)])
def test_counts_out_of_range(counts: tuple[Any, Any]) -> None:
    message = rf"got gossip_every={counts[0]!r}, average_every={counts[1]!r}, .*expected whole .*; use average_every=0"
    with pytest.raises(ValueError, match=message):
        Schedule(*counts)

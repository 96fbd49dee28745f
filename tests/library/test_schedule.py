"""What happens at step k."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import DPSGD, DiLoCo, GossipDataParallel, LocalSGD, RingGraph, Schedule, SlowMo, StreamingDiLoCo
from gossip_modules.extend import Algorithm, Mix
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.schedule import Action, Times
from gossip_modules.wrappers.choices import Choices
from tests.harness.quadratics import CURVATURES, LEARNING_RATE, MINIMA, START, solve, train_rows
from tests.harness.ranks import run_ranks


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


@pytest.mark.parametrize("average_every", range(5))
@pytest.mark.parametrize("gossip_every", range(1, 5))
def test_a_schedule_has_all_rounds_of_an_algorithm_or_is_refused(gossip_every: int, average_every: int) -> None:
    """The bound by definition: count the actions at the steps of the algorithm, over a common period."""
    schedule = Schedule(gossip_every, average_every)
    for first in range(1, 13):
        for every in range(1, 13):
            period = math.lcm(every, gossip_every * max(average_every, 1))
            actions = [schedule.action(k) for k in range(first, first + period, every)]
            num_averages = actions.count(Action.AVERAGE)
            is_whole = Action.SKIP not in actions and num_averages * average_every <= len(actions)
            try:
                schedule.check_times([Times(first, every)], of="it")
            except ValueError:
                assert not is_whole, (first, every)
            else:
                assert is_whole, (first, every)


@dataclass(frozen=True)
class EveryFourth(DPSGD):
    """Plain gossip at steps that the class chooses."""

    is_plain = False

    def is_due(self, k: int) -> bool:
        """See `Algorithm`."""
        return k % 4 == 0

    def round(self, v: Any, m: Any, k: int) -> Any:
        """See `Algorithm`."""
        yield Mix(v.x)


@dataclass(frozen=True)
class SaidEveryFourth(EveryFourth):
    """The same, with its steps declared."""

    times = (Times(0, 4),)


@pytest.mark.parametrize(
    ("algorithm", "schedule", "step"),
    [
        (StreamingDiLoCo(6, fragments=2, delay=0), Schedule(2), "whose round after step 3 it would leave out"),
        (DiLoCo(5), Schedule(3), "whose round after step 5 it would leave out"),
        (SlowMo(4, gossip_every=2).over(DPSGD()), Schedule(4), "whose round after step 2 it would leave out"),
        (StreamingDiLoCo(6, fragments=2), Schedule(average_every=2), "after the steps 3, 9, ... 2 of 2 would be exact"),
        (EveryFourth(), Schedule(2), "leave schedule out, or override `EveryFourth.times`"),
        (SaidEveryFourth(), Schedule(3), "whose round after step 4 it would leave out"),
    ],
    ids=str,
)
def test_a_wrapper_refuses_a_schedule_without_the_rounds(algorithm: Algorithm, schedule: Schedule, step: str) -> None:
    choices = Choices(algorithm=algorithm, schedule=schedule)
    with pytest.raises(ValueError, match=re.escape(step)):
        choices.check(overlap=False, init_sync=True, nprocs_per_node=1)


@pytest.mark.parametrize(
    ("options", "firsts", "every", "late"),
    [
        ({"algorithm": DiLoCo(5), "overlap": True, "max_staleness": 2}, (5,), 5, 3),
        ({"algorithm": DiLoCo(4), "overlap": True, "max_staleness": 5}, (4,), 4, 4),
        ({"algorithm": EveryFourth(), "overlap": True, "max_staleness": 2}, (0,), 4, 3),
        ({"algorithm": SaidEveryFourth(), "schedule": 2}, (0,), 4, 0),
        ({"algorithm": StreamingDiLoCo(6, fragments=2, delay=2), "schedule": 3}, (3, 6), 6, 2),
    ],
    ids=str,
)
def test_rounds_are_at_the_steps_of_the_algorithm(
    options: dict[str, Any], firsts: tuple[int, ...], every: int, late: int
) -> None:
    """Count the changes of each entry between optimizer steps: each round of its fragment changes it once."""
    num_steps = 24

    def body(group: dist.ProcessGroup) -> list[int]:
        model = torch.nn.Linear(20, 10, bias=False, dtype=torch.float64)
        wrapper = GossipDataParallel(model, process_group=group, push_sum=False, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = torch.zeros(10, 20, dtype=torch.int64)
        for _ in range(num_steps):
            before = model.weight.detach().clone()
            loss = wrapper(torch.ones(1, 20, dtype=torch.float64)).sum() * (group.rank() + 1)
            counts += model.weight.detach() != before
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        wrapper.close()
        return [int(count) for count in counts.unique()]

    found = run_ranks(2, body)[0]
    ended = [len(range(first, num_steps - late, every)) for first in firsts]
    begun = [len(range(first, num_steps, every)) for first in firsts]
    # The first round of plain gossip mixes equal models, which changes nothing.
    assert min(ended) - (0 in firsts) <= min(found)
    assert max(found) <= max(begun)


def test_default_gossips_at_every_step() -> None:
    assert {Schedule().action(step) for step in range(10)} == {Action.GOSSIP}


@pytest.mark.parametrize("counts", [(0, 0), (-1, 0), (1, -1), (1, 2.5), (0.5, 0), (1, "8"), (1, True), (1, None)])
def test_counts_out_of_range(counts: tuple[Any, Any]) -> None:
    message = rf"got gossip_every={counts[0]!r}, average_every={counts[1]!r}, .*expected whole .*; use average_every=0"
    with pytest.raises(ValueError, match=message):
        Schedule(*counts)

"""Workers of a mailbox in the Lab: the library's own code in virtual time, with speeds, links, deaths and newcomers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossip_modules import DiLoCo
from gossip_modules.lab import Compute, Join, Kill, LabTask, Mailbox, Network, Result, Setting, compare
from gossip_modules.lab.mail_training import MailTraining
from gossip_modules.lab.plan import LabPlan

WORLD = Mailbox(quorum=2, grace=1.0, poll=0.5, interval=2.0)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def data(worker: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 3, generator=generator)
    return x, x.sum(1, keepdim=True)


def make(
    algorithm: Any = None, *, speeds: tuple[float, ...] = (1.0,) * 3, network: str = "1 Gbit/s, 0 ms", **others: Any
) -> MailTraining:
    plan = LabPlan.of(algorithm or DiLoCo(sync_every=5))
    setting = Setting(len(speeds), others.pop("num_parameters", None), Compute(1.0, speeds=speeds), Network(network))
    task = LabTask(lambda: nn.Linear(3, 1), loss, data, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    return MailTraining(plan, setting, task, **{"world": WORLD, **others})


def train(training: MailTraining, num_ticks: int) -> dict[str, Any]:
    return [training.measure(tick) for tick in training.run(num_ticks, num_ticks)][-1]


def test_equal_workers_are_in_step_and_all_their_steps_count() -> None:
    training = make()
    row = train(training, 31)
    assert [worker.num_steps for worker in training.workers] == [30, 30, 30]
    assert [total for *_, total in training.ledger.closes] == [15, 30, 45, 60, 75, 90]
    assert training.ledger.steps_in(2) == 30
    assert 0.0 < row["waiting"] < 0.05
    assert row["loss"] < 2.0


def test_fast_workers_take_more_steps() -> None:
    training = make(
        DiLoCo(sync_every=10), speeds=(1.0, 2.0, 4.0), world=dataclasses.replace(WORLD, grace=0.1, poll=0.1)
    )
    row = train(training, 160)  # ticks of a quarter of a second
    assert row["seconds"] == 40.0
    steps = [worker.num_steps for worker in training.workers]
    np.testing.assert_allclose(steps, [40, 80, 160], rtol=0.15)


def test_the_steps_of_slow_workers_count_though_rounds_are_faster_than_their_periods() -> None:
    world = Mailbox(quorum=2, grace=0.1, poll=0.1, interval=5.0)
    training = make(DiLoCo(sync_every=10), speeds=(1.0, 4.0, 4.0, 4.0), network="1 Gbit/s, 20 ms", world=world)
    train(training, 240)
    assert len(training.ledger.closes) > 14  # at least two in each period of the slow worker
    for worker in training.workers:
        assert training.ledger.counted[worker.number] >= worker.num_steps - 25


def test_workers_whose_periods_follow_their_speeds_meet_and_wait_little() -> None:
    training = make(
        DiLoCo(sync_every=14), speeds=(1.0, 2.0, 4.0), world=dataclasses.replace(WORLD, period_by_speed=True)
    )
    row = train(training, 160)
    assert [training.arguments(worker)["algorithm"].sync_every for worker in range(3)] == [6, 12, 24]
    assert row["waiting"] < 0.1
    assert {len(members) for _, members, _ in training.ledger.closes} == {3}


def test_a_death_and_a_newcomer() -> None:
    training = make(events=[Kill(12, 1), Join(20)])
    train(training, 60)
    assert training.workers[1].num_steps == 11
    assert training.ledger.counted[1] == 10  # of two outer steps
    assert training.workers[3].num_steps > 30
    assert training.workers[3].thread.has_ended  # with the training
    assert len(training.ledger.closes[-1][1]) == 3


def test_a_store_that_is_away_stops_nobody_for_good() -> None:
    training = make(world=dataclasses.replace(WORLD, outages=((12.0, 20.0),)))
    train(training, 60)
    assert min(worker.num_steps for worker in training.workers) > 40
    assert len(training.ledger.closes) >= 9


def test_requests_take_the_time_of_the_link() -> None:
    """Six messages of 4 MB at 95.7 % of 100 Mbit/s take a third of a second each, one after the other in a worker."""
    slow, fast = (make(network=network, num_parameters=10**6) for network in ("100 Mbit/s, 10 ms", "1 Tbit/s, 0 ms"))
    waiting = [train(training, 31)["waiting"] for training in (slow, fast)]
    assert waiting[0] > waiting[1] + 0.05
    assert slow.sent_bytes > 6 * 4e6


def test_workers_of_a_group_have_the_link_of_their_group() -> None:
    network = Network.regions({"eu": 1, "us": 1}, inside="1 Gbit/s, 1 ms", between="1 Gbit/s, 80 ms")
    training = make(speeds=(1.0,) * 4)
    training.setting = dataclasses.replace(training.setting, network=network)
    assert [training.link_of(worker).latency_s for worker in (0, 1, 2, 3, 4)] == [1e-3, 1e-3, 0.08, 0.08, 1e-3]


def test_equal_seeds_have_equal_rows() -> None:
    first, second = (train(make(speeds=(1.0, 1.7, 2.5), events=[Kill(20, 0)]), 60) for _ in range(2))
    assert first == second


def test_a_method_that_needs_fixed_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="over a mailbox, expected another method"):
        make("dpwa")


def compared(method: Any = None, **others: Any) -> Result:
    options: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "loss": loss,
        "data": data,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        "workers": [3],
        "steps": 40,
        "world": WORLD,
        "compute": Compute(1.0, speeds=(1.0, 1.5, 2.0)),
        "progress": False,
        "every": 20,
    }
    return compare({"mine": method or DiLoCo(sync_every=5)}, **{**options, **others})


def test_compare_takes_a_mailbox_with_events() -> None:
    result = compared(events=[Kill(10, 2), Join(20)], evaluate=lambda model: float(model(torch.ones(1, 3))))
    assert [row["step"] for row in result.rows] == [0, 20, 40]
    assert {row["by"] for row in result.rows} == {"mailbox"}
    assert result.last[0]["seconds"] == 20.0  # ticks of the fastest worker
    assert result.last[0]["loss"] < 2.0
    assert result.last[0]["evaluation"] > result.rows[0]["evaluation"]


@pytest.mark.parametrize(
    ("method", "events", "expected"),
    [
        ("choco:ring:sign", (), "over a mailbox, expected"),
        (None, (Kill(3, 7),), r"expected one of the workers \[0, 1, 2\]"),
        (None, (Kill(3, 0), Kill(4, 1), Kill(5, 2)), r"expected one of the workers \[2\]"),
    ],
)
def test_compare_refuses_what_cannot_be_before_training(method: Any, events: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        compared(method, events=events)

"""Consensus control in the simulator: what it predicts is what ranks do, to the byte."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossip_modules import ConsensusControl, RingGraph
from gossip_modules.lab import Consensus, LabPlan, Setting, advise, simulate, tune
from gossip_modules.lab.__main__ import main
from gossip_modules.lab.clock import Clock, ControlledRound
from gossip_modules.lab.control import ControlledGossip
from gossip_modules.lab.planner import recipe_options
from gossip_modules.methods import METHODS
from gossip_modules.methods.wrapping import schedule_of
from gossip_modules.mixing_manager.graph_weights import default_mixing
from gossip_modules.rounds.rows import StackedMixing
from gossip_modules.schedule import Schedule
from tests.harness.ranks import run_ranks
from tests.library.engine.test_controlled import LR, targets, train
from tests.library.lab.simulations import CLUSTER, LINKS, UNEVEN, Rounds, digits, irregular, made, workers
from train.command_line import read_command_line
from train.tasks.images.config import Config

NUM_STEPS = 24
COUNTERS = ("num_skipped_steps", "num_added_rounds", "num_averages")
CONTROLS = {
    "exact averages": ConsensusControl(4.0, average_every=1),
    "gossip and averages": ConsensusControl(3.0, average_every=8),
    "a remedy alone": ConsensusControl(0.5, is_relative=False, average_every=0),
    "added rounds": ConsensusControl(0.8, remedy="rounds", gossip_every=2, max_rounds=3),
}


def small(n: int) -> Setting:
    """Of the model of `train`: 16 float64 numbers are as many bytes as 32 parameters."""
    return replace(CLUSTER, world_size=n, num_parameters=32)


def simulated(plan: LabPlan, setting: Setting) -> tuple[Rounds, ControlledGossip, list[Tensor]]:
    """After the steps of `train`, and the models [n, 16] in each forward."""
    n = setting.world_size
    method, x, points = made(plan, setting), torch.zeros(n, 16, dtype=torch.float64), []
    drawn_to = torch.stack([targets(rank, NUM_STEPS) for rank in range(n)])
    for step in range(NUM_STEPS):
        method.forward(x)
        points.append(x.clone())
        x -= LR * (x - drawn_to[:, step])
    assert isinstance(method.driver, ControlledGossip)
    return method, method.driver, points


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", CONTROLS)
def test_steps_and_bytes_are_those_of_ranks_on_threads(name: str, overlap: bool) -> None:
    control, n = CONTROLS[name], 4
    ranks = run_ranks(n, lambda group: train(group, NUM_STEPS, schedule=control, overlap=overlap))
    plan = LabPlan.of("osgp:ring" if overlap else "dpsgd:ring", schedule=control)
    method, driver, points = simulated(plan, small(n))
    for step in range(NUM_STEPS):
        real = torch.stack([each[0][step] for each in ranks])
        torch.testing.assert_close(points[step], real, rtol=0, atol=1e-12)
    stats = ranks[0][1][-1]
    assert {name: driver.law.stats()[name] for name in COUNTERS} == {name: stats[name] for name in COUNTERS}
    assert stats["num_skipped_steps"] + stats["num_added_rounds"] > 0
    assert method.sent_bytes == stats["bytes_sent"]
    rounds, averages = (stats[name] / NUM_STEPS for name in ("num_rounds", "num_averages"))
    assert driver.rates == (rounds, averages)


def test_a_step_under_control_takes_the_time_of_its_parts() -> None:
    """All wait for the slowest in each part, as all gather what was measured."""
    n, network = 4, LINKS.on(workers(4))
    rounds = StackedMixing(default_mixing(RingGraph(n, peers_per_itr=2), push_sum=False))
    message = network.plain_message(1e7)
    clock, plain = (Clock(UNEVEN, network, message) for _ in range(2))
    for each in (clock, plain):
        each.advance([])
    arrivals = clock.arrivals()
    copies = 6 * network.memory_seconds(1e7)
    gathered = {num_bytes: network.gather_seconds(num_bytes) for num_bytes in (16, 32)}
    exchange = float(network.exchange_seconds(rounds.round(0), message).max())
    expected = arrivals.max() + 2 * (exchange + copies + gathered[32])
    expected += network.all_reduce_seconds(1e7) + copies + gathered[16]
    clock.advance(ControlledRound((rounds.round(0), rounds.round(1)), True))
    assert clock.starts.tolist() == pytest.approx([expected] * n, rel=1e-12)

    plain.advance(ControlledRound((), True))
    alone = arrivals.max() + network.all_reduce_seconds(1e7) + copies + gathered[32]
    assert plain.starts.tolist() == pytest.approx([alone] * n, rel=1e-12)


def test_a_tight_target_communicates_more_than_a_loose_one() -> None:
    rates = []
    for target in (0.5, 32.0):
        plan = LabPlan.of("dpsgd:ring", schedule=ConsensusControl(target))
        rates.append(simulate(plan, CLUSTER, digits(), target=1e-9, max_steps=60).control_rates)
    assert rates[0] is not None
    assert rates[1] is not None
    assert rates[0][0] > 2 * rates[1][0]


def test_methods_that_say_themselves_when_they_communicate_stay_as_they_are() -> None:
    for name in ("ar", "localsgd", "diloco", "d2", "adpsgd", "wagma", "dpwa"):
        plain = simulate(name, CLUSTER, digits(), max_steps=6)
        controlled = simulate(LabPlan.of(name, schedule=ConsensusControl(2.0)), CLUSTER, digits(), max_steps=6)
        assert replace(controlled, plan=plain.plan) == plain
        assert plain.control_rates is None


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if "graph" in method.options and "gossip_every" in method.options]
)
def test_control_is_for_the_methods_whose_recipes_take_it(name: str) -> None:
    plan = LabPlan.of(name, schedule=ConsensusControl(2.0))
    if "peers_per_itr" in METHODS[name].options:
        assert simulate(plan, CLUSTER, digits(), max_steps=4).control_rates is not None
        return
    with pytest.raises(ValueError, match=rf"got schedule=Consensus.* with {name}, expected a Schedule: its"):
        simulate(plan, CLUSTER, digits(), max_steps=4)


def test_weights_that_the_library_refuses_are_refused() -> None:
    mixing = default_mixing(irregular(6, is_directed=True), push_sum=True)
    with pytest.raises(ValueError, match=r"got schedule=ConsensusControl.*, expected doubly stochastic weights"):
        ControlledGossip(mixing, ConsensusControl(2.0))


def test_a_target_in_updates_needs_updates() -> None:
    plan = LabPlan.of("dpsgd", schedule=ConsensusControl(2.0))
    with pytest.raises(ValueError, match=r"for a problem in which workers agree and learn nothing, expected is_rel"):
        simulate(plan, CLUSTER, Consensus())
    absolute = replace(plan, schedule=ConsensusControl(2.0, is_relative=False))
    assert simulate(absolute, CLUSTER, Consensus()).has_reached


# What is proposed.


@pytest.mark.parametrize("control", [ConsensusControl(3.0), ConsensusControl(3.0, average_every=1)])
def test_the_command_of_the_advice_controls_alike(control: ConsensusControl) -> None:
    plan = LabPlan.of("dpsgd:ring", schedule=replace(control, gossip_every=2, max_interval=4))
    found = simulate(plan, CLUSTER, digits(), target=1e9, max_steps=1)
    config = read_command_line(Config, description="", arguments=shlex.split(recipe_options(found.plan, CLUSTER)))
    assert schedule_of(config) == plan.schedule
    assert "Under control 100% of the steps had a round" in " ".join(advise([found], CLUSTER).sentences)


def test_tuning_proposes_control_where_that_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = simulate("dpsgd", CLUSTER, digits(), target=1e9, max_steps=1)

    def known(plan: LabPlan, *_: Any, **__: Any) -> Any:
        schedule = plan.schedule
        cost = abs(schedule.target - 4) if isinstance(schedule, ConsensusControl) else 9.0
        return replace(found, plan=plan.resolved(8), seconds=cost + (schedule.average_every != 1))

    monkeypatch.setattr("gossip_modules.lab.planner.simulate", known)
    best = tune("dpsgd:ring", CLUSTER, digits())
    assert best.plan.schedule == ConsensusControl(4.0, average_every=1)
    config = read_command_line(Config, description="", arguments=shlex.split(recipe_options(best.plan, CLUSTER)))
    assert schedule_of(config) == ConsensusControl(4.0, average_every=1)
    assert tune("choco:ring", CLUSTER, digits()).plan.schedule == Schedule()
    averages = LabPlan.of("dpsgd:ring", schedule=Schedule(average_every=8))
    assert tune(averages, CLUSTER, digits()).plan.schedule == averages.schedule


def test_the_command_line_controls(capsys: pytest.CaptureFixture[str]) -> None:
    control = ["--schedule", "ConsensusControl(2)"]
    arguments = ["--world-size", "4", "--max-steps", "8", *control, "--methods"]
    assert main([*arguments, "ar", "dpsgd:ring"]) == 0
    assert "averages per step" in capsys.readouterr().out
    assert main([*arguments, "choco"]) == 2
    assert "or leave the control out" in capsys.readouterr().err

"""Consensus control in the simulator: what it predicts is what ranks do, to the byte."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossip_modules import ConsensusControl, RingGraph
from gossip_modules.consensus_control import ControlLaw
from gossip_modules.graph_manager import CompleteGraph
from gossip_modules.methods import METHODS
from gossip_modules.methods.wrapping import schedule_of
from gossip_modules.mixing_manager.graph_weights import default_mixing
from gossip_modules.rounds.rows import StackedMixing
from gossip_modules.schedule import Schedule
from gossip_modules.simulate import Choice, Consensus, ControlRates, Digits, Setting, advise, simulate, tune
from gossip_modules.simulate.__main__ import main
from gossip_modules.simulate.advice import recipe_options
from gossip_modules.simulate.clocks import ControlledRound, SyncClock
from gossip_modules.simulate.control import ControlledMethod, RateLaw
from gossip_modules.simulate.gossip import SimulatedMethod
from gossip_modules.simulate.methods import make_method
from tests.harness.ranks import run_ranks
from tests.library.engine.test_controlled import LR, targets, train
from tests.library.simulate.simulations import CLUSTER, LINKS, UNEVEN, irregular
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


def small(n: int, control: ConsensusControl, **others: Any) -> Setting:
    """Of the model of `train`: 16 float64 numbers are as many bytes as 32 parameters."""
    return replace(CLUSTER, world_size=n, num_parameters=32, schedule=control, **others)


def simulated(name: str, setting: Setting) -> tuple[SimulatedMethod, list[Tensor]]:
    """After the steps of `train`, and the models [n, 16] in each forward."""
    n = setting.world_size
    method, x, points = make_method(Choice.parse(name), setting), torch.zeros(n, 16, dtype=torch.float64), []
    drawn_to = torch.stack([targets(rank, NUM_STEPS) for rank in range(n)])
    for step in range(NUM_STEPS):
        method.forward(x)
        points.append(x.clone())
        x -= LR * (x - drawn_to[:, step])
    return method, points


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", CONTROLS)
def test_steps_and_bytes_are_those_of_ranks_on_threads(name: str, overlap: bool) -> None:
    control, n = CONTROLS[name], 4
    ranks = run_ranks(n, lambda group: train(group, NUM_STEPS, schedule=control, overlap=overlap))
    method, points = simulated("osgp:ring" if overlap else "dpsgd:ring", small(n, control))
    for step in range(NUM_STEPS):
        real = torch.stack([each[0][step] for each in ranks])
        torch.testing.assert_close(points[step], real, rtol=0, atol=1e-12)
    stats = ranks[0][1][-1]
    assert isinstance(method, ControlledMethod)
    assert isinstance(method.law, ControlLaw)
    assert {name: method.law.stats()[name] for name in COUNTERS} == {name: stats[name] for name in COUNTERS}
    assert stats["num_skipped_steps"] + stats["num_added_rounds"] > 0
    assert method.sent_bytes == stats["bytes_sent"]
    rates = ControlRates.measured(stats)
    assert method.control_rates == rates

    # The same rates give the same bytes, whatever the models do.
    again, _ = simulated("dpsgd:ring", small(n, replace(control, target=1e9), control_rates=rates))
    assert isinstance(again, ControlledMethod)
    assert isinstance(again.law, RateLaw)
    assert again.control_rates == rates
    assert again.sent_bytes == stats["bytes_sent"]


def test_a_step_under_control_takes_what_its_parts_take() -> None:
    """All wait for the slowest in each part, as all gather what was measured."""
    n, network = 4, replace(CLUSTER, world_size=4).network
    rounds = StackedMixing(default_mixing(RingGraph(n, peers_per_itr=2), push_sum=False))
    message = network.plain_message(1e7)
    clock, plain = (SyncClock(UNEVEN, network, message) for _ in range(2))
    for each in (clock, plain):
        each.advance([])
    arrivals = clock.arrivals()
    copies = 6 * LINKS.memory_seconds(1e7)
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
        setting = replace(CLUSTER, schedule=ConsensusControl(target))
        rates.append(simulate("dpsgd:ring", setting, Digits(), target=1e-9, max_steps=60).control_rates)
    assert rates[0] is not None
    assert rates[1] is not None
    assert rates[0].rounds_per_step > 2 * rates[1].rounds_per_step


def test_methods_that_say_themselves_when_they_communicate_stay_as_they_are() -> None:
    setting = replace(CLUSTER, schedule=ConsensusControl(2.0))
    for name in ("ar", "localsgd", "diloco", "d2", "adpsgd", "wagma", "dpwa"):
        plain = simulate(name, CLUSTER, Digits(), max_steps=6)
        assert simulate(name, setting, Digits(), max_steps=6) == plain
        assert plain.control_rates is None


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if "graph" in method.options and "gossip_every" in method.options]
)
def test_control_is_for_the_methods_whose_recipes_take_it(name: str) -> None:
    setting = replace(CLUSTER, schedule=ConsensusControl(2.0))
    if "peers_per_itr" in METHODS[name].options:
        assert simulate(name, setting, Digits(), max_steps=4).control_rates is not None
        return
    with pytest.raises(ValueError, match=rf"got schedule=Consensus.* with {name}, expected a Schedule: its"):
        simulate(name, setting, Digits(), max_steps=4)


def test_weights_that_the_library_refuses_are_refused() -> None:
    mixing = StackedMixing(default_mixing(irregular(6, is_directed=True), push_sum=True))
    clock = SyncClock(UNEVEN, CLUSTER.network, CLUSTER.network.plain_message(1e6))
    with pytest.raises(ValueError, match=r"got schedule=ConsensusControl.*, expected doubly stochastic weights"):
        ControlledMethod(mixing, ConsensusControl(2.0), ControlLaw(ConsensusControl(2.0)), clock)


def test_a_target_in_updates_needs_updates() -> None:
    setting = replace(CLUSTER, schedule=ConsensusControl(2.0))
    with pytest.raises(ValueError, match=r"for a problem in which ranks agree and learn nothing, expected is_relative"):
        simulate("dpsgd", setting, Consensus())
    absolute = replace(CLUSTER, schedule=ConsensusControl(2.0, is_relative=False))
    for each in (absolute, replace(setting, control_rates=ControlRates(0.5))):
        assert simulate("dpsgd", each, Consensus()).has_reached


# Rates.


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"rounds_per_step": 0.0}, "got rounds_per_step=0.0, expected above 0 and at most 1"),
        ({"rounds_per_step": 1.5}, "got rounds_per_step=1.5, expected above 0 and at most 1"),
        (
            {"rounds_per_step": 0.2, "averages_per_step": 0.3},
            "got averages_per_step=0.3, expected at least 0 and no more than rounds_per_step=0.2",
        ),
        ({"rounds_per_step": 0.2, "added_rounds_per_step": -1}, "got added_rounds_per_step=-1, expected a number of"),
    ],
)
def test_rates_that_cannot_be(arguments: dict[str, float], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ControlRates(**arguments)


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"num_rounds": 3}, "got stats without num_skipped_steps, num_averages, num_added_rounds, expected comm_stats"),
        (dict.fromkeys(("num_rounds", *COUNTERS), 0), "got stats of a run without a round, expected some hundred"),
    ],
)
def test_stats_that_tell_no_rates(stats: Mapping[str, float], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ControlRates.measured(stats)


def test_rates_go_with_a_control_that_has_them() -> None:
    rates = ControlRates(0.5, 0.1)
    with pytest.raises(ValueError, match=r"got control_rates=.* with Schedule\(.*\), expected none"):
        replace(CLUSTER, control_rates=rates)
    exact = replace(CLUSTER, schedule=ConsensusControl(2.0, average_every=1), control_rates=rates)
    with pytest.raises(ValueError, match=r"with average_every=1, expected rounds_per_step alone"):
        make_method(Choice.parse("dpsgd"), exact)
    make_method(Choice.parse("dpsgd"), replace(exact, control_rates=ControlRates(0.5)))


def test_rates_are_kept_over_any_number_of_steps() -> None:
    """In k steps ceil(k r) rounds begin, the first in the first step; averages and added rounds come late."""
    mixing = StackedMixing(default_mixing(CompleteGraph(3), push_sum=False))
    network = replace(CLUSTER, world_size=3).network
    clock = SyncClock(UNEVEN, network, network.plain_message(1e6))
    rates = ControlRates(7 / 30, 2 / 30, 11 / 30)
    control, x = ConsensusControl(2.0, remedy="rounds"), torch.zeros(3, 2)
    method = ControlledMethod(mixing, control, RateLaw(control, rates), clock)
    method.forward(x)
    assert method.control_rates == ControlRates(1.0, 0.0, 1.0)
    for _ in range(29):
        method.forward(x)
    assert method.control_rates == rates


# What is proposed.


@pytest.mark.parametrize("control", [ConsensusControl(3.0), ConsensusControl(3.0, average_every=1)])
def test_the_command_of_the_advice_controls_alike(control: ConsensusControl) -> None:
    control = replace(control, gossip_every=2)
    setting = replace(CLUSTER, schedule=control)
    found = simulate("dpsgd:ring", setting, Digits(), target=1e9, max_steps=1)
    config = read_command_line(Config, description="", arguments=shlex.split(recipe_options(found, setting)))
    assert schedule_of(config) == control
    assert "Under control 100% of the steps had a round" in " ".join(advise([found], setting).sentences)


def test_the_command_has_all_of_the_control() -> None:
    setting = replace(CLUSTER, schedule=ConsensusControl(3.0, max_interval=4))
    found = simulate("dpsgd:ring", setting, Digits(), target=1e9, max_steps=1)
    said = advise([found], setting).sentences[-1]
    assert '--schedule "ConsensusControl(target=3.0, max_interval=4)"' in said


def test_tuning_proposes_control_where_that_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = simulate("dpsgd", CLUSTER, Digits(), target=1e9, max_steps=1)

    def known(choice: Any, setting: Setting, *_: Any, **__: Any) -> Any:
        schedule = setting.schedule
        cost = abs(schedule.target - 4) if isinstance(schedule, ConsensusControl) else 9.0
        return replace(found, choice=choice, seconds=cost + (schedule.average_every != 1))

    monkeypatch.setattr("gossip_modules.simulate.tuning.simulate", known)
    best = tune(Choice("dpsgd", "ring"), CLUSTER, Digits())
    assert best.tuned == {"consensus_target": 4.0, "average_every": 1}
    config = read_command_line(Config, description="", arguments=shlex.split(recipe_options(best, CLUSTER)))
    assert schedule_of(config) == ConsensusControl(4.0, average_every=1)
    assert tune(Choice("choco", "ring"), CLUSTER, Digits()).tuned == {}
    averages = replace(CLUSTER, schedule=Schedule(average_every=8))
    assert tune(Choice("dpsgd", "ring"), averages, Digits()).tuned == {}


def test_the_command_line_controls(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--world-size", "4", "--methods", "ar", "dpsgd:ring", "--max-steps", "8", "--consensus-target", "2"]
    rates = ["--rounds-per-step", "0.5", "--averages-per-step", "0.25"]
    assert main([*arguments, *rates]) == 0
    assert "rounds and 0.22 averages per step" in capsys.readouterr().out  # 2 of 9 forwards
    assert main([*arguments, "--averages-per-step", "0.25"]) == 2
    assert "without --rounds-per-step, expected it too" in capsys.readouterr().err
    assert main(["--world-size", "4", "--methods", "dpsgd", *rates]) == 2
    assert "expected none: they say how often ranks communicate under a ConsensusControl" in capsys.readouterr().err
    assert main([*arguments[:4], "choco", "--consensus-target", "2"]) == 2
    assert "leave --consensus-target out" in capsys.readouterr().err

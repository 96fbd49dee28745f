"""The options with which a method is fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gossip_modules.simulate import Choice, Consensus, Digits, Prediction, Schedule, Setting, simulate, tune
from gossip_modules.simulate.__main__ import main
from gossip_modules.simulate.advice import recipe_options
from gossip_modules.simulate.methods import chosen_for
from tests.library.simulate.simulations import CLUSTER, prediction

SECONDS_OF_GRAPHS = {"base": 5.0, "torus": 3.0, "ring": 2.0}  # the ring does not come to agree


def simulated(choice: str | Choice, setting: Setting, *_: Any, **__: Any) -> Prediction:
    """A known cost of each option, in place of a simulation; the least has H = 30, lr = 0.4, momentum = 0.5."""
    chosen = (Choice.parse(choice) if isinstance(choice, str) else choice).resolved(setting.world_size)
    if chosen.graph == "static-exponential":
        raise ValueError("no such size")
    seconds = SECONDS_OF_GRAPHS.get(chosen.graph or "", 9.0)
    seconds += abs(setting.local_steps - 30) / 100 + abs(setting.schedule.gossip_every - 4) / 100
    lr, momentum = setting.outer_lr or 0.7, 0.9 if setting.outer_momentum is None else setting.outer_momentum
    seconds += abs(lr - 0.4) + abs(momentum - 0.5)
    found = prediction(chosen.method, error=0.3, seconds=seconds, disagreement=float(chosen.graph == "ring"))
    return replace(found, choice=chosen, algorithm=chosen_for(chosen, setting).text)


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossip_modules.simulate.tuning.simulate", simulated)


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize(
    ("method", "graph", "options"),
    [
        ("dpsgd", "torus", "--recipe dpsgd --graph torus --peers-per-itr 3 --gossip-every 4"),
        ("dpsgd:base", "base", "--recipe dpsgd --graph base --gossip-every 4"),
        ("localsgd", "", '--algorithm "LocalSGD(sync_every=30)"'),
        ("diloco", "", '--algorithm "DiLoCo(lr=0.4, momentum=0.5)"'),
        ("gasloc", "torus", '--algorithm "GASLoC(lr=0.4, momentum=0.5)" --graph torus'),
        ("DiLoCo(sync_every=7)", "", '--algorithm "DiLoCo(sync_every=7)"'),
        ("ar", "", "--recipe ar"),
    ],
)
def test_the_fastest_that_agrees_is_found(method: str, graph: str, options: str) -> None:
    found = tune(method, CLUSTER, Digits())
    assert found.choice.graph == graph
    assert recipe_options(found, CLUSTER) == options


@pytest.mark.usefixtures("_known")
def test_rates_that_are_given_stay() -> None:
    found = tune("diloco", replace(CLUSTER, outer_lr=1.0), Digits())
    assert found.algorithm == "DiLoCo(lr=1.0, momentum=0.5)"


def test_what_is_said_is_what_was_simulated() -> None:
    setting = replace(CLUSTER, world_size=5)
    found = tune("dpsgd", setting, Consensus(), target=1e-6)
    assert found.has_reached
    assert found.seconds < simulate("dpsgd", setting, Consensus(), target=1e-6).seconds
    assert found.tuned.keys() <= {"gossip_every", "average_every"}  # a target has no unit where models only agree
    setting = replace(setting, schedule=Schedule(**{name: int(value) for name, value in found.tuned.items()}))
    assert replace(found, tuned={}, schedule=None) == simulate(found.choice, setting, Consensus(), target=1e-6)


def test_the_command_names_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--world-size 5 --problem consensus --target 1e-6 --methods dpsgd --tune"
    assert main(arguments.split()) == 0
    said = capsys.readouterr().out
    assert "Choose dpsgd on " in said
    assert "dpsgd on ring" not in said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"outer_lr": 0.0}, "got outer_lr=0.0, expected a positive number; leave it out"),
        ({"outer_momentum": 1.0}, "got outer_momentum=1.0, expected at least 0 and less than 1; leave it out"),
    ],
)
def test_rates_that_cannot_be_are_named(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        replace(CLUSTER, **options)

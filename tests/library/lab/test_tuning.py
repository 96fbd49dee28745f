"""The options with which a method is fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gossip_modules.lab import Consensus, LabPlan, Prediction, Setting, simulate, tune
from gossip_modules.lab.__main__ import main
from gossip_modules.lab.planner import recipe_options
from tests.library.lab.simulations import CLUSTER, digits, prediction

SECONDS_OF_GRAPHS = {"base": 5.0, "torus": 3.0, "ring": 2.0}  # the ring does not come to agree


def simulated(plan: LabPlan, setting: Setting, *_: Any, **__: Any) -> Prediction:
    """A known cost of each option, in place of a simulation; the least has H = 30, lr = 0.4, momentum = 0.5."""
    plan = plan.resolved(setting.world_size)
    if plan.graph == "static-exponential":
        raise ValueError("no such size")
    made: Any = plan.chosen.made
    seconds = SECONDS_OF_GRAPHS.get(str(plan.graph), 9.0)
    seconds += abs(getattr(made, "sync_every", 30) - 30) / 100 + abs(plan.schedule.gossip_every - 4) / 100
    seconds += abs(getattr(made, "lr", 0.4) - 0.4) + abs(getattr(made, "momentum", 0.5) - 0.5)
    found = prediction(plan.method.name, error=0.3, seconds=seconds, disagreement=float(plan.graph == "ring"))
    return replace(found, plan=plan)


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossip_modules.lab.planner.simulate", simulated)


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
    found = tune(method, CLUSTER, digits())
    assert found.plan.graph == graph
    assert recipe_options(found.plan, CLUSTER) == options


def test_the_text_agrees_with_the_simulation() -> None:
    setting = replace(CLUSTER, world_size=5)
    found = tune("dpsgd", setting, Consensus(), target=1e-6)
    assert found.has_reached
    assert found.seconds < simulate("dpsgd", setting, Consensus(), target=1e-6).seconds
    assert found == simulate(found.plan, setting, Consensus(), target=1e-6)


def test_the_command_names_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--world-size 5 --problem Consensus() --target 1e-6 --methods dpsgd --tune"
    assert main(arguments.split()) == 0
    said = capsys.readouterr().out
    assert "Choose dpsgd on " in said
    assert "dpsgd on ring" not in said

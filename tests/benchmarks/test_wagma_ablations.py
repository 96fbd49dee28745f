"""The ablations of WAGMA-SGD: each method has the groups of its name, and all train."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.studies.wagma_ablations import ABLATIONS, SIZES, WORKERS, FixedGroups, ablations
from gossip_modules.graph_manager import ButterflyGroups
from gossip_modules.lab import LabPlan, LabTask, Setting
from gossip_modules.lab.asynchronous import Groups
from gossip_modules.lab.comparison import LabTraining

STUDY = ABLATIONS["wagma_ablations"]


def training(method: str) -> LabTraining:
    task = STUDY.task()
    own = LabTask(task.model, task.loss, task.batch, lambda parameters: task.optimizer(parameters, 0.1))
    setting = Setting(WORKERS, STUDY.num_parameters, STUDY.compute, STUDY.network)
    return LabTraining(LabPlan.of(STUDY.methods(WORKERS)[method]), setting, own)


@pytest.mark.parametrize("method", ablations())
def test_a_method_trains_with_the_groups_of_its_name(method: str) -> None:
    made = training(method)
    for _ in made.run(1):
        pass
    if method == "no groups":
        assert made.plan.interval == 10
        return
    driver: Any = made.method.driver
    assert isinstance(driver, Groups)
    size = int(method.rpartition(" ")[2])
    assert len(driver.groups.members(5, 1)) == size in SIZES
    assert isinstance(driver.groups, FixedGroups) == method.startswith("fixed")


def test_fixed_groups_keep_their_members() -> None:
    fixed, changing = FixedGroups(64, group_size=8), ButterflyGroups(64, group_size=8)
    for rank in (0, 5, 63):
        assert {fixed.members(rank, t) for t in range(4)} == {changing.members(rank, 0)}
        assert changing.members(rank, 1) != changing.members(rank, 0)

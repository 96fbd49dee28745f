"""The ablations of WAGMA-SGD's paper: sizes of groups, groups that never change, and no groups, with two late workers.

    python -m benchmarks.studies wagma_ablations --output benchmarks/results/wagma_ablations.csv
    python -m benchmarks.studies wagma_ablations_images --output benchmarks/results/wagma_ablations_images.csv

Both have 64 workers. The first has the task and the steps of `straggler_accuracy`, the second the task of
`worker_numbers` and its number of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.studies.images import IMAGES, DrawnDigits, SmallImages, TwoLate
from benchmarks.studies.study import Study
from gossip_modules.graph_manager import ButterflyGroups
from gossip_modules.lab import LabPlan
from gossip_modules.lab.asynchronous import Groups
from gossip_modules.lab.plan import Running

WORKERS, PERIOD, SIZE = 64, 10, 8
"""The workers, the rounds from one average over all to the next, and the size of groups that the paper recommends."""
SIZES = (2, 4, 8, 16, 64)


class FixedGroups(ButterflyGroups):
    """Groups that have the same members in each round: those of round 0."""

    def masks(self, t: int) -> tuple[int, ...]:
        """See `ButterflyGroups`."""
        return super().masks(0)


@dataclass(frozen=True)
class FixedGroupsPlan(LabPlan):
    """WAGMA-SGD with groups that have the same members in each round."""

    def make(self, *args: Any, **options: Any) -> Running:
        """See `LabPlan`."""
        made = super().make(*args, **options)
        assert isinstance(made.driver, Groups), f"got {made.driver}, expected the driver of WAGMA-SGD"
        groups = made.driver.groups
        made.driver.groups = FixedGroups(groups.world_size, group_size=groups.group_size)
        return made


def ablations() -> Mapping[str, Any]:
    """Return the methods: groups of each size, fixed groups, and averages over all workers only."""
    sizes = {f"groups of {size}": f"WAGMA(group_size={size}, sync_period={PERIOD})" for size in SIZES}
    fixed = FixedGroupsPlan.of(sizes[f"groups of {SIZE}"])
    return {**sizes, f"fixed groups of {SIZE}": fixed, "no groups": f"LocalSGD(sync_every={PERIOD})"}


def study(task: Any, steps: int, points: int, rates: tuple[float, ...]) -> Study:
    """Return the study of a task, with the late workers, the network and the model of `straggler_accuracy`."""
    late = IMAGES["straggler_accuracy"]
    return Study(
        task,
        lambda workers: ablations(),
        cells=tuple((WORKERS, steps, seed) for seed in (1, 2, 3)),
        rates=rates,
        tuning=0.25,
        points=points,
        compute=TwoLate(0.6),
        network=late.network,
        num_parameters=late.num_parameters,
    )


ABLATIONS: Mapping[str, Study] = {
    "wagma_ablations": study(partial(DrawnDigits, 2), 240, 20, (0.1, 0.2, 0.4)),
    "wagma_ablations_images": study(partial(SmallImages, 8, normalizes=True), 250, 10, (0.05, 0.1, 0.2)),
}
"""The studies by name."""

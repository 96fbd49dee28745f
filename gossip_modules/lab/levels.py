"""Two levels: regions whose processes average gradients in every step, and a method between regions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..regions import Regions
from ..rounds.stacked import Answered
from .clock import BucketClock, Compute, LinkSpec, MessageCost
from .plan import LabPlan, Setting
from .planner import Prediction, best, simulate
from .tasks import Digits

PERIODS_TO_TRY = (10, 30, 100)
GRADIENTS, SAME = "gradients, all-reduce", "as between regions"
_CODE = "QSGD(4, bucket_size=32, unbiased=True)"
_NUM_STEPS = 64  # from which the duration of a step of a region is drawn
_COLUMNS = ("inside a region", "between regions", "steps", "s per step", "s to target", "MB between", "")


class LevelPrediction(NamedTuple):
    """The cost of a method between regions, with or without another one inside.

    inside: the communication inside a region, in words.
    prediction: the steps, seconds and bytes; a worker is a region, or a rank where both levels are the same.
    """

    inside: str
    prediction: Prediction

    @property
    def name(self) -> str:
        """Both levels in words."""
        if self.inside == SAME:
            return f"{self.prediction.name} among all ranks"
        return f"{self.prediction.name} between regions, and an all-reduce of gradients in every step inside"

    @property
    def line_bytes(self) -> float:
        """The bytes that all ranks send to other regions in a step, mean over steps."""
        return self.prediction.line_bytes / max(self.prediction.num_steps, 1.0)


def regions_as_workers(setting: Setting, regions: Regions) -> Setting:
    """Return the setting in which each region is one worker, as `nprocs_per_node` makes it.

    A step of a region is a step of its slowest process and the all-reduce of gradients under its backward pass. Each
    process sends its part of the vector to other regions, over the links of all processes at once, or the line that
    they share.

    Args:
        setting: the cluster of single processes, with a number of parameters.
        regions: the processes of each region, equally many.
    """
    links, size = setting.network.on(np.arange(setting.world_size)), regions.size
    assert setting.num_parameters is not None, "the time of an all-reduce follows from the number of parameters"
    message = MessageCost(4.0 * setting.num_parameters)
    seconds: list[float] = []
    for members in regions.members:
        clock = BucketClock(setting.compute, links.part(members).on(np.arange(size)), message)
        for _ in range(_NUM_STEPS + 1):
            clock.advance([Answered(None)])
            seconds.append(float(clock.starts.max()))
    steps = np.diff(np.reshape(seconds, (len(regions.members), -1)), axis=1).flatten().tolist()

    def link(a: Sequence[int], b: Sequence[int]) -> LinkSpec:
        rates, latencies = np.transpose([links.spec(u, v) for u in a for v in b])
        rates = rates / [max(links.slowness[u], links.slowness[v]) for u in a for v in b]
        return LinkSpec(size * float(np.median(rates)), float(np.median(latencies)))

    own = links.part(regions.members[0]).on(np.arange(size))
    gather = own.gather_seconds(message.num_bytes / size)  # the processes of a region then share their parts
    rows = [[link(a, b) for b in regions.members] for a in regions.members]
    network = replace(
        setting.network,
        link=rows,
        shares=(1,) * len(rows),
        slow_share=0.0,
        memory_byte_s=size * setting.network.memory_byte_s,  # each process has its part of the vector
        message_byte_s=size * setting.network.message_byte_s,
        lines=tuple(range(len(rows))),
        average_start_s=setting.network.average_start_s + gather,
    )
    return replace(setting, world_size=len(rows), compute=Compute(steps), network=network)


def methods_between(setting: Setting) -> list[str]:
    """Return the texts of the methods that are tried between regions.

    The delay of an outer step is the smallest number of steps in which its average arrives.

    Args:
        setting: of regions as workers.
    """
    links = setting.network.on(np.arange(setting.world_size))
    assert setting.num_parameters is not None, "the time of an average follows from the number of parameters"
    step = float(np.median(setting.compute.seconds))
    seconds = links.all_reduce_seconds(4 * setting.num_parameters) + setting.network.average_start_s
    late = math.ceil(seconds / step)
    texts = ["sgp", "osgp"]
    for period in PERIODS_TO_TRY:
        texts += [f"LocalSGD(sync_every={period})", f"DiLoCo(sync_every={period})"]
        texts += [f"DiLoCo(sync_every={period}, compressor={_CODE})"]
        if late < period:
            texts += [f"DiLoCo(sync_every={period}, delay={late})"]
    return texts


def predict_levels(
    setting: Setting, regions: Regions, *, show: Callable[[str], None] = lambda text: None
) -> list[LevelPrediction]:
    """Predict the methods between regions whose processes average gradients inside.

    Args:
        setting: the cluster of single processes, with a number of parameters.
        regions: the processes of each region, equally many and consecutive.
        show: called with a line of progress now and then.

    Raises:
        ValueError: regions of unequal sizes.
    """
    above = regions_as_workers(setting, regions)
    problem = Digits(batch_size=2 * regions.size)
    return [
        LevelPrediction(GRADIENTS, simulate(LabPlan.of(text), above, problem, show=show))
        for text in methods_between(above)
    ]


def advise_levels(found: Sequence[LevelPrediction]) -> tuple[LevelPrediction | None, tuple[str, ...]]:
    """Return the fastest of the predictions, and the reasons, one sentence each.

    Args:
        found: predictions for methods of one level and of two.
    """
    fastest = best([level.prediction for level in found])
    if fastest is None:
        return None, ("No method of one level or of two reaches the target with workers that agree.",)
    chosen = next(level for level in found if level.prediction is fastest)
    sentences = [
        f"Choose {chosen.name}: {fastest.seconds:.1f} s to the target, {fastest.num_steps:.0f} steps of "
        f"{fastest.step_seconds:.3f} s."
    ]
    for inside in (SAME, GRADIENTS):
        rival = best([level.prediction for level in found if level.inside == inside])
        if rival is not None and rival is not fastest:
            other = next(level for level in found if level.prediction is rival)
            sentences.append(
                f"The fastest other way is {other.name}: {rival.seconds:.1f} s, {rival.num_steps:.0f} steps of "
                f"{rival.step_seconds:.3f} s."
            )
    if chosen.inside == GRADIENTS:
        sentences.append(f"To train like this: {wrapping(chosen.prediction.plan)}")
    return chosen, tuple(sentences)


def wrapping(plan: LabPlan) -> str:
    """Return the line of Python that wraps `model` for a plan between regions, given `regions`."""
    if plan.method.is_algorithm:
        return f"GossipDataParallel(model, **regions.arguments(), algorithm={plan.text})"
    return plan.method.example.replace("(model", "(model, **regions.arguments()", 1)


def as_level_table(found: Sequence[LevelPrediction]) -> str:
    """Return one line for each prediction, by time to the target; those without it come last."""
    ordered = sorted(found, key=lambda level: level.prediction.rank)
    rows = [_COLUMNS, *map(_row, ordered)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths))) for row in rows
    )


def _row(level: LevelPrediction) -> tuple[str, ...]:
    prediction = level.prediction
    return (
        level.inside,
        prediction.plan.name,
        f"{prediction.num_steps:.0f}",
        f"{prediction.step_seconds:.3f}",
        f"{prediction.seconds:.1f}" if prediction.has_reached else "-",
        "" if math.isnan(level.line_bytes) else f"{level.line_bytes / 1e6:.2f}",
        "" if prediction.has_agreed else "workers disagree",
    )

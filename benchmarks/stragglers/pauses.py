"""Milliseconds per step of ranks that pause at random: the small case that other libraries were measured on."""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.contenders import Contender, DecentDP, Wrapped
from benchmarks.stragglers.methods import BOUND, STRAGGLER_METHODS, SYNC_PERIOD, RankContext

DECENT = "decent-dp"
HAS_DECENT = importlib.util.find_spec("decent_dp") is not None
TARGETS = {"adpsgd": 1.15, "dpwa": 1.15, "wagma": 1.30, "owagma": 1.30}
"""Ratios to no communication that are to be reached."""


@dataclass(frozen=True)
class Pauses:
    """What is measured.

    Args:
        methods: of STRAGGLER_METHODS, or "decent-dp".
        num_cycles: turns of each method, after one to warm up.
        num_steps: of a turn, for each rank; a multiple of the period of the global averages.
        batch_size: rows per rank and step.
        pause_seconds: how long a rank sleeps before a step,
        probability: and how often.
    """

    methods: tuple[str, ...]
    num_cycles: int
    num_steps: int
    batch_size: int
    pause_seconds: float
    probability: float

    def __post_init__(self) -> None:
        if self.num_steps <= 0 or self.num_steps % SYNC_PERIOD:
            raise ValueError(
                f"got num_steps={self.num_steps}, expected a multiple of {SYNC_PERIOD}, the period of WAGMA's global "
                "averages, as its ranks may end a turn at those only"
            )


def perceptron() -> nn.Module:
    """1,005,562 parameters, a function of x [B, 512]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 464), nn.ReLU(), nn.Linear(464, 10))


def measure(place: RankContext, pauses: Pauses) -> dict[str, list[float]]:
    """Milliseconds per own step of this rank in each cycle, by method.

    All methods take turns in the same processes, in an order shuffled every cycle; in a cycle a rank pauses at the
    same steps whatever the method. A rank that is done with its turn waits at a barrier, which is not counted. Ranks
    of WAGMA train to the same round instead, as they may take unequal numbers of steps.
    """
    x, y = torch.randn(pauses.batch_size, 512), torch.randint(10, (pauses.batch_size,))

    def loss(model: nn.Module) -> torch.Tensor:
        return cross_entropy(model(x), y)

    contenders = {method: _contender(method, place) for method in pauses.methods}
    times: dict[str, list[float]] = {method: [] for method in pauses.methods}
    order = random.Random(0)
    for cycle in range(pauses.num_cycles + 1):
        draws = np.random.default_rng([cycle, place.rank]).random(pauses.num_steps)
        for method in order.sample(pauses.methods, len(pauses.methods)):
            contender = contenders[method]
            place.group.barrier().wait()
            start, num_own_steps = time.perf_counter(), 0
            while contender.progress(cycle * pauses.num_steps + num_own_steps) < (cycle + 1) * pauses.num_steps:
                if draws[num_own_steps] < pauses.probability:
                    time.sleep(pauses.pause_seconds)
                contender.step(loss)
                num_own_steps += 1
            if cycle:  # the first one warms up
                times[method].append((time.perf_counter() - start) * 1000 / num_own_steps)
    for contender in contenders.values():
        place.group.barrier().wait()  # close all at the same time
        contender.close()
    return times


def _contender(method: str, place: RankContext) -> Contender:
    if method == DECENT:
        return DecentDP(perceptron())
    return Wrapped(perceptron(), wrap=lambda model: STRAGGLER_METHODS[method].wrap(model, place))


def markdown(times: Sequence[Mapping[str, list[float]]]) -> str:
    """The table: medians over cycles of the mean over ranks, and of the ratio to no communication in that cycle.

    Args:
        times: of `measure`, of all ranks.
    """
    means = {method: [statistics.mean(values) for values in zip(*(x[method] for x in times))] for method in times[0]}
    lines = ["| method | ms per step | quartiles | to no communication | target |", "|---|---:|---:|---:|---:|"]
    for method, values in means.items():
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        ratio = statistics.median(a / b for a, b in zip(values, means[BOUND]))
        target = f"<= {TARGETS[method]:.2f}" if method in TARGETS else ""
        title = "Decent-DP" if method == DECENT else STRAGGLER_METHODS[method].title
        lines.append(f"| {title} | {middle:.1f} | {low:.1f}-{high:.1f} | {ratio:.2f} | {target} |")
    return "\n".join(lines)

"""The graph, code, steps between rounds and outer rates with which a method is fastest, each looked for in turn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ..consensus_control import ConsensusControl
from ..graph_manager.named_graphs import TREES
from ..registry import METHODS
from ..schedule import Schedule
from .advice import Prediction
from .choice import Choice, codes_of
from .options import MAX_STEPS
from .problems import Problem
from .run import simulate
from .setting import Setting

GRAPHS_TO_TRY = (
    *("npeer-exponential", "exponential", "bipartite-exponential", "base", "equi-dyn", "equi-dyn-undirected"),
    *("bipartite-complete", "static-exponential", "hypercube", "torus", "ring"),
)
LOCAL_STEPS_TO_TRY = (3, 10, 30, 100)
GOSSIP_EVERY_TO_TRY = (2, 4, 8)
AVERAGE_EVERY_TO_TRY = (4, 16)
CONSENSUS_TARGETS_TO_TRY = (2.0, 4.0, 8.0)
OUTER_LRS_TO_TRY = (0.4, 0.7, 1.0)
OUTER_MOMENTA_TO_TRY = (0.0, 0.5, 0.9)


def tune(
    choice: str | Choice, setting: Setting, problem: Problem, *, target: float | None = None, max_steps: int = MAX_STEPS
) -> Prediction:
    """`simulate` with the options with which the method is fastest.

    First the graph, unless one is named; then the code, likewise; then the steps between rounds or averages (H), exact
    averages now and then, or a `ConsensusControl` that decides it, unless the setting says otherwise; then, for an
    outer optimizer, its learning rate and momentum, unless the setting has them. What is found first stays for the
    next, so it is the best along that way and need not be the best of all combinations. Fastest is by
    `Prediction.seconds` among those that reach the target with workers that agree; where none does, the prediction that
    comes nearest.

    Args:
        choice, setting, problem, target, max_steps: see `simulate`.

    Returns:
        The prediction; its `algorithm` and `tuned` have the options that were chosen.

    Raises:
        ValueError: see `simulate`.
    """
    chosen = Choice.parse(choice) if isinstance(choice, str) else choice
    setting = replace(setting, has_gradients=not problem.is_solved_by_rounds)
    found = simulate(chosen, setting, problem, target=target, max_steps=max_steps)
    for knob in (_graphs, _codes, _local_steps, _schedules, _outer_rates):
        tuned, start = found.tuned, (found.choice, setting)  # what was found before
        for options, tried, tried_setting in knob(chosen, *start):
            if (tried, tried_setting) == start:
                continue
            try:
                prediction = simulate(tried, tried_setting, problem, target=target, max_steps=max_steps)
            except ValueError:
                continue  # a graph that the method or this number of workers cannot have
            if _rank(prediction) < _rank(found):
                found = replace(prediction, tuned={**tuned, **options}, schedule=tried_setting.schedule)
                setting = tried_setting
    return found


def _rank(prediction: Prediction) -> tuple[bool, bool, float]:
    """The lower the better."""
    if prediction.has_reached:
        return False, not prediction.has_agreed, prediction.seconds
    return True, True, prediction.error if math.isfinite(prediction.error) else math.inf


_Tries = Iterator[tuple[dict[str, float], Choice, Setting]]


def _graphs(chosen: Choice, now: Choice, setting: Setting) -> _Tries:
    own = METHODS[now.method].simulated_graph
    if chosen.graph is None and own is not None:
        for graph in TREES if own(4, 1) in TREES else GRAPHS_TO_TRY:
            yield {}, now._replace(graph=graph), setting


def _codes(chosen: Choice, now: Choice, setting: Setting) -> _Tries:
    if chosen.compressor is None and not chosen.algorithm:
        for code in codes_of(METHODS[now.method]):
            yield {}, now._replace(compressor=code), setting


def _local_steps(chosen: Choice, now: Choice, setting: Setting) -> _Tries:
    if METHODS[now.method].period and not chosen.algorithm:
        for steps in LOCAL_STEPS_TO_TRY:
            yield {}, now, replace(setting, local_steps=steps)


def _schedules(chosen: Choice, now: Choice, setting: Setting) -> _Tries:
    known, schedule = METHODS[now.method].options, setting.schedule
    if "gossip_every" not in known or not isinstance(schedule, Schedule) or schedule.gossip_every != 1:
        return
    tries: list[tuple[dict[str, float], Schedule | ConsensusControl]] = [
        ({"gossip_every": steps}, replace(schedule, gossip_every=steps)) for steps in GOSSIP_EVERY_TO_TRY
    ]
    if not schedule.average_every:
        if "average_every" in known:
            tries += [({"average_every": rounds}, Schedule(average_every=rounds)) for rounds in AVERAGE_EVERY_TO_TRY]
        if "peers_per_itr" in known and setting.has_gradients:
            for target in CONSENSUS_TARGETS_TO_TRY:
                options = {"consensus_target": target}
                tries += [
                    (options, ConsensusControl(target)),
                    ({**options, "average_every": 1}, ConsensusControl(target, average_every=1)),
                ]
    for options, tried in tries:
        yield options, now, replace(setting, schedule=tried)


def _outer_rates(chosen: Choice, now: Choice, setting: Setting) -> _Tries:
    settings = METHODS[now.method].settings
    if chosen.algorithm or not {"sync_every", "lr"} <= settings:
        return
    lrs = OUTER_LRS_TO_TRY if setting.outer_lr is None else (setting.outer_lr,)
    momenta = OUTER_MOMENTA_TO_TRY if setting.outer_momentum is None else (setting.outer_momentum,)
    for lr, momentum in product(lrs, momenta if "momentum" in settings else (setting.outer_momentum,)):
        yield {}, now, replace(setting, outer_lr=lr, outer_momentum=momentum)

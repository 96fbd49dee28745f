"""Train n small models by one method until their error is small enough, and predict what your model would take."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..rounds.algorithm import Algorithm
from ..wrappers.choices import written
from .advice import Prediction
from .choice import Choice
from .gossip import SimulatedMethod, TooFarApartError
from .methods import make_method
from .options import MAX_STEPS
from .problems import Problem
from .setting import Setting


def simulate(
    choice: str | Choice | Algorithm | SimulatedMethod,
    setting: Setting,
    problem: Problem,
    *,
    target: float | None = None,
    max_steps: int = MAX_STEPS,
) -> Prediction:
    """Train n small models by one method until their error is at most the target; what that took.

    Args:
        choice: the method, as in `Choice.parse`; an algorithm; or one that was put together from any graph,
            weights, algorithm, schedule and clock (`LockstepMethod`), before its first forward.
        setting: workers, model, compute and links.
        problem: the task of the small models.
        target: of the error; None = the problem's own.
        max_steps: to give up after, at least 1; of an asynchronous method, ticks of its fastest worker's step.

    Raises:
        ValueError: a method or graph that does not fit, or a number out of range.
    """
    target = problem.target if target is None else target
    if not 0 < target < math.inf or max_steps < 1:
        raise ValueError(
            f"got target={target} and max_steps={max_steps}, expected an error above 0, and 1 step or more"
        )
    if isinstance(choice, SimulatedMethod):
        return _train(choice, Choice(type(choice).__name__, "", ""), setting, problem, target, max_steps)
    text = written(choice) if isinstance(choice, Algorithm) else choice
    parsed = Choice.parse(text) if isinstance(text, str) else text
    chosen = parsed.resolved(setting.world_size, setting.peers_per_itr)
    setting = replace(setting, shape=problem.shape, has_gradients=not problem.is_solved_by_rounds)
    theta = setting.theta or 1.0
    while True:
        try:
            method = make_method(chosen, replace(setting, theta=theta))
            return _train(method, chosen, setting, problem, target, max_steps)
        except TooFarApartError as error:
            if setting.theta is not None or chosen.algorithm:
                raise ValueError(str(error)) from error
            theta *= 2  # a user of Moniqua has to know theta beforehand, so the run starts over


def _train(
    method: SimulatedMethod, chosen: Choice, setting: Setting, problem: Problem, target: float, max_steps: int
) -> Prediction:
    """`simulate`, of a method before its first forward."""
    n = setting.world_size
    if method.num_ranks != n:
        raise ValueError(
            f"got a method of {method.num_ranks} workers in a setting of {n}, expected as many; make it for {n}"
        )
    x = problem.start(n)
    everyone = torch.ones(n, dtype=torch.bool, device="cpu")
    num_steps, first_start, error = torch.zeros(n, device="cpu"), 0.0, math.inf
    for step in range(max_steps + 1):
        method.forward(x)
        if step == 0:
            first_start = float(method.starts.max())
        z = method.estimates(x)
        if step % problem.check_every == 0 or step == max_steps:
            error = problem.error(z)
            if error <= target or not math.isfinite(error) or step == max_steps:
                break
        is_stepping = everyone if method.is_stepping is None else method.is_stepping
        update = problem.update(z, step)
        if update is not None:
            x += update * is_stepping[:, None]
        num_steps += is_stepping
    taken, seconds = float(num_steps.mean()), float(method.starts.max())
    return Prediction(
        choice=chosen,
        target=target,
        error=error,
        num_steps=taken + problem.is_solved_by_rounds,
        step_seconds=(seconds - first_start) / taken if taken else seconds,
        seconds=seconds,
        rank_bytes=method.sent_bytes,
        waiting_share=float(method.waited_seconds.mean()) / seconds if seconds else 0.0,
        disagreement=problem.disagreement(method.estimates(x)),
        max_disagreement=problem.max_disagreement,
        is_overlapped=method.is_overlapped,
        algorithm=method.algorithm,
        control_rates=method.control_rates,
    )

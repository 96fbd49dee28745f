"""Which method and graph to train with, for so many workers on such links: predicted by simulating all of them at once.

    python -m gossip_modules.simulate --world-size 1024 --rate-gbit 1 --parameters 25e6 --compute-ms 250
    python -m gossip_modules.simulate --world-size 64 --methods osgp dpsgd:torus choco:ring:topk --straggle-share 0.02
    python -m gossip_modules.simulate --world-size 256 --problem consensus --target 1e-6 --methods sgp dpsgd:ring

Prints a table, the fastest first, and which to choose and why. Steps are those that n small models really take on a
small problem (digits: softmax regression on drawn digits; consensus: vectors that agree on their mean); seconds and
bytes are those of your model by a model of compute and links (`ComputeModel`, `LinkModel`). So steps say how much a
method's way of averaging costs beside others, not how long your own training lasts.

From Python:

>>> setting = Setting(8, 11_200_000, ComputeModel(seconds=0.15, overhead_seconds=0.01), LinkModel(rate_bit_s=1e9))
>>> prediction = simulate("sgp", setting, Consensus())
>>> prediction.num_steps, round(prediction.step_seconds, 2)  # log2(8) rounds of the exponential graph are exact
(3.0, 0.55)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from .schedule import Schedule
from .simulated_advice import Advice, Prediction, advise, as_table, best
from .simulated_delays import ComputeModel, LinkModel
from .simulated_gossip import SimulatedMethod, TooFarApartError
from .simulated_methods import METHODS, THETA, Choice, make_method
from .simulated_options import MAX_STEPS, make_parser, setting_of
from .simulated_problems import Consensus, Digits, Problem
from .simulated_setting import Setting

__all__ = [
    "Advice",
    "Choice",
    "ComputeModel",
    "Consensus",
    "Digits",
    "LinkModel",
    "Prediction",
    "Problem",
    "Schedule",
    "Setting",
    "advise",
    "best",
    "simulate",
]


def simulate(
    choice: str | Choice | SimulatedMethod,
    setting: Setting,
    problem: Problem,
    *,
    target: float | None = None,
    max_steps: int = MAX_STEPS,
) -> Prediction:
    """Train n small models by one method until their error is at most the target; what that took.

    Args:
        choice: the method, as in `Choice.parse`; or one that was put together from any graph, weights, rule, schedule
            and clock (`LockstepMethod`), before its first forward.
        setting: workers, model, compute and links.
        problem: what they learn, or agree on.
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
    chosen = (Choice.parse(choice) if isinstance(choice, str) else choice).resolved(setting.world_size)
    has_gradients = not problem.is_solved_by_rounds
    setting = replace(setting, shape=problem.shape, has_gradients=has_gradients)
    theta = setting.theta
    while True:
        method = make_method(chosen, replace(setting, theta=theta))
        try:
            return _train(method, chosen, setting, problem, target, max_steps)
        except TooFarApartError as error:
            if setting.theta is not None:
                raise ValueError(str(error)) from error
            # A user has to know theta beforehand, so the run starts over with one that is large enough so far.
            theta = 2.0 ** (math.floor(math.log2(max(error.difference, theta or THETA))) + 1)


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
    num_steps, first_start, error = torch.zeros(n), 0.0, math.inf
    for step in range(max_steps + 1):
        method.forward(x)
        if step == 0:
            first_start = float(method.starts.max())
        z = method.estimates(x)
        if step % problem.check_every == 0 or step == max_steps:
            error = problem.error(z)
            if error <= target or not math.isfinite(error):
                break
        if step == max_steps:
            break
        update = problem.update(z, step)
        if update is not None:
            x += update if method.is_stepping is None else update * method.is_stepping[:, None]
        num_steps += 1.0 if method.is_stepping is None else method.is_stepping.float()
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
        options=method.options,
    )


def _choices(texts: Sequence[str], world_size: int) -> list[Choice]:
    """The methods to compare, each once."""
    choices = [Choice.parse(text).resolved(world_size) for text in texts]
    if twice := [text for text, choice in zip(texts, choices) if choices.count(choice) > 1]:
        raise ValueError(f"got methods {' and '.join(twice)}, which are the same, expected each once; leave one out")
    return choices


def _run(arguments: Sequence[str] | None) -> str:
    """What to print."""
    options = make_parser(__doc__.split("\n\nFrom Python")[0] if __doc__ else "").parse_args(arguments)
    if options.label_skew and options.problem != "digits":
        raise ValueError(f"got label_skew={options.label_skew} for {options.problem}, expected it for digits only")
    setting = setting_of(options)
    is_digits = options.problem == "digits"
    problem = Digits(label_skew=options.label_skew, seed=options.seed) if is_digits else Consensus(seed=options.seed)
    target = problem.target if options.target is None else options.target
    predictions, left_out = [], []
    for choice in _choices(options.methods or list(METHODS), setting.world_size):
        try:
            predictions.append(simulate(choice, setting, problem, target=target, max_steps=options.max_steps))
        except ValueError as error:
            if options.methods:
                raise
            left_out.append(f"Left out: {error}")  # of all methods some do not fit, which nobody asked for by name
    advice = advise(predictions, setting)
    heading = (
        f"{setting.world_size} workers, {setting.num_parameters / 1e6:g} M parameters, {options.compute_ms:g} ms of "
        f"compute, {options.rate_gbit:g} Gbit/s; {problem.error_name} to {target:g}"
    )
    return "\n".join([heading, "", as_table(predictions), "", *advice.sentences, *left_out])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the advice; the exit code, 2 for options that cannot be."""
    try:
        text = _run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The planner: the time and bytes of each method on a cluster, its fastest options, and the method to choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..graph_manager.named_graphs import DIRECTED_STATIC_GRAPHS, STATIC_GRAPHS, TREES, num_neighbours
from ..methods.chosen import read_algorithm
from ..methods.options import DEFAULTS
from ..registry import METHODS
from ..schedule import Schedule
from ..wrappers.choices import written
from .comparison import LabTraining
from .plan import CODES, LabPlan, Setting, code_costs
from .tasks import Problem

MAX_STEPS = 320
MANY_WORKERS = 16
"""From here on the advice for mixed moments is another one: docs/guides/default.md has the rows."""
_MAX_THETA = 1e6  # to which Moniqua's bound is doubled
GRAPHS_TO_TRY = (
    *("npeer-exponential", "exponential", "bipartite-exponential", "base", "equi-dyn", "equi-dyn-undirected"),
    *("bipartite-complete", "static-exponential", "hypercube", "torus", "ring"),
)
LOCAL_STEPS_TO_TRY = (3, 10, 30, 100)
GOSSIP_EVERY_TO_TRY = (2, 4, 8)
AVERAGE_EVERY_TO_TRY = (4, 16)
OUTER_LRS_TO_TRY = (0.4, 0.7, 1.0)
OUTER_MOMENTA_TO_TRY = (0.0, 0.5, 0.9)
_COLUMNS = ("method", "graph", "steps", "s per step", "s to target", "MB per rank", "waiting", "disagreement", "")
_TOO_MUCH_WAITING = 0.75  # of a step
_LITTLE_WAITING = 0.1  # of a worker's time
_NUM_LEFT = 2  # columns that are aligned to the left, from the first on


@dataclass(frozen=True)
class Prediction:
    """The steps, seconds and bytes of one method to the target, or to its last step.

    Attributes:
        plan: the method, its settings, its graph and its schedule.
        target, error: of the problem; the error is NaN or infinite if training diverged.
        num_steps: the steps of a worker, mean over workers; rounds, if there is nothing to learn.
        step_seconds: the time of one step, communication included.
        seconds: the time of all steps.
        rank_bytes: the bytes sent by a worker, mean over workers.
        waiting_share: the share of waiting in a worker's time, mean over workers; unhidden communication is waiting.
        disagreement, max_disagreement: of the workers' models at the end, see `Problem`, and the limit of agreement.
        is_overlapped: whether messages travel while workers compute.
        line_bytes: the bytes sent by all workers to other regions, see `Network.lines`; NaN: they are not counted.
    """

    plan: LabPlan
    target: float
    error: float
    num_steps: float
    step_seconds: float
    seconds: float
    rank_bytes: float
    waiting_share: float
    disagreement: float
    max_disagreement: float
    is_overlapped: bool = False
    line_bytes: float = 0.0

    @property
    def has_reached(self) -> bool:
        """Whether the error came down to the target."""
        return self.error <= self.target

    @property
    def has_agreed(self) -> bool:
        """Whether workers' models are close to each other at the end."""
        return self.disagreement <= self.max_disagreement

    @property
    def name(self) -> str:
        """The method in words: 'choco with sign on torus'."""
        return self.plan.name

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The place of the prediction among others; the lower the better."""
        if self.has_reached:
            return False, not self.has_agreed, self.seconds
        return True, True, self.error if math.isfinite(self.error) else math.inf

    @property
    def settings(self) -> str:
        """The settings and the schedule beside its name, in words; "": all have their defaults."""
        plan = self.plan
        own = plan.text if plan.is_recipe and not plan.text.endswith("()") else ""
        schedule = "" if plan.schedule == Schedule() else written(plan.schedule)
        return ", ".join(filter(None, [own, schedule]))


def simulate(
    what: Any,
    setting: Setting,
    problem: Problem,
    *,
    target: float | None = None,
    max_steps: int = MAX_STEPS,
    show: Callable[[str], None] = lambda text: None,
) -> Prediction:
    """Train n small models by one method until their error is at most the target, and return the time and the bytes.

    Args:
        what: the method, see `LabPlan.of`.
        setting: the cluster.
        problem: the task of the small models.
        target: the error to reach; None: the problem's own.
        max_steps: to give up after, at least 1; for an asynchronous method, ticks of its fastest worker's step.
        show: called with a line of progress now and then.

    Raises:
        ValueError: an unsuitable method or graph, or a number out of range.
    """
    target = problem.target if target is None else target
    if not 0 < target < math.inf or max_steps < 1:
        raise ValueError(
            f"got target={target} and max_steps={max_steps}, expected an error above 0, and 1 step or more"
        )
    plan = LabPlan.of(what).resolved(setting.world_size)
    if plan.method.needs_sgd:
        problem = problem.with_momentum()
    while True:
        try:
            return _predict(plan, setting, problem, target, max_steps, show)
        except (RuntimeError, ValueError) as error:
            theta = getattr(plan.chosen.made, "theta", None)
            if theta is None or not plan.is_recipe or theta > _MAX_THETA:
                raise ValueError(str(error)) from error
            # Neighbours were too far apart. A user of Moniqua has to know theta beforehand, so the run starts over.
            plan = plan.with_settings(theta=2 * theta)


def _predict(
    plan: LabPlan, setting: Setting, problem: Problem, target: float, max_steps: int, show: Callable[[str], None]
) -> Prediction:
    training = LabTraining(plan, setting, problem)
    first_start, error = 0.0, math.inf
    for step, z in enumerate(training.run(max_steps)):
        if step == 0:
            first_start = training.seconds
        if step % problem.check_every == 0 or step == max_steps:
            error = problem.error(z)
            show(f"{plan.name}: step {step} of {max_steps}, {problem.error_name} {error:.3g}")
            if error <= target or not math.isfinite(error):
                break
    taken, seconds, method = float(training.num_steps.mean()), training.seconds, training.method
    return Prediction(
        plan=plan,
        target=target,
        error=error,
        num_steps=taken + problem.is_solved_by_rounds,
        step_seconds=(seconds - first_start) / taken if taken else seconds,
        seconds=seconds,
        rank_bytes=training.sent_bytes,
        waiting_share=training.waiting_share,
        disagreement=problem.disagreement(z),
        max_disagreement=problem.max_disagreement,
        is_overlapped=method.clock.is_overlapped,
        line_bytes=method.clock.line_bytes,
    )


# Tuning.


def tune(
    what: Any,
    setting: Setting,
    problem: Problem,
    *,
    target: float | None = None,
    max_steps: int = MAX_STEPS,
    show: Callable[[str], None] = lambda text: None,
) -> Prediction:
    """Run `simulate` with the fastest options of the method.

    First the graph, unless one is named; then the code, likewise; then the steps between rounds or averages (H), exact
    averages now and then, unless the plan has a schedule; then, for an outer optimizer, its
    learning rate and momentum. Each search keeps the results of the searches before, so the result need not be the best
    of all combinations. Settings in the text of an algorithm stay. The fastest prediction has the smallest
    `Prediction.seconds` of all predictions with the target reached and agreement of the workers; otherwise it is the
    nearest to the target.

    Args:
        what: the method, see `LabPlan.of`.
        setting: the cluster.
        problem: the task of the small models.
        target: the error to reach; None: the default of the problem.
        max_steps: the steps after which a simulation gives up; see `simulate`.
        show: called with a line of progress now and then.

    Returns:
        The prediction; its `plan` has the chosen options.

    Raises:
        ValueError: see `simulate`.
    """
    given = LabPlan.of(what)
    found = simulate(given, setting, problem, target=target, max_steps=max_steps, show=show)
    for knob in (_graphs, _codes, _local_steps, _schedules, _outer_rates):
        start = found.plan
        for tried in knob(given, start):
            if tried == start:
                continue
            try:
                prediction = simulate(tried, setting, problem, target=target, max_steps=max_steps, show=show)
            except ValueError:
                continue  # a graph that the method or this number of workers cannot have
            if prediction.rank < found.rank:
                found = prediction
    return found


def _graphs(given: LabPlan, now: LabPlan) -> Iterator[LabPlan]:
    own = now.method.simulated_graph
    if not given.graph and own is not None:
        for graph in TREES if own(4, 1) in TREES else GRAPHS_TO_TRY:
            yield replace(now, graph=graph)


def _codes(given: LabPlan, now: LabPlan) -> Iterator[LabPlan]:
    for code in now.codes if given.is_recipe and not given.code else ():
        if CODES[code] in now.method.step_sizes:
            yield now.with_code(code)


def _local_steps(given: LabPlan, now: LabPlan) -> Iterator[LabPlan]:
    if (period := now.method.period) and given.is_recipe:
        for steps in LOCAL_STEPS_TO_TRY:
            yield now.with_settings(**{period: steps})


def _schedules(given: LabPlan, now: LabPlan) -> Iterator[LabPlan]:
    known, schedule = now.method.options, now.schedule
    if "gossip_every" not in known or schedule.gossip_every != 1:
        return
    tries = [replace(schedule, gossip_every=steps) for steps in GOSSIP_EVERY_TO_TRY]
    if not schedule.average_every and "average_every" in known:
        tries += [Schedule(average_every=rounds) for rounds in AVERAGE_EVERY_TO_TRY]
    for tried in tries:
        yield replace(now, schedule=tried)


def _outer_rates(given: LabPlan, now: LabPlan) -> Iterator[LabPlan]:
    settings = now.method.settings
    if given.is_recipe and {"sync_every", "lr"} <= settings:
        for lr, momentum in product(OUTER_LRS_TO_TRY, OUTER_MOMENTA_TO_TRY if "momentum" in settings else (None,)):
            yield now.with_settings(lr=lr, momentum=momentum)


# Advice.


@dataclass(frozen=True)
class Advice:
    """The method to choose, and the reasons.

    Args:
        best: the prediction of the method; None: no method reaches the target.
        sentences: the reasons, one sentence each.
    """

    best: Prediction | None
    sentences: tuple[str, ...]


def best(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the fastest of `predictions` that reaches the target with agreement of the workers, or None."""
    good = [prediction for prediction in predictions if prediction.has_reached and prediction.has_agreed]
    return min(good, key=lambda prediction: prediction.seconds, default=None)


def advise(predictions: Sequence[Prediction], setting: Setting) -> Advice:
    """Return the method to choose, its bottleneck, and the methods left out because their workers disagree.

    Three kinds of methods are told apart. Advice goes first to methods without a step size or a momentum of their own
    (`Method.rates`), and of these to the fastest one with a round in every step (`LabPlan.interval`). If that one waits
    for most of its step, the fastest one with rare rounds is advised where it is faster. Methods with rates of their
    own take the place of a kind that has no method, since their best rates depend on your model and on the length of
    training, which the small problem does not know. It is convex and takes few steps, so a momentum between workers
    helps it more than the language models of docs/benchmarks/records.md.

    Args:
        predictions: predictions for methods in the same setting.
        setting: their setting.
    """
    plain = [p for p in predictions if not p.plan.method.rates]
    steady, rare = (best([p for p in plain if (p.plan.interval > 1) is is_rare]) for is_rare in (False, True))
    fastest = best(predictions)
    other = rare or fastest
    if fastest is None or other is None:
        return Advice(None, _despair(predictions))
    is_faster = steady is not None and other.seconds < steady.seconds
    chosen = steady or other
    if is_faster and chosen.waiting_share > _TOO_MUCH_WAITING:
        chosen = other
    sentences = [_choice(chosen, predictions), _bound(chosen, setting)]
    others = [p.name for p in predictions if p.has_reached and not p.has_agreed]
    if others:
        sentences.append(
            f"Not weighed: {', '.join(others)}: the target was reached, but workers' models differ by more than "
            f"{chosen.max_disagreement:g} of their size, so they are not one model."
        )
    if is_faster and steady is not None and rare is not None:
        sentences.append(
            f"{rare.name} averages rarely ({rare.seconds:.1f} s), which this small problem forgives: a language model "
            "learnt less in equal steps that way (docs/guides/default.md). Of the methods that communicate in every "
            f"step {steady.name} is the fastest, with {steady.seconds:.1f} s; rare averages are advised where it waits "
            f"for more than {_TOO_MUCH_WAITING:.0%} of its step, here {steady.waiting_share:.0%}."
        )
    rated, speed = chosen, ""
    if fastest.seconds < chosen.seconds:
        rated, speed = fastest, f"is faster here ({fastest.seconds:.1f} s) and "
    if rated.plan.method.rates:
        sentences.append(
            f"{rated.name} {speed}has rates of its own ({', '.join(sorted(rated.plan.method.rates))}). The best values "
            "depend on your model and on the length of training: tune them there, as in docs/benchmarks/records.md, "
            "before you choose it."
        )
    for inner in sorted({p.plan.method.inner_optimizer for p in predictions} - {""}):
        names = ", ".join(p.name for p in predictions if p.plan.method.inner_optimizer == inner)
        sentences.append(
            f"{names}: simulated with SGD in place of {inner}, for which the small problem has no hidden matrix. What "
            "it saves in steps is missing."
        )
    if chosen.plan.method.name != "ar":
        sentences.append(f"By Adam, train with GossipAdamW(..., num_ranks={setting.world_size}).")
    if chosen.plan.method.name in ("sgp", "osgp"):
        mixed = "MixedMomentum" if setting.world_size < MANY_WORKERS else "LocalSGD(sync_every=2) with MixedMomentum"
        sentences.append(
            f"{mixed} comes closer to all-reduce in equal steps, for twice the bytes of SGP: docs/guides/default.md "
            "has nats by workers."
        )
    if chosen.settings:
        sentences.append(f"It was simulated with {chosen.settings}.")
    if chosen.plan.method.name in METHODS:
        launch = f"torchrun --standalone --nproc-per-node {setting.world_size} -m train.gossip_sgd"
        sentences.append(
            f"To train like this: {launch} {recipe_options(chosen.plan, setting)} "
            "(in a clone, on one machine; for several see job_scripts/)"
        )
        if chosen.plan.method.name == "ar" and chosen.plan.wire_dtype is not None:
            sentences[-1] += ", and register DistributedDataParallel's hook of 16 bits: docs/choosing.md#hook"
    return Advice(chosen, tuple(sentences))


class CodeGain(NamedTuple):
    """The gain of a code in a message of a model to one neighbour, beside the message without a code.

    name: the short name of the code.
    saved_bytes: the bytes less on the wire.
    saved_seconds: the time less on the slowest link.
    spent_seconds: the time more of encoding and decoding.
    """

    name: str
    saved_bytes: float
    saved_seconds: float
    spent_seconds: float

    @property
    def pays(self) -> bool:
        """Whether a message takes less time with the code."""
        return self.saved_seconds > self.spent_seconds

    @property
    def break_even_bit_s(self) -> float:
        """The bits of payload per second of a link on which the code saves as much time as it takes."""
        return 8 * self.saved_bytes / self.spent_seconds


def code_gains(setting: Setting) -> list[CodeGain]:
    """Return the gain of each code, and of deltas, on the links of a setting; the one for the fastest links first.

    Raises:
        ValueError: the setting has no size of the model.
    """
    if setting.num_parameters is None:
        raise ValueError("got num_parameters=None, expected the number of float32 parameters of the model")
    size, links = 4.0 * setting.num_parameters, setting.network.on(np.arange(setting.world_size))
    plain = links.plain_message(size)
    gains = []
    for name, coded in code_costs(links, size).items():
        saved = plain.num_bytes - coded.num_bytes
        spent = coded.encode_seconds + coded.decode_seconds - plain.encode_seconds - plain.decode_seconds
        gains.append(CodeGain(name, saved, links.wire_seconds(saved), spent))
    return sorted(gains, key=lambda gain: gain.break_even_bit_s, reverse=True)


def code_advice(setting: Setting) -> str:
    """Return a sentence on whether a code or deltas pay: the time of passes over memory beside the time on a link.

    Args:
        setting: the cluster, with the number of parameters; see `code_gains`.

    >>> from .clock import Compute, Network
    >>> [code_advice(Setting(8, 10**7, Compute(0.1), Network(link)))[:30] for link in ("1 Gbit/s", "400 Gbit/s")]
    ['Codes pay on links below 38 Gb', 'No code and no deltas pay on t']
    """
    gains = code_gains(setting)
    nearest, best = gains[0], max(gains, key=lambda gain: gain.saved_seconds - gain.spent_seconds)
    wire = setting.network.on(np.arange(setting.world_size)).wire_seconds(4.0 * (setting.num_parameters or 0))
    limit = f"{nearest.break_even_bit_s / 1e9:.2g} Gbit/s"
    if not any(gain.pays for gain in gains):
        return (
            f"No code and no deltas pay on these links: a model takes {1e3 * wire:.3g} ms on the slowest one, and "
            f"{nearest.name} would save {1e3 * nearest.saved_seconds:.3g} ms of them for "
            f"{1e3 * nearest.spent_seconds:.3g} ms of encoding and decoding. Codes begin to pay below {limit}."
        )
    return (
        f"Codes pay on links below {limit}: {best.name} saves {1e3 * best.saved_seconds:.3g} of the {1e3 * wire:.3g} "
        f"ms that a model takes on the slowest link, for {1e3 * best.spent_seconds:.3g} ms of encoding and decoding. "
        "The steps that a code costs are not in these times."
    )


def recipe_options(plan: LabPlan, setting: Setting) -> str:
    """Return the options of a training script for the plan.

    Args:
        plan: a resolved plan of a method of the registry.
        setting: the setting of the simulation.
    """
    method, schedule, peers = plan.method, plan.schedule, plan.peers_per_itr or 1
    if plan.peers_per_itr is None and plan.graph in {**STATIC_GRAPHS, **DIRECTED_STATIC_GRAPHS}:
        peers = num_neighbours(str(plan.graph), setting.world_size)
    values: dict[str, object] = {"graph": plan.graph}
    if plan.wire_dtype is not None:
        values["wire_dtype"] = str(plan.wire_dtype).removeprefix("torch.")
    if isinstance(peers, int) and peers > 1:
        values["peers_per_itr"] = peers
    values |= {option.name: getattr(schedule, option.name) for option in fields(schedule)}
    is_plain = plan.text == read_algorithm(method.name).text
    words = [f"--recipe {method.name}" if is_plain else f'--algorithm "{plan.text}"']
    for name, value in values.items():
        if value and name in method.options and value != DEFAULTS[name]:
            words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join([*words, *([] if method.takes_nesterov else ["--no-nesterov"])])


def as_table(predictions: Sequence[Prediction]) -> str:
    """Return one line for each method, by time to target; methods without the target come last, by error."""
    ordered = sorted(predictions, key=lambda p: (not p.has_reached, p.seconds if p.has_reached else p.error))
    rows = [_COLUMNS, *(_row(prediction) for prediction in ordered)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
    lines = []
    for row in rows:
        cells = (c.ljust(w) if k < _NUM_LEFT else c.rjust(w) for k, (c, w) in enumerate(zip(row[:-1], widths)))
        lines.append(f"{'  '.join(cells)}  {row[-1]}".rstrip())
    return "\n".join(lines)


def _row(prediction: Prediction) -> tuple[str, ...]:
    notes = [prediction.settings] if prediction.settings else []
    if own := prediction.plan.method.inner_optimizer:
        notes.append(f"by SGD, not {own}")
    if not prediction.has_reached:
        notes.append(f"not reached: {prediction.error:.3g}")
    elif not prediction.has_agreed:
        notes.append("workers disagree")
    return (
        prediction.plan.label,
        str(prediction.plan.graph) or "-",
        f"{prediction.num_steps:.0f}",
        f"{prediction.step_seconds:.3f}",
        f"{prediction.seconds:.1f}" if prediction.has_reached else "-",
        f"{prediction.rank_bytes / 1e6:,.0f}",
        f"{prediction.waiting_share:.0%}",
        f"{prediction.disagreement:.3f}",
        ", ".join(notes),
    )


def _choice(chosen: Prediction, predictions: Sequence[Prediction]) -> str:
    """Return the first sentence: beside AllReduce if it was tried, else the next best."""
    sentence = f"Choose {chosen.name}: {chosen.seconds:.1f} s to the target"
    others = [p for p in predictions if p.has_reached and p.has_agreed and p is not chosen]
    rival = best([p for p in others if p.plan.method.name == "ar"]) or best(others)
    if rival is None:
        return f"{sentence}, the only one that reaches it with workers that agree."
    steps = f"{chosen.num_steps:.0f} steps of {chosen.step_seconds:.3f} s beside {rival.num_steps:.0f} of"
    times = rival.seconds / chosen.seconds if chosen.seconds else 1.0
    than = f"{times:.2f} times faster" if times >= 1 else f"{1 / times:.2f} times slower"
    return f"{sentence}, {than} than {rival.name} ({steps} {rival.step_seconds:.3f} s)."


def _bound(chosen: Prediction, setting: Setting) -> str:
    """Return the second sentence: the parts of a step."""
    steps, workers = range(max(1, round(chosen.num_steps))), np.arange(setting.world_size)
    local = float(np.mean([setting.compute.step_seconds(step, workers).mean() for step in steps]))
    wire = setting.network.on(workers).wire_seconds(chosen.rank_bytes / max(chosen.num_steps, 1.0))
    waiting = chosen.waiting_share * chosen.step_seconds
    exposed = max(wire - local, 0.0) if chosen.is_overlapped else wire
    if chosen.waiting_share < _LITTLE_WAITING:
        advice = "compute bounds it: faster links would change little"
    elif exposed > waiting / 2:
        is_rare = chosen.plan.interval > 1
        remedy = "more steps between its rounds" if is_rare else "fewer bits (choco, powergossip, moniqua)"
        advice = f"the wire bounds it: faster links or {remedy} would help"
    elif setting.compute.is_uneven or setting.network.slow_share:
        advice = "waiting for slow workers or links bounds it: methods that wait for nobody (adpsgd, dpwa) may help"
    else:
        advice = "copies, codes and latency bound it, more than the wire: see memory_byte_s and latency_s of Network"
    return (
        f"Its step has {local:.3f} s of compute, {wire:.3f} s of its own bytes on the wire and {waiting:.3f} s of "
        f"waiting; {advice}."
    )


def _despair(predictions: Sequence[Prediction]) -> tuple[str, ...]:
    nearest = min(predictions, key=lambda p: (not p.has_reached, p.error if p.error == p.error else float("inf")))
    if nearest.has_reached:
        return (
            f"No method reaches the target with workers that agree: {nearest.name} gets there with models that differ "
            f"by {nearest.disagreement:.2f} of their size.",
            "Take a better connected graph (--methods sgp:npeer-exponential dpsgd:hypercube), more --peers, or "
            '--schedule "Schedule(average_every=10)".',
        )
    if not math.isfinite(nearest.error):
        return (
            f"No method reaches the target of {nearest.target:g}: with all of them models grow without bound.",
            "Give a lower step_size, as in 'Choco(TopK(0.01), step_size=0.01)', or leave it out.",
        )
    return (
        f"No method reaches the target of {nearest.target:g}: the nearest is {nearest.name} with {nearest.error:.3g} "
        f"after {nearest.num_steps:.0f} steps.",
        "Give more --max-steps or a higher --target; or a better connected graph (as in --methods dpsgd:hypercube), "
        'more --peers, or --schedule "Schedule(average_every=10)".',
    )

"""What was predicted of each method, as a table, and which of them to choose, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from ..consensus_control import ConsensusControl
from ..graph_manager.named_graphs import DIRECTED_STATIC_GRAPHS, STATIC_GRAPHS, num_neighbours
from ..methods.chosen import read_algorithm
from ..methods.options import DEFAULTS
from ..registry import METHODS
from ..schedule import Schedule
from .choice import Choice
from .setting import ControlRates, Setting

_COLUMNS = ("method", "graph", "steps", "s per step", "s to target", "MB per rank", "waiting", "disagreement", "")
_LITTLE_WAITING = 0.1  # of a worker's time
_NUM_LEFT = 2  # columns that are aligned to the left, from the first on


@dataclass(frozen=True)
class Prediction:
    """The steps, seconds and bytes that one method took to the target, or to its last step.

    Attributes:
        choice: method, graph and code.
        target, error: of the problem; NaN or infinite where it diverged.
        num_steps: of a worker, mean over workers; rounds, where there is nothing to learn.
        step_seconds: of one step, communication included.
        seconds: of all steps.
        rank_bytes: that a worker has sent, mean over workers.
        waiting_share: of a worker's time, mean over workers; communication that nothing hides is waiting.
        disagreement, max_disagreement: of the workers' models at the end, see `Problem`, and what counts as agreement.
        is_overlapped: whether messages travel while workers compute.
        algorithm: the text of the method with the arguments that it was simulated with.
        tuned: options that `tune` found faster than the options of the setting, by name; the graph is in `choice`.
        control_rates: how often workers communicated, where a `ConsensusControl` decides that.
        schedule: a faster one than in the setting, which `tune` found; None: it found no faster one.
    """

    choice: Choice
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
    algorithm: str = ""
    tuned: Mapping[str, float] = field(default_factory=dict)
    control_rates: ControlRates | None = None
    schedule: Schedule | ConsensusControl | None = None

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
        """In words: 'choco with sign on torus'."""
        code = f" with {self.choice.compressor}" if self.choice.compressor else ""
        method = self.choice.algorithm or self.choice.method
        graph = f" on {self.choice.graph}" if self.choice.graph else ""
        if (rates := self.control_rates) is not None:
            by_averages = rates.averages_per_step == rates.rounds_per_step
            graph = " in averages under control" if by_averages else f"{graph} under control"
        return f"{method}{code}{graph}"

    @property
    def settings(self) -> str:
        """The arguments and options that are not in its name, in words; "": all have their defaults."""
        own = "" if self.choice.algorithm or self.algorithm.endswith("()") else self.algorithm
        tuned = (f"{name.replace('_', '-')} {value:g}" for name, value in self.tuned.items())
        return ", ".join(filter(None, [own, *tuned]))


@dataclass(frozen=True)
class Advice:
    """Which method to choose (None: none will do), and why."""

    best: Prediction | None
    sentences: tuple[str, ...]


def best(predictions: Sequence[Prediction]) -> Prediction | None:
    """The fastest of those that reached the target and whose workers agree; None if none did."""
    good = [prediction for prediction in predictions if prediction.has_reached and prediction.has_agreed]
    return min(good, key=lambda prediction: prediction.seconds, default=None)


def advise(predictions: Sequence[Prediction], setting: Setting) -> Advice:
    """Which to choose, what bounds it, and which methods were left out since their workers disagree.

    Args:
        predictions: of methods in the same setting.
        setting: theirs.
    """
    chosen = best(predictions)
    if chosen is None:
        return Advice(None, _despair(predictions))
    sentences = [_choice(chosen, predictions), _bound(chosen, setting)]
    others = [p.name for p in predictions if p.has_reached and not p.has_agreed]
    if others:
        sentences.append(
            f"Not weighed: {', '.join(others)}: the target was reached, but workers' models differ by more than "
            f"{chosen.max_disagreement:g} of their size, so they are not one model."
        )
    if chosen.settings:
        sentences.append(f"It was simulated with {chosen.settings}.")
    if (rates := chosen.control_rates) is not None:
        sentences.append(
            f"Under control {rates.rounds_per_step:.0%} of the steps had a round, and {rates.averages_per_step:.0%} an "
            "exact average. On your model it may be more or less often: give what comm_stats() of some hundred steps "
            "says, as --rounds-per-step and --averages-per-step."
        )
    if chosen.choice.method in METHODS:
        launch = f"torchrun --standalone --nproc-per-node {setting.world_size} -m train.gossip_sgd"
        sentences.append(
            f"To train like this: {launch} {recipe_options(chosen, setting)} "
            "(in a clone, on one machine; for several see job_scripts/)"
        )
    return Advice(chosen, tuple(sentences))


def recipe_options(prediction: Prediction, setting: Setting) -> str:
    """The options of a training script that train as it was simulated.

    Args:
        prediction: of a method of the registry.
        setting: the setting of the simulation.
    """
    choice, schedule = prediction.choice, prediction.schedule or setting.schedule
    method, peers = METHODS[choice.method], setting.peers_per_itr or 1
    if setting.peers_per_itr is None and choice.graph in {**STATIC_GRAPHS, **DIRECTED_STATIC_GRAPHS}:
        peers = num_neighbours(choice.graph, setting.world_size)
    values: dict[str, object] = {"graph": choice.graph}
    if isinstance(peers, int) and peers > 1:
        values["peers_per_itr"] = peers
    if isinstance(schedule, ConsensusControl):
        values["schedule"] = f'"{_call_of(schedule)}"'
    else:
        values |= {option.name: getattr(schedule, option.name) for option in fields(schedule)}
    recipe = read_algorithm(method.name).text
    text = prediction.algorithm or recipe
    words = [f"--recipe {method.name}" if text == recipe else f'--algorithm "{text}"']
    for name, value in values.items():
        if value and name in method.options and value != DEFAULTS[name]:
            words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join([*words, *([] if method.takes_nesterov else ["--no-nesterov"])])


def _call_of(schedule: ConsensusControl) -> str:
    """The text of Python, without the arguments that have their defaults."""
    given = [
        f"{option.name}={getattr(schedule, option.name)!r}"
        for option in fields(schedule)
        if getattr(schedule, option.name) != option.default
    ]
    return f"ConsensusControl({', '.join(given)})"


def as_table(predictions: Sequence[Prediction]) -> str:
    """One line per method, by time to target; those that did not get there last, by error."""
    ordered = sorted(predictions, key=lambda p: (not p.has_reached, p.seconds if p.has_reached else p.error))
    rows = [_COLUMNS, *(_row(prediction) for prediction in ordered)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
    lines = []
    for row in rows:
        cells = (c.ljust(w) if k < _NUM_LEFT else c.rjust(w) for k, (c, w) in enumerate(zip(row[:-1], widths)))
        lines.append(f"{'  '.join(cells)}  {row[-1]}".rstrip())
    return "\n".join(lines)


def _row(prediction: Prediction) -> tuple[str, ...]:
    code = f":{prediction.choice.compressor}" if prediction.choice.compressor else ""
    notes = [prediction.settings] if prediction.settings else []
    if (rates := prediction.control_rates) is not None:
        notes.append(f"{rates.rounds_per_step:.2f} rounds and {rates.averages_per_step:.2f} averages per step")
    if not prediction.has_reached:
        notes.append(f"not reached: {prediction.error:.3g}")
    elif not prediction.has_agreed:
        notes.append("workers disagree")
    return (
        (prediction.choice.algorithm or prediction.choice.method) + code,
        prediction.choice.graph or "-",
        f"{prediction.num_steps:.0f}",
        f"{prediction.step_seconds:.3f}",
        f"{prediction.seconds:.1f}" if prediction.has_reached else "-",
        f"{prediction.rank_bytes / 1e6:,.0f}",
        f"{prediction.waiting_share:.0%}",
        f"{prediction.disagreement:.3f}",
        ", ".join(notes),
    )


def _choice(chosen: Prediction, predictions: Sequence[Prediction]) -> str:
    """The first sentence: beside AllReduce where it was tried, else the next best."""
    sentence = f"Choose {chosen.name}: {chosen.seconds:.1f} s to the target"
    others = [p for p in predictions if p.has_reached and p.has_agreed and p is not chosen]
    rival = next((p for p in others if p.choice.method == "ar"), None) or best(others)
    if rival is None:
        return f"{sentence}, the only one that reaches it with workers that agree."
    steps = f"{chosen.num_steps:.0f} steps of {chosen.step_seconds:.3f} s beside {rival.num_steps:.0f} of"
    times = rival.seconds / chosen.seconds if chosen.seconds else 1.0
    return f"{sentence}, {times:.2f} times faster than {rival.name} ({steps} {rival.step_seconds:.3f} s)."


def _bound(chosen: Prediction, setting: Setting) -> str:
    """The second: what a step spends its time on."""
    steps = range(max(1, round(chosen.num_steps)))
    n = setting.world_size
    local = float(np.mean([setting.compute.step_seconds(step, num_ranks=n).mean() for step in steps]))
    wire = setting.links.wire_seconds(chosen.rank_bytes / max(chosen.num_steps, 1.0))
    waiting = chosen.waiting_share * chosen.step_seconds
    exposed = max(wire - local, 0.0) if chosen.is_overlapped else wire
    if chosen.waiting_share < _LITTLE_WAITING:
        advice = "compute bounds it: faster links would change little"
    elif exposed > waiting / 2:
        advice = "the wire bounds it: faster links or fewer bits (choco, powergossip, moniqua) would help"
    elif setting.compute.is_uneven or setting.links.slow_share:
        advice = "waiting for slow workers or links bounds it: methods that wait for nobody (adpsgd, dpwa) may help"
    else:
        advice = "copies, codes and latency bound it, more than the wire: see --memory-gbyte and --latency-ms"
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
            "--average-every 10.",
        )
    if not math.isfinite(nearest.error):
        return (
            f"No method reaches the target of {nearest.target:g}: with all of them models grow without bound.",
            "Give a lower --step-size, or leave it out.",
        )
    return (
        f"No method reaches the target of {nearest.target:g}: the nearest is {nearest.name} with {nearest.error:.3g} "
        f"after {nearest.num_steps:.0f} steps.",
        "Give more --max-steps or a higher --target; or a better connected graph (as in --methods dpsgd:hypercube), "
        "more --peers, or --average-every 10.",
    )

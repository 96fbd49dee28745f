"""One trial: a method, on all ranks at once, timed step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.by_hand import PlainLoop
from benchmarks.cluster.delays import Delays
from benchmarks.cluster.methods import ClusterMethod, method_of
from benchmarks.cluster.network.links import line_bytes
from benchmarks.cluster.network.place import Counters, Place, forget_peak_memory, peak_memory_bytes
from benchmarks.cluster.split import Split
from benchmarks.cluster.waited_model import WaitedModel

NUM_WARM_STEPS = 3
"""Steps of a trial that are not timed, at least."""


@dataclass(frozen=True)
class Trial:
    """A method timed with a model that waits: what all ranks know.

    Args:
        method: see `method_of`.
        number: of the trial in its run, which names all that is its own: keys of the store, ports.
        num_steps: timed ones of each rank; rounded up to the method's period.
        compute_seconds: of a step, waited.
        delays: of the ranks.
        limit_seconds: for the whole trial, and for every wait in it.
        num_parameters: of the model, about.
        optimizer: a name of OPTIMIZERS.
        switch: of the network, where it has a line between two regions, see `line_bytes`; "": there is none.
        regions: of the ranks, for that line.
    """

    method: str
    number: int
    num_steps: int
    compute_seconds: float
    delays: Delays
    limit_seconds: float
    num_parameters: float
    optimizer: str = "SGD"
    switch: str = ""
    regions: str = ""

    def as_message(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Trial:
        """Of what `as_message` gave."""
        return cls(**{**message, "delays": Delays(**message["delays"])})


def measure(trial: Trial, place: Place) -> dict[str, Any]:
    """Run the trial as this rank; collective.

    Args:
        trial: the same on all ranks.
        place: of this rank.

    Returns:
        What goes to the table, of this rank: `step_ms` is a list; the others are numbers, per timed step unless their
        names say otherwise. None: it is not known.
    """
    method = method_of(trial.method)
    before = forget_peak_memory()
    # Gradients differ from rank to rank, or there would be nothing to agree about.
    model = WaitedModel(
        trial.num_parameters, compute_seconds=trial.compute_seconds, gradient=1e-3 * (1 + place.rank / place.world_size)
    )
    place.join()
    start = time.perf_counter()
    contender = method.make(model, place)
    constructed = time.perf_counter() - start
    line = LineCount(trial, contender, place) if trial.switch else None
    result = _timed_steps(trial, method, contender, model, place)
    if line is not None:
        result.update(line.bytes())
    place.leave(contender.close)
    peak = peak_memory_bytes()
    return {"construct_s": constructed, "rss_mb": peak / 1e6, "memory_mb": (peak - before) / 1e6, **result}


class LineCount:
    """The bytes between two regions from now on: as our wrapper counts them, and as the line does; collective.

    Args:
        trial, place: of this rank.
        contender: has a wrapper of ours.
    """

    def __init__(self, trial: Trial, contender: PlainLoop, place: Place) -> None:
        self._trial, self._place, self._model = trial, place, contender.model
        self._model.declare_regions(trial.regions)  # type: ignore[operator]
        self._start = self._now("first step")

    def bytes(self) -> dict[str, float]:
        """Return counted_bytes, sent by this rank, and line_bytes, sent by all in both directions."""
        return {name: value - self._start[name] for name, value in self._now("last step").items()}

    def _now(self, what: str) -> dict[str, float]:
        self._place.meet(f"{what}, all is sent")
        counted = self._model.comm_stats()["bytes_sent_between_regions"]  # type: ignore[operator]
        found = {"counted_bytes": counted, "line_bytes": sum(line_bytes(self._trial.switch, k) for k in range(2))}
        self._place.meet(f"{what}, all is counted")
        return found


def _timed_steps(
    trial: Trial, method: ClusterMethod, contender: PlainLoop, model: WaitedModel, place: Place
) -> dict[str, Any]:
    x = torch.zeros(())
    split = Split(contender)
    computed = 0.0

    def train(first: int, until: int, factor: Callable[[int], float]) -> list[float]:
        """Steps until the ranks' common progress; the seconds of each."""
        nonlocal computed
        num_own_steps, seconds = 0, []
        while contender.progress(first + num_own_steps) < until:
            model.factor = factor(first + num_own_steps)
            computed += model.factor * trial.compute_seconds
            start = time.perf_counter()
            contender.step(lambda module: module(x))
            seconds.append(time.perf_counter() - start)
            num_own_steps += 1
        return seconds

    num_warm = -(-NUM_WARM_STEPS // method.period) * method.period
    num_timed = -(-trial.num_steps // method.period) * method.period
    warm = train(0, num_warm, lambda step: 1.0)
    place.meet("first timed step")
    parts, counters, computed = split.seconds(), Counters.now(), 0.0
    seconds = train(
        num_warm,
        num_warm + num_timed,
        lambda step: trial.delays.factor(place.rank, step, num_hosts=place.world_size),
    )
    after = Counters.now()
    num_steps = len(seconds)
    own = {name: 1e3 * (value - parts[name]) / num_steps for name, value in split.seconds().items()}
    compute = 1e3 * computed / num_steps + own.pop("optimizer")
    mean = 1e3 * sum(seconds) / num_steps
    exposed = own["wait"] if split.is_hidden or not split.has_rounds else own["encode"] + own["wire"] + own["mix"]
    return {
        "step_ms": [1e3 * x for x in seconds],
        "num_rounds": num_timed,
        "mean_step_ms": mean,
        "compute_ms": compute,
        **{f"{name}_ms": own.get(name) for name in ("encode", "wire", "mix", "wait")},
        "rest_ms": mean - compute - exposed,
        "is_hidden": split.is_hidden,
        "bytes_per_step": (after.bytes_sent - counters.bytes_sent) / num_steps,
        "cpu_ms": 1e3 * (after.cpu_seconds - counters.cpu_seconds) / num_steps,
        "first_round_s": warm[0] - trial.compute_seconds,
    }

"""Measure the links and the step of a job, and print what each method would cost: `python -m gossip_modules.doctor`.

    torchrun --nproc-per-node 8 -m gossip_modules.doctor --model mine:make
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint node0:29500 --rdzv-backend c10d \\
        -m gossip_modules.doctor --parameters 25e6 --compute 0.25
    torchrun --nproc-per-node 8 -m gossip_modules.doctor --model mine:make --json > doctor.json

`mine:make` is a function in the file mine.py. It returns the model and a function without arguments that takes one
training step of it: forward, backward and optimizer step, without communication. With --parameters, --compute gives
the seconds of a step; without --compute a stand-in of linear layers is timed, on a batch of 32.

Hosts are grouped into regions by their round trips, or as --regions 0-3,4-7 says. With several regions, the doctor also
measures the line between them, and predicts gradients averaged inside a region with a method between regions.

Ranks measure round trip and bandwidth in pairs, the speed of their memory, and the step, all at once as in training.
Then rank 0 plans with these numbers as `python -m gossip_modules.lab` does: small models on drawn digits take the steps
to the target, and seconds and bytes are of your model on your links.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .devices import wait_for_queue
from .graph_manager.matchings import Edge, decompose
from .lab.__main__ import CommandParser, whole
from .lab.clock import TCP_SHARE, Compute, LinkSpec, Network
from .lab.comparison import show
from .lab.levels import SAME, LevelPrediction, advise_levels, as_level_table, predict_levels
from .lab.plan import LabPlan, Setting
from .lab.planner import Advice, Prediction, advise, as_table, code_advice, simulate
from .lab.tasks import Digits
from .matcha.link_times import measure_link_times, median_exchange, seconds_of_links
from .regions import FoundRegions, Regions, find_regions
from .registry import METHODS
from .transport.agreement import rows_of_all
from .transport.base import Transport
from .transport.connect import connect
from .transport.deadline import as_timeout
from .transport.process_group import ProcessGroupTransport

_CPU = torch.device("cpu")
_MAX_COMPLETE = 8  # ranks; of more, each one measures the links to ranks at distances 1, 2, 4, ...
_NUM_PINGS, _NUM_EXCHANGES = 10, 3
_PROBE_BYTES, _MAX_BYTES = 1 << 16, 1 << 24
_EXCHANGE_SECONDS = 0.1  # that one exchange of the measured size should take, at least
_NUM_ROUND_TRIPS = 10  # that it should take, until TCP has found the rate of the link
_LARGER, _SHARED_SHARE = 8, 0.75  # the next size; the share of their rates that pairs on one line have together
_PAUSE_SECONDS = 1.0  # before a measured average, as of the steps between two averages
_COPY_BYTES, _NUM_COPIES = 1 << 26, 5
_NUM_WARM, _MIN_STEPS, _STEPS_SECONDS = 2, 5, 5.0
_QUANTILES = 9  # of the durations of the steps of a rank
_NAME_BYTES = 64
_PLACES = ("inside hosts", "between hosts", "between regions")
_HEAD_START = 5.0  # seconds for rank 0 to print, which may import more slowly
_FIRST = (
    *("ar", "ar+float16", "osgp", "osgp+bfloat16", "osgp+int8"),
    *("localsgd", "sgp", "sgp+bfloat16", "powergossip", "adpsgd"),
)
"""The methods that are predicted first, since time may end: those that `advise` prefers, and those of the README. In 16
bits: gossip, and AllReduce by the hook of DistributedDataParallel; in 8: Overlap SGP."""
_STAND_IN_BATCH, _STAND_IN_WIDTH = 32, 1024


class Workload(NamedTuple):
    """The model whose training is planned.

    num_bytes: the size of its parameters.
    device: the device of its parameters.
    step: takes one training step; None: `seconds` are given.
    seconds: the duration of a step; None: not given.
    name: in words.
    """

    num_bytes: int
    device: torch.device
    step: Callable[[], object] | None
    seconds: float | None
    name: str


class Border(NamedTuple):
    """The links between two regions, in bits of payload per second and direction.

    alone: the rate of one pair of ranks while no other pair sends.
    together: the sum of the rates of `num_pairs` pairs that send at once.
    num_pairs: as many pairs as the smaller region has ranks.
    until_last: the bits of these pairs, by the time until the last one has ended.
    """

    alone: float
    together: float
    num_pairs: int
    until_last: float

    @property
    def is_shared(self) -> bool:
        """Whether pairs hinder each other, as on one line between two sites."""
        return self.together < _SHARED_SHARE * self.num_pairs * self.alone


@dataclass(frozen=True)
class Measurements:
    """The measurements of all ranks, equal on every rank.

    Attributes:
        hosts: the host of each rank.
        round_trips: seconds from sending a byte until a byte is back, by pair of ranks.
        rates: bits of payload per second in each direction, while both directions are busy, by pair of ranks.
        steps: quantiles of the seconds of a training step of each rank, ascending.
        memory_byte_s: bytes that the slowest rank reads or writes per second while all ranks copy.
        declared: the regions of the user; None: they are found from round trips.
        borders: the links between two regions, by their numbers, ascending.
        average_bytes, average_seconds: of an average over all ranks after a pause, with several regions; else 0.
    """

    hosts: tuple[str, ...]
    round_trips: Mapping[Edge, float]
    rates: Mapping[Edge, float]
    steps: tuple[tuple[float, ...], ...]
    memory_byte_s: float
    declared: Regions | None = None
    borders: Mapping[Edge, Border] = field(default_factory=dict)
    average_bytes: int = 0
    average_seconds: float = 0.0

    @cached_property
    def found(self) -> FoundRegions:
        """The regions, and the round trips that separate them."""
        if self.declared is None:
            return find_regions(self.round_trips, self.hosts)
        trips: tuple[list[float], list[float]] = [], []
        for pair, seconds in self.round_trips.items():
            trips[self.declared.separate(*pair)].append(seconds)
        return FoundRegions(self.declared, max(trips[0], default=None), min(trips[1], default=None))

    @property
    def regions(self) -> Regions:
        """The regions that were declared, or found."""
        return self.found.regions

    @property
    def places(self) -> Mapping[str, list[Edge]]:
        """The measured pairs inside hosts, between hosts, and between regions; without empty entries."""
        found: dict[str, list[Edge]] = {}
        for pair in self.rates:
            found.setdefault(self._place(*pair), []).append(pair)
        return {place: found[place] for place in _PLACES if place in found}

    def compute(self) -> Compute:
        """The steps of all ranks, from which steps are drawn at random."""
        return Compute([seconds for steps in self.steps for seconds in steps])

    def network(self) -> Network:
        """The measured links; a pair that was not measured has the median of the pairs inside, or between, hosts."""
        medians = {place: self._link(pairs) for place, pairs in self.places.items()}
        every = self._link(list(self.rates))

        def link(u: int, v: int) -> LinkSpec:
            pair = min(u, v), max(u, v)
            spec = self._link([pair]) if pair in self.rates else medians.get(self._place(u, v), every)
            border = self.borders.get((min(regions[u], regions[v]), max(regions[u], regions[v])))
            return spec if border is None else spec._replace(rate_bit_s=border.alone / TCP_SHARE)

        ranks, regions = range(len(self.hosts)), [self.regions.of_rank(rank) for rank in range(len(self.hosts))]
        rows = [[link(u, v) for v in ranks] for u in ranks]
        line = min((border.until_last for border in self.borders.values() if border.is_shared), default=math.inf)
        lines = tuple(regions) if self.borders else ()
        shares = (1,) * len(ranks)
        network = Network(rows, shares, memory_byte_s=self.memory_byte_s, lines=lines, line_bit_s=line / TCP_SHARE)
        start = self.average_seconds - network.on(np.arange(len(ranks))).all_reduce_seconds(self.average_bytes)
        return replace(network, average_start_s=max(start, 0.0))

    def _place(self, u: int, v: int) -> str:
        if self.regions.separate(u, v):
            return "between regions"
        return "inside hosts" if self.hosts[u] == self.hosts[v] else "between hosts"

    def _link(self, pairs: Sequence[Edge]) -> LinkSpec:
        rate = statistics.median(self.rates[pair] for pair in pairs)
        return LinkSpec(rate / TCP_SHARE, statistics.median(self.round_trips[pair] for pair in pairs) / 2)


# Measurements.


def measure(
    transport: ProcessGroupTransport, work: Workload, *, host: str, declared: Regions | None = None
) -> Measurements:
    """Measure; collective.

    Args:
        transport: over all ranks.
        work: the model of this rank.
        host: a name that the ranks of one host have in common.
        declared: the regions of the user, equal on all ranks; None: they are found.

    Raises:
        ValueError: the regions are of another number of ranks, or models of ranks have different sizes.
        TimeoutError, ConnectionError: a rank is late or gone; the error names it.
    """
    n = transport.world_size
    if declared is not None and declared.num_ranks != n:
        raise ValueError(f"got --regions {declared} of {declared.num_ranks} ranks, expected the {n} ranks of this job")
    padded = host.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    names = rows_of_all(transport, torch.frombuffer(bytearray(padded), dtype=torch.uint8), what="hosts")
    hosts = tuple(bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in names)
    size = torch.tensor([work.num_bytes], device="cpu")
    sizes = rows_of_all(transport, size, what="sizes of models").flatten().tolist()
    if others := [rank for rank, size in enumerate(sizes) if size != sizes[0]]:
        raise ValueError(
            f"got a model of {sizes[0]} bytes on rank 0 and of {sizes[others[0]]} on rank {others[0]}, expected one "
            "model on all ranks; make it without regard to the rank"
        )
    round_trips, rates, probe_bytes = _measure_links(transport, work) if n > 1 else ({}, {}, 0)
    regions = Measurements(hosts, round_trips, rates, (), 0.0, declared).regions
    borders = _measure_borders(transport, work, regions, probe_bytes) if len(regions.members) > 1 else {}
    average = (probe_bytes, _average_seconds(transport, work, probe_bytes)) if borders else (0, 0.0)
    transport.barrier(what="start of the measurement of memory")
    speed = torch.tensor([_memory_byte_s(work)], dtype=torch.float64, device="cpu")
    memory = float(rows_of_all(transport, speed, what="speeds of memory").min())
    transport.barrier(what="start of the measured steps")
    own = torch.tensor(_step_quantiles(work), dtype=torch.float64, device="cpu")
    steps = tuple(map(tuple, rows_of_all(transport, own, what="seconds of steps").tolist()))
    return Measurements(hosts, round_trips, rates, steps, memory, declared, borders, *average)


def _measure_links(transport: Transport, work: Workload) -> tuple[dict[Edge, float], dict[Edge, float], int]:
    """Round trips, rates, and the bytes of the exchanges that gave the rates."""
    n = transport.world_size
    offsets = range(1, n) if n <= _MAX_COMPLETE else [1 << k for k in range(n.bit_length() - 1)]
    graph = nx.circulant_graph(n, offsets)
    buffer = torch.zeros(1, dtype=torch.uint8, device=work.device)

    def round_trip(peer: int) -> float:
        seconds = [_ping_seconds(transport, peer, buffer, tag=2 * i) for i in range(_NUM_PINGS + 1)]
        return statistics.median(seconds[1:])

    round_trips = seconds_of_links(transport, decompose(graph), round_trip, what="the measurement of round trips")
    size, seconds = _PROBE_BYTES // _LARGER, dict.fromkeys(round_trips, 0.0)

    def is_short() -> bool:
        return any(seconds[pair] < max(_EXCHANGE_SECONDS, _NUM_ROUND_TRIPS * round_trips[pair]) for pair in seconds)

    # Equal on all ranks, as the results are. A size that is too small for the fastest link may be long on the slowest.
    while is_short() and size < _MAX_BYTES and max(seconds.values()) < _LARGER * _EXCHANGE_SECONDS:
        size = min(size * _LARGER, _MAX_BYTES)
        seconds = measure_link_times(graph, transport, num_bytes=size, num_repeats=_NUM_EXCHANGES, device=work.device)
    rates = {pair: 8 * size / max(seconds[pair] - round_trips[pair] / 2, seconds[pair] / 2) for pair in seconds}
    return round_trips, rates, size


def _measure_borders(transport: Transport, work: Workload, regions: Regions, size: int) -> dict[Edge, Border]:
    """Exchange `size` bytes between one pair of ranks of two regions, and between several at once."""

    exchange = median_exchange(transport, num_bytes=size, num_repeats=_NUM_EXCHANGES, device=work.device)

    def seconds(pairs: Sequence[Edge]) -> list[float]:
        matching = tuple(sorted(pairs))
        return [*seconds_of_links(transport, [matching], exchange, what="the line between regions").values()]

    borders = {}
    for (i, a), (j, b) in itertools.combinations(enumerate(regions.members), 2):
        pairs = [(min(pair), max(pair)) for pair in zip(a, b)]
        (alone,), own = seconds(pairs[:1]), seconds(pairs)
        until_last = 8 * size * len(pairs) / max(own)
        borders[i, j] = Border(8 * size / alone, sum(8 * size / each for each in own), len(pairs), until_last)
    return borders


def _average_seconds(transport: ProcessGroupTransport, work: Workload, num_bytes: int) -> float:
    """The median time of a sum of `num_bytes` over all ranks after a pause, equal on all ranks; collective."""
    x = torch.zeros(num_bytes // 4, dtype=torch.float32, device=work.device)
    seconds = []
    for _ in range(_NUM_EXCHANGES):
        time.sleep(_PAUSE_SECONDS)
        transport.barrier(what="start of a measured average")
        start = time.perf_counter()
        transport.all_reduce(x, what="a measured average")
        wait_for_queue(work.device)
        seconds.append(time.perf_counter() - start)
    own = torch.tensor([statistics.median(seconds)], dtype=torch.float64, device="cpu")
    return float(rows_of_all(transport, own, what="seconds of averages").max())


def _ping_seconds(transport: Transport, peer: int, buffer: Tensor, *, tag: int) -> float:
    """The lower rank sends first; returns the time until the answer is there, on the other rank 0."""
    start = time.perf_counter()
    for sends, step in ((transport.rank < peer, tag), (transport.rank > peer, tag + 1)):
        messages = ({peer: [buffer]}, {}) if sends else ({}, {peer: [buffer]})
        transport.exchange(*messages, tag=step, what="the measurement of round trips").wait()
        wait_for_queue(buffer.device)
    return time.perf_counter() - start if transport.rank < peer else 0.0


def _memory_byte_s(work: Workload) -> float:
    source = torch.zeros(max(min(work.num_bytes, _COPY_BYTES), 1 << 20), dtype=torch.uint8, device=work.device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_NUM_COPIES + 1):
        start = time.perf_counter()
        target.copy_(source)
        wait_for_queue(work.device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds[1:])  # a copy reads and writes


def _step_quantiles(work: Workload) -> list[float]:
    if work.step is None:
        assert work.seconds is not None, "there is a step, or its duration"
        return [work.seconds] * _QUANTILES
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < _NUM_WARM + _MIN_STEPS or time.perf_counter() - began < _STEPS_SECONDS:
        start = time.perf_counter()
        _called(work.step, f"the training step of {work.name}")
        wait_for_queue(work.device)
        seconds.append(time.perf_counter() - start)
    shares = torch.linspace(0, 1, _QUANTILES, dtype=torch.float64, device=_CPU)
    counted = torch.tensor(seconds[_NUM_WARM:], dtype=torch.float64, device=_CPU)
    return counted.quantile(shares, interpolation="nearest").tolist()


# The model.


class ModelError(RuntimeError):
    """A function of the user has failed; the cause is its own error."""


def _called(function: Callable[[], object], name: str) -> Any:
    """Call a function of the user."""
    try:
        return function()
    except Exception as error:
        raise ModelError(
            f"got {type(error).__name__} from {name} ({error}), expected a model and a step that run alone; correct "
            "the function, see the traceback above"
        ) from error


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError if the options, which are equal on all ranks, describe no model or no methods."""
    model, parameters, compute = options.model, options.parameters, options.compute
    if (model is None) == (parameters is None):
        raise ValueError(
            "got " + ("neither --model nor" if model is None else "--model and") + " --parameters, expected one of "
            "them: --model mine:make, a function that returns the model and its training step, or --parameters 25e6"
        )
    if compute is not None and not 0 < compute < math.inf:
        raise ValueError(f"got --compute {compute}, expected the seconds of a training step, above 0")
    if parameters is not None and parameters < 1:
        raise ValueError(f"got --parameters {parameters}, expected at least 1")
    for text in options.methods or ():
        LabPlan.of(text)
    if options.regions is not None:
        Regions.of(options.regions)


def workload(model: str | None, parameters: int | None, compute: float | None) -> Workload:
    """Return the model that the options describe.

    Raises:
        ValueError: the function of the user does not exist, or returns something else.
        ModelError: the function fails.
    """
    if model is not None:
        return _made(model, compute)
    assert parameters is not None, "`check_options` has looked"
    if compute is None:
        return _stand_in(parameters)
    return Workload(4 * parameters, _CPU, None, compute, f"{parameters / 1e6:g} M parameters, float32")


def _made(text: str, compute: float | None) -> Workload:
    """The model that a function of the user returns."""
    expected = "expected a function module:name that returns (model, step), where step() takes one training step"
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"got --model {text}, {expected}")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"got --model {text} ({error}), {expected}, in a module on Python's path") from error
    if not callable(make):
        raise ValueError(f"got --model {text}, which is {type(make).__name__}, {expected}")
    made = _called(make, f"--model {text}")
    net, step = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(net, nn.Module) or not (callable(step) or (step is None and compute is not None)):
        kinds = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
        raise ValueError(f"got --model {text}, which returns {kinds}, {expected}; or the model and --compute SECONDS")
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(f"got --model {text} without trained parameters, expected some; set requires_grad")
    num_bytes = sum(parameter.nbytes for parameter in trained)
    return Workload(num_bytes, trained[0].device, None if compute is not None else step, compute, text)


def _stand_in(parameters: int) -> Workload:
    """Linear layers of about so many parameters, and a step of SGD."""
    width = min(_STAND_IN_WIDTH, max(math.isqrt(parameters), 1))
    layers = [nn.Linear(width, width, bias=False, device=_CPU) for _ in range(max(round(parameters / width**2), 1))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(_STAND_IN_BATCH, width, device=_CPU)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    name = f"a stand-in for {parameters / 1e6:g} M parameters (linear layers of width {width}; --compute or --model "
    return Workload(4 * parameters, _CPU, step, None, f"{name}replaces its seconds)")


# The plan.


class Forecast(NamedTuple):
    """What each method would cost, and which one to choose; the methods that were left out, and why.

    levels: with several regions, the predictions of methods of one level and of two.
    """

    predictions: Sequence[Prediction] = ()
    advice: Advice | None = None
    left_out: Sequence[str] = ()
    levels: Sequence[LevelPrediction] = ()


def plan(measured: Measurements, work: Workload, methods: Sequence[str], *, seconds: float) -> Forecast:
    """Predict the methods one after the other until the time is over.

    Args:
        measured: the measurements.
        work: the model.
        methods: see `LabPlan.of`.
        seconds: the time in which a prediction may begin.
    """
    n, began = len(measured.hosts), time.monotonic()
    setting = Setting(n, max(work.num_bytes // 4, 1), measured.compute(), measured.network())
    predictions: list[Prediction] = []
    left_out: list[str] = []
    late: list[str] = []
    for text in methods:
        if predictions and time.monotonic() - began > seconds:
            late.append(text)
            continue
        try:
            predictions.append(simulate(LabPlan.of(text), setting, Digits(), show=show))
        except ValueError as error:
            left_out.append(f"{text}: {error}")
    if late:
        left_out.append(f"{', '.join(late)}: no time was left; --seconds gives more")
    levels: list[LevelPrediction] = []
    if len(measured.regions.members) > 1 and predictions:
        try:
            above = predict_levels(setting, measured.regions, show=show)
            levels = [*(LevelPrediction(SAME, prediction) for prediction in predictions), *above]
        except ValueError as error:
            left_out.append(f"two levels: {error}")
    show("")
    if not predictions:
        return Forecast(left_out=left_out)
    if levels:
        chosen, sentences = advise_levels(levels)
        advice = Advice(chosen and chosen.prediction, sentences)
    else:
        advice = advise(predictions, setting)
    advice = replace(advice, sentences=(*advice.sentences, code_advice(setting)))
    return Forecast(predictions, advice, left_out, levels)


def as_text(measured: Measurements, work: Workload, found: Forecast) -> str:
    """The measurements and the plan, for people."""
    n, num_hosts = len(measured.hosts), len(set(measured.hosts))
    place = f"{n} rank{'s' * (n > 1)} on {num_hosts} host{'s' * (num_hosts > 1)}"
    lines = [f"{place}; model: {work.name}, {work.num_bytes / 1e6:.4g} MB on {work.device}"]
    lines += ["", f"{'links':<14} {'pairs':>5} {'round trip, ms':>15} {'Gbit/s':>8}   slowest"]
    for place, pairs in measured.places.items():
        trip = 1e3 * statistics.median(measured.round_trips[pair] for pair in pairs)
        rate = statistics.median(measured.rates[pair] for pair in pairs) / 1e9
        slowest = min(pairs, key=lambda pair: measured.rates[pair])
        end = f"{measured.rates[slowest] / 1e9:.3g} Gbit/s, ranks {slowest[0]} and {slowest[1]}"
        lines.append(f"{place:<15} {len(pairs):>4} {trip:>15.3g} {rate:>8.3g}   {end}")
    lines += ["", *_region_lines(measured)] if n > 1 else []
    medians = [statistics.median(steps) for steps in measured.steps]
    longest = max(range(n), key=medians.__getitem__)
    lines += [
        "",
        f"step without communication: {1e3 * statistics.median(medians):.4g} ms; rank {longest} takes "
        f"{1e3 * medians[longest]:.4g}, and its longest {1e3 * max(measured.steps[longest]):.4g}",
        f"memory: {measured.memory_byte_s / 1e9:.3g} GB/s read or written by each rank while all do",
        "",
    ]
    if n == 1:
        alone = "One process has no links to measure, and nothing to plan. Start several processes with torchrun."
        return "\n".join([lines[0], *lines[-3:], alone])
    table = as_level_table(found.levels) if found.levels else as_table(found.predictions)
    lines += [table, ""] if found.predictions else []
    lines += [] if found.advice is None else [*found.advice.sentences]
    lines += [
        "Small models on drawn digits have taken these steps, which compare methods and do not predict your training. "
        "Seconds per step and bytes are of your model on these links.",
        *(f"Left out: {text}" for text in found.left_out),
    ]
    return "\n".join(lines)


def _region_lines(measured: Measurements) -> list[str]:
    """The regions, the round trips that separate them, and the lines between them."""
    found, members = measured.found, measured.regions.members
    if len(members) == 1:
        return ["one region: no gap in the round trips of hosts; --regions declares others"] * (found.between is None)
    trips = f"; round trips of {1e3 * found.between:.3g} ms and more between them" if found.between else ""
    trips += f", of {1e3 * found.inside:.3g} ms at most inside" if found.inside else ""
    how = "found, --regions declares others" if measured.declared is None else "declared"
    lines = [f"regions ({how}): ranks {str(found.regions).replace(',', ' | ')}{trips}"]
    for (i, j), border in measured.borders.items():
        alone, together = border.alone / 1e9, (border.until_last if border.is_shared else border.together) / 1e9
        if border.num_pairs > 1:
            shared = "they share a line" if border.is_shared else "they do not hinder each other"
            end = f"{border.num_pairs} pairs at once {together:.3g} in all: {shared}"
        else:
            end = "the only pair"
        lines.append(f"regions {i} and {j}: one pair alone has {alone:.3g} Gbit/s, {end}")
    return lines


def as_json(measured: Measurements, work: Workload, found: Forecast) -> str:
    """The measurements and the plan, as one JSON object."""
    pairs = [
        {"ranks": list(pair), "round_trip_s": measured.round_trips[pair], "bit_s": measured.rates[pair]}
        for pair in measured.rates
    ]
    methods = [
        {
            "method": prediction.plan.label,
            "graph": str(prediction.plan.graph),
            "steps": prediction.num_steps,
            "step_s": prediction.step_seconds,
            "seconds_to_target": prediction.seconds if prediction.has_reached else None,
            "bytes_per_rank": prediction.rank_bytes,
            "waiting_share": prediction.waiting_share,
            "agrees": prediction.has_agreed,
        }
        for prediction in found.predictions
    ]
    advice = found.advice or Advice(None, ())
    levels = [
        {
            "inside": level.inside,
            "between": level.prediction.plan.text,
            "graph": str(level.prediction.plan.graph),
            "steps": level.prediction.num_steps,
            "step_s": level.prediction.step_seconds,
            "seconds_to_target": level.prediction.seconds if level.prediction.has_reached else None,
            "bytes_between": None if math.isnan(level.line_bytes) else level.line_bytes,
            "agrees": level.prediction.has_agreed,
            "is_chosen": level.prediction is advice.best,
        }
        for level in found.levels
    ]
    borders = [{"regions": list(pair), **border._asdict()} for pair, border in measured.borders.items()]
    return json.dumps(
        {
            "world_size": len(measured.hosts),
            "hosts": measured.hosts,
            "model": work.name,
            "model_bytes": work.num_bytes,
            "device": str(work.device),
            "links": pairs,
            "step_s": measured.steps,
            "memory_byte_s": measured.memory_byte_s,
            "regions": measured.regions.members,
            "round_trip_inside_s": measured.found.inside,
            "round_trip_between_s": measured.found.between,
            "borders": borders,
            "methods": methods,
            "levels": levels,
            "best": None if advice.best is None else advice.best.plan.label,
            "advice": advice.sentences,
            "left_out": found.left_out,
        }
    )


# The command.


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all options."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = CommandParser(prog="python -m gossip_modules.doctor", description=__doc__, formatter_class=shape)
    add = parser.add_argument
    add("--model", metavar="MODULE:FUNCTION", help="returns (model, step); step() takes one training step")
    add("--parameters", type=whole, help="float32 parameters, in place of --model")
    add(
        "--compute", type=float, metavar="SECONDS", help="the duration of a training step, in place of the measured one"
    )
    add("--regions", metavar="RANKS", help="ranks of each region, as 0-3,4-7 (default: found from round trips)")
    add("--methods", nargs="+", metavar="METHOD", help=f"methods to compare, of {', '.join(METHODS)} (default: all)")
    add("--seconds", type=float, default=25.0, help="the time in which predictions may begin (default 25)")
    add("--comm-device", metavar="DEVICE", help="cpu: send from host memory, as comm_device='cpu' of a wrapper does")
    add("--timeout", type=float, default=60.0, help="the longest wait for another rank, in seconds (default 60)")
    add("--json", action="store_true", help="one JSON object in place of the tables")
    return parser


def _run(options: argparse.Namespace, timeout: timedelta) -> str:
    """Measure; returns the text of rank 0, and nothing on other ranks."""
    host = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}".strip()
    given = options.model, options.parameters, options.compute
    if "RANK" not in os.environ:
        work = workload(*given)
        measured = Measurements((host,), {}, {}, (tuple(_step_quantiles(work)),), _memory_byte_s(work))
        return (as_json if options.json else as_text)(measured, work, Forecast())
    # Before the model is made, so that errors name a rank that makes its model slowly, or fails.
    dist.init_process_group(None if torch.accelerator.is_available() else "gloo", timeout=timeout)
    try:
        work = workload(*given)
        transport = connect(module_device=work.device, comm_device=options.comm_device, timeout=timeout)
        try:
            declared = None if options.regions is None else Regions.of(options.regions)
            measured = measure(transport, work, host=host, declared=declared)
        finally:
            transport.close()
    finally:
        dist.destroy_process_group()
    if os.environ["RANK"] != "0":
        return ""
    found = Forecast()
    if len(measured.hosts) > 1:
        every = dict.fromkeys([*_FIRST, *METHODS])
        found = plan(measured, work, options.methods or list(every), seconds=options.seconds)
    return (as_json if options.json else as_text)(measured, work, found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the measurements and the plan on rank 0; returns the exit code: 2 for bad options, 1 if a rank failed."""
    rank = os.environ.get("RANK")
    try:
        options = make_parser().parse_args(arguments)
        timeout = as_timeout(options.timeout, name="--timeout")
        check_options(options)
    except ValueError as error:
        if rank in (None, "0"):  # options are equal on all ranks
            print(f"error: {error}", file=sys.stderr)
        else:  # torchrun ends all ranks when the first one has failed
            time.sleep(_HEAD_START)
        return 2
    try:
        text = _run(options, timeout)
    except (ValueError, RuntimeError, OSError) as error:  # TimeoutError and ConnectionError of other ranks too
        if isinstance(error, ModelError):
            traceback.print_exception(error.__cause__)
        print(f"error{'' if rank is None else f' of rank {rank}'}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if text:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

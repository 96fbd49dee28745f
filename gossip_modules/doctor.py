"""Measure the links and the step of a job, and print what each method would cost: `python -m gossip_modules.doctor`.

    torchrun --nproc-per-node 8 -m gossip_modules.doctor --model mine:make
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint node0:29500 --rdzv-backend c10d \\
        -m gossip_modules.doctor --parameters 25e6 --compute 0.25
    torchrun --nproc-per-node 8 -m gossip_modules.doctor --model mine:make --json > doctor.json

`mine:make` is a function in the file mine.py. It returns the model and a function without arguments that takes one
training step of it: forward, backward and optimizer step, without communication. With --parameters, --compute gives
the seconds of a step; without --compute a stand-in of linear layers is timed, on a batch of 32.

Ranks measure round trip and bandwidth in pairs, the speed of their memory, and the step, all at once as in training.
Then rank 0 plans with these numbers as `python -m gossip_modules.lab` does: small models on drawn digits take the steps
to the target, and seconds and bytes are of your model on your links.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import networkx as nx
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .devices import wait_for_queue
from .graph_manager.matchings import Edge, decompose
from .lab.__main__ import CommandParser, whole
from .lab.clock import TCP_SHARE, Compute, LinkSpec, Network
from .lab.comparison import show
from .lab.plan import LabPlan, Setting
from .lab.planner import Advice, Prediction, advise, as_table, simulate
from .lab.tasks import Digits
from .matcha.link_times import measure_link_times, seconds_of_links
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
_EXCHANGE_SECONDS = 0.1  # that one exchange of the measured size should take
_COPY_BYTES, _NUM_COPIES = 1 << 26, 5
_NUM_WARM, _MIN_STEPS, _STEPS_SECONDS = 2, 5, 5.0
_QUANTILES = 9  # of the durations of the steps of a rank
_NAME_BYTES = 64
_HEAD_START = 5.0  # seconds for rank 0 to print, which may import more slowly
_FIRST = ("ar", "osgp", "localsgd", "sgp", "powergossip", "adpsgd")
"""The methods that are predicted first, since time may end: those that `advise` prefers, and those of the README."""
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


@dataclass(frozen=True)
class Measurements:
    """The measurements of all ranks, equal on every rank.

    Attributes:
        hosts: the host of each rank.
        round_trips: seconds from sending a byte until a byte is back, by pair of ranks.
        rates: bits of payload per second in each direction, while both directions are busy, by pair of ranks.
        steps: quantiles of the seconds of a training step of each rank, ascending.
        memory_byte_s: bytes that the slowest rank reads or writes per second while all ranks copy.
    """

    hosts: tuple[str, ...]
    round_trips: Mapping[Edge, float]
    rates: Mapping[Edge, float]
    steps: tuple[tuple[float, ...], ...]
    memory_byte_s: float

    @property
    def places(self) -> Mapping[str, list[Edge]]:
        """The measured pairs inside hosts, and between hosts; without empty entries."""
        found: dict[str, list[Edge]] = {}
        for pair in self.rates:
            found.setdefault(self._place(*pair), []).append(pair)
        return dict(sorted(found.items(), reverse=True))

    def compute(self) -> Compute:
        """The steps of all ranks, from which steps are drawn at random."""
        return Compute([seconds for steps in self.steps for seconds in steps])

    def network(self) -> Network:
        """The measured links; a pair that was not measured has the median of the pairs inside, or between, hosts."""
        medians = {place: self._link(pairs) for place, pairs in self.places.items()}
        every = self._link(list(self.rates))

        def link(u: int, v: int) -> LinkSpec:
            pair = min(u, v), max(u, v)
            return self._link([pair]) if pair in self.rates else medians.get(self._place(u, v), every)

        ranks = range(len(self.hosts))
        rows = [[link(u, v) for v in ranks] for u in ranks]
        return Network(rows, (1,) * len(ranks), memory_byte_s=self.memory_byte_s)

    def _place(self, u: int, v: int) -> str:
        return "inside hosts" if self.hosts[u] == self.hosts[v] else "between hosts"

    def _link(self, pairs: Sequence[Edge]) -> LinkSpec:
        rate = statistics.median(self.rates[pair] for pair in pairs)
        return LinkSpec(rate / TCP_SHARE, statistics.median(self.round_trips[pair] for pair in pairs) / 2)


# Measurements.


def measure(transport: ProcessGroupTransport, work: Workload, *, host: str) -> Measurements:
    """Measure; collective.

    Args:
        transport: over all ranks.
        work: the model of this rank.
        host: a name that the ranks of one host have in common.

    Raises:
        ValueError: models of ranks have different sizes.
        TimeoutError, ConnectionError: a rank is late or gone; the error names it.
    """
    n = transport.world_size
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
    round_trips, rates = _measure_links(transport, work) if n > 1 else ({}, {})
    transport.barrier(what="start of the measurement of memory")
    speed = torch.tensor([_memory_byte_s(work)], dtype=torch.float64, device="cpu")
    memory = float(rows_of_all(transport, speed, what="speeds of memory").min())
    transport.barrier(what="start of the measured steps")
    own = torch.tensor(_step_quantiles(work), dtype=torch.float64, device="cpu")
    steps = tuple(map(tuple, rows_of_all(transport, own, what="seconds of steps").tolist()))
    return Measurements(hosts, round_trips, rates, steps, memory)


def _measure_links(transport: Transport, work: Workload) -> tuple[dict[Edge, float], dict[Edge, float]]:
    n = transport.world_size
    offsets = range(1, n) if n <= _MAX_COMPLETE else [1 << k for k in range(n.bit_length() - 1)]
    graph = nx.circulant_graph(n, offsets)
    buffer = torch.zeros(1, dtype=torch.uint8, device=work.device)

    def round_trip(peer: int) -> float:
        seconds = [_ping_seconds(transport, peer, buffer, tag=2 * i) for i in range(_NUM_PINGS + 1)]
        return statistics.median(seconds[1:])

    round_trips = seconds_of_links(transport, decompose(graph), round_trip, what="the measurement of round trips")
    device, repeats = work.device, _NUM_EXCHANGES
    probes = measure_link_times(graph, transport, num_bytes=_PROBE_BYTES, num_repeats=repeats, device=device)
    # Equal on all ranks, as the results are.
    bytes_per_second = _PROBE_BYTES / max(probes.values())
    size = int(min(max(_EXCHANGE_SECONDS * bytes_per_second, _PROBE_BYTES), _MAX_BYTES))
    seconds = measure_link_times(graph, transport, num_bytes=size, num_repeats=repeats, device=device)
    rates = {pair: 8 * size / max(seconds[pair] - round_trips[pair] / 2, seconds[pair] / 2) for pair in seconds}
    return round_trips, rates


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
    """What each method would cost, and which one to choose; the methods that were left out, and why."""

    predictions: Sequence[Prediction] = ()
    advice: Advice | None = None
    left_out: Sequence[str] = ()


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
    show("")
    return Forecast(predictions, advise(predictions, setting) if predictions else None, left_out)


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
        lines.append(f"{place:<14} {len(pairs):>5} {trip:>15.3g} {rate:>8.3g}   {end}")
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
    lines += [as_table(found.predictions), ""] if found.predictions else []
    lines += [] if found.advice is None else [*found.advice.sentences]
    lines += [
        "Small models on drawn digits have taken these steps, which compare methods and do not predict your training. "
        "Seconds per step and bytes are of your model on these links.",
        *(f"Left out: {text}" for text in found.left_out),
    ]
    return "\n".join(lines)


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
            "methods": methods,
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
            measured = measure(transport, work, host=host)
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

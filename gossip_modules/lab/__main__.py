r"""The method and the graph to train with, for so many workers on such links: predicted by training
small models of all of them at once.

    python -m gossip_modules.lab --world-size 1024 --parameters 25e6 --compute 0.25 \
        --network "1 Gbit/s"
    python -m gossip_modules.lab --world-size 64 --methods osgp dpsgd:torus choco:ring:topk \
        --compute "Compute(0.25, straggle_share=0.02)"
    python -m gossip_modules.lab --world-size 256 --problem "Consensus()" --target 1e-6 \
        --methods sgp dpsgd:ring "DiLoCo(sync_every=50)"
    python -m gossip_modules.lab --world-size 16 --network "100 Mbit/s, 20 ms" --tune
    python -m gossip_modules.lab --world-size 8 --parameters 124e6 --network "1 Gbit/s, 20 ms" \
        --mailbox s3

Prints a table, the fastest first, and which to choose and why. Steps are those that n small
models really take on a small problem (Digits: softmax regression on drawn digits; Consensus:
vectors that agree on their mean; Quadratics: quadratic losses of workers, whose common optimum
is known). Seconds and bytes are predicted for your model, by a model of compute and links. So
steps say how much a method's way of averaging costs beside others, not how long your own
training lasts. Options that take the text of Python are read and never evaluated. With --tune
each method has the graph, the steps between rounds and the outer rates that serve it best on
this problem; the table names them. With --mailbox no model is trained: the table has the seconds
and dollars of rounds over a bucket, with --network as the link of a worker to it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ..methods.chosen import SCHEDULES
from ..methods.written import read
from ..registry import METHODS
from ..schedule import Schedule
from .clock import Compute, Network
from .comparison import show
from .mailbox_costs import mailbox_costs
from .plan import LabPlan, Setting, check
from .planner import MAX_STEPS, advise, as_table, simulate, tune
from .tasks import PROBLEMS, Digits

MAX_WORKERS = 4096
NETWORKS: Mapping[str, Callable[..., Any]] = {"Network": Network, "regions": Network.regions}


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def whole(text: str) -> int:
    """Return a whole number, which may be written as 25e6."""
    value = float(text)
    check("number", text, value % 1 == 0, "a whole number; change it")
    return int(value)


def text_of(names: Mapping[str, Callable[..., Any]], plain: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader of an option that takes the text of Python, or plain text without brackets."""

    def value(text: str) -> Any:
        try:
            return read(text, names, option="text") if "(" in text else plain(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(" ".join(str(error).split())) from error

    return value


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all options."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = CommandParser(prog="python -m gossip_modules.lab", description=__doc__, formatter_class=shape)
    add = parser.add_argument
    add("--world-size", type=whole, required=True, help=f"workers, at most {MAX_WORKERS}")
    add("--parameters", type=whole, default=25_000_000, help="of your model, float32 (default 25e6)")
    compute = text_of({"Compute": Compute}, lambda text: Compute(float(text)))
    add("--compute", type=compute, default=Compute(0.25), help="seconds of a step, or a Compute(...) (default 0.25)")
    help_ = "rate and latency, Network(...), or regions({'eu': 8, 'us': 8}, inside=..., between=...) (default 1 Gbit/s)"
    add("--network", type=text_of(NETWORKS, Network), default=Network("1 Gbit/s"), help=help_)
    shape_ = (
        "<method>[:<graph>[:<code>]] or <algorithm>[:<graph>], then +bfloat16, +float16 or +int8 for short messages"
    )
    help_ = f"{shape_}; methods: {', '.join(METHODS)} (default: all)"
    add("--methods", nargs="+", metavar="METHOD", help=help_)
    add("--peers", type=whole, help="peers per round (default: one, on graphs that never change all)")
    schedule = text_of(SCHEDULES, lambda text: Schedule(int(text)))
    add("--schedule", type=schedule, default=Schedule(), help="a number of steps between rounds, or Schedule(...)")
    problem = text_of(PROBLEMS, lambda text: read(text, PROBLEMS, option="problem"))
    add("--problem", type=problem, help="Digits(...), Consensus(...) or Quadratics(...) (default Digits)")
    add("--target", type=float, help="of the error (default: the problem's own)")
    add("--max-steps", type=whole, default=MAX_STEPS, help=f"to give up after (default {MAX_STEPS})")
    add("--seed", type=whole, default=0, help="of data and methods (default 0)")
    help_ = "look for the graph, steps between rounds and outer rates with which each method is fastest"
    add("--tune", action="store_true", help=help_)
    add("--mailbox", metavar="STORE", help="the costs of rounds over s3, gs, az, file or store, or an address")
    add("--sync-every", type=whole, help="with --mailbox: steps between two rounds")
    add("--max-waiting", type=float, default=0.05, help="with --mailbox: the share of waiting to keep (default 0.05)")
    add("--import", dest="modules", action="append", default=[], metavar="MODULE", help="registers methods")
    return parser


def _run(arguments: Sequence[str] | None) -> str:
    """Return the table and the advice."""
    options = make_parser().parse_args(arguments)
    for module in options.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"got --import {module} ({error}), expected a module on Python's path") from error
    n, texts = options.world_size, options.methods or list(METHODS)
    check("world_size", n, n <= MAX_WORKERS, f"at most {MAX_WORKERS}; take fewer, as methods compare alike")
    setting = Setting(n, options.parameters, options.compute, options.network, seed=options.seed)
    if options.mailbox:
        return mailbox_costs(setting, options.mailbox, max_waiting=options.max_waiting, sync_every=options.sync_every)
    problem = options.problem or Digits(seed=options.seed)
    target = problem.target if options.target is None else options.target
    plans = [LabPlan.of(text, schedule=options.schedule, peers_per_itr=options.peers) for text in texts]
    resolved = [plan.resolved(n) for plan in plans]
    if twice := [text for text, plan in zip(texts, resolved) if resolved.count(plan) > 1]:
        raise ValueError(f"got methods {' and '.join(twice)}, which are the same, expected each once; leave one out")
    predictions, left_out = [], []
    for plan in plans:
        try:
            predict = tune if options.tune else simulate
            predictions.append(predict(plan, setting, problem, target=target, max_steps=options.max_steps, show=show))
        except ValueError as error:
            if options.methods:
                raise
            left_out.append(f"Left out: {error}")  # of all methods some do not fit, which the user did not name
    show("")
    advice = advise(predictions, setting)
    heading = f"{n} workers, {options.parameters / 1e6:g} M parameters; {problem.error_name} to {target:g}"
    return "\n".join([heading, "", as_table(predictions), "", *advice.sentences, *left_out])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the advice; returns the exit code, 2 for options that cannot be."""
    try:
        print(_run(arguments))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

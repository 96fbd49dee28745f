"""The options of `python -m gossip_modules.simulate`, each with its unit in its name."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..consensus_control import ConsensusControl
from ..registry import METHODS
from ..schedule import Schedule
from .delays import ComputeModel, LinkModel
from .problems import PROBLEMS
from .setting import ControlRates, Setting

MAX_WORKERS = 4096
MAX_STEPS = 320
_TINY, _HUGE = 1e-12, 1e15  # beyond, products and inverses of several numbers may be infinite
_MAX_SPREAD = 5.0  # of logarithms: one worker in six is 150 times slower than the median


@dataclass(frozen=True)
class _Number:
    """A number of the command line, in its unit, in a range; NaN and infinity are in none."""

    least: float
    is_whole: bool = False
    is_above: bool = False
    most: float = _HUGE

    def __call__(self, text: str) -> float:
        kind = "a whole number" if self.is_whole else "a number"
        limit = f", at most {self.most:g}"
        tiny = f" (that is, {_TINY:g} or more)" if self.is_above else ""
        expected = f"{kind} {'above' if self.is_above else 'of at least'} {self.least:g}{tiny}{limit}"
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        is_low = value < max(self.least, _TINY if self.is_above else self.least)
        if math.isnan(value) or is_low or value > self.most or (self.is_whole and value % 1):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}; change it")
        return int(value) if self.is_whole else value


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


_COUNT, _FROM_ZERO, _POSITIVE = _Number(1, is_whole=True), _Number(0), _Number(0, is_above=True)
_SHARE, _FACTOR, _SPREAD = _Number(0, most=1), _Number(1), _Number(0, most=_MAX_SPREAD)


def import_named(arguments: Sequence[str] | None) -> None:
    """Import the modules that `--import` names, which register methods, before the other options are read.

    Raises:
        ValueError: there is no such module.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    for module in parser.parse_known_args(arguments)[0].modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"got --import {module} ({error}), expected a module on Python's path") from error


def make_parser(description: str) -> argparse.ArgumentParser:
    """All options of the command, below this description."""
    parser = _Parser(
        prog="python -m gossip_modules.simulate",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_cluster(parser.add_argument)
    _add_methods(parser.add_argument)
    return parser


def _add_cluster(add: Callable[..., Any]) -> None:
    """Workers, model, compute and links."""
    workers = _Number(1, is_whole=True, most=MAX_WORKERS)
    add("--world-size", type=workers, required=True, help=f"workers, at most {MAX_WORKERS}")
    add("--parameters", type=_COUNT, default=25_000_000, help="of your model, float32 (default 25e6)")
    add("--compute-ms", type=_POSITIVE, default=250.0, help="forward and backward of a step (default 250)")
    add("--overhead-ms", type=_FROM_ZERO, default=0.0, help="the rest of a step: loading, optimizer")
    add("--rate-gbit", type=_POSITIVE, default=1.0, help="line rate of a link, Gbit/s (default 1)")
    add("--latency-ms", type=_FROM_ZERO, default=0.1, help="of a message (default 0.1)")
    add("--memory-gbyte", type=_POSITIVE, default=9.0, help="GB/s of copies and mixing (default 9; GPU: 1000)")
    add("--slow-links", type=_SHARE, default=0.0, help="share of workers with a slow link")
    add("--slow-link-factor", type=_FACTOR, default=10.0, help="how many times slower (default 10)")
    add("--rank-spread", type=_SPREAD, default=0.0, help="log-normal spread of workers' speeds, e.g. 0.1")
    add("--step-spread", type=_SPREAD, default=0.0, help="log-normal spread of steps, e.g. 0.1")
    add("--straggle-share", type=_SHARE, default=0.0, help="share of steps that straggle")
    add("--straggle-factor", type=_FACTOR, default=10.0, help="how many times longer they take (default 10)")
    add("--slow-rank-factor", type=_FACTOR, default=1.0, help="how many times slower worker 0 is")


def _add_methods(add: Callable[..., Any]) -> None:
    """What is compared, on which problem."""
    add("--import", action="append", metavar="MODULE", help="a module that registers methods")
    names = ", ".join(METHODS)
    help_ = f"<method>[:<graph>[:<code>]] of {names}, or <algorithm>[:<graph>] (default: all)"
    add("--methods", nargs="+", metavar="METHOD", help=help_)
    add("--peers", type=_COUNT, help="peers per round (default: one, on graphs that never change all)")
    add("--gossip-every", type=_COUNT, default=1, help="steps from one round to the next (default 1)")
    add("--average-every", type=_Number(0, is_whole=True), default=0, help="rounds to a global average; 0: never")
    add(
        "--local-steps",
        type=_COUNT,
        default=10,
        help="to an average, or an outer step (default 10)",
    )
    add("--step-size", type=_Number(0, is_above=True, most=2), help="of consensus, for codes (default: published)")
    add("--theta", type=_POSITIVE, help="of moniqua (default: the least of 1, 2, 4, ... that serves)")
    add("--budget", type=_Number(0, is_above=True, most=1), default=0.5, help="of matcha (default 0.5)")
    add("--outer-lr", type=_POSITIVE, help="of diloco and the like (default: published)")
    add("--outer-momentum", type=_Number(0, most=0.9999), help="likewise")
    help_ = "look for the graph, steps between rounds and outer rates with which each method is fastest"
    add("--tune", action="store_true", help=help_)
    add("--consensus-target", type=_POSITIVE, help="hold this distance by ConsensusControl, in updates of a step, as 2")
    help_ = "with --consensus-target, where ranks are further apart (default average)"
    add("--consensus-remedy", choices=["average", "rounds"], default="average", help=help_)
    rate = _Number(0, is_above=True, most=1)
    help_ = "share of the steps with a round under control, as measured on your model (default: that of the problem)"
    add("--rounds-per-step", type=rate, help=help_)
    add("--averages-per-step", type=_SHARE, default=0.0, help="likewise of exact averages (default 0)")
    add("--added-rounds-per-step", type=_FROM_ZERO, default=0.0, help="likewise of added rounds of gossip (default 0)")
    add("--problem", choices=list(PROBLEMS), default="digits", help="what workers solve (default digits)")
    add("--label-skew", type=_SHARE, default=0.0, help="share of a worker's digits that are its own (default 0)")
    add("--target", type=_POSITIVE, help="of the error (default: the problem's own)")
    add("--max-steps", type=_COUNT, default=MAX_STEPS, help=f"to give up after (default {MAX_STEPS})")
    add("--seed", type=_Number(0, is_whole=True), default=0, help="of delays, data and methods")


def setting_of(options: argparse.Namespace) -> Setting:
    """What the options say of workers, model, compute and links."""
    compute = ComputeModel(
        seconds=options.compute_ms / 1e3,
        overhead_seconds=options.overhead_ms / 1e3,
        rank_spread=options.rank_spread,
        step_spread=options.step_spread,
        straggle_share=options.straggle_share,
        straggle_factor=options.straggle_factor,
        slow_rank_factor=options.slow_rank_factor,
        seed=options.seed,
    )
    links = LinkModel(
        rate_bit_s=options.rate_gbit * 1e9,
        latency_s=options.latency_ms / 1e3,
        slow_share=options.slow_links,
        slow_factor=options.slow_link_factor,
        memory_byte_s=options.memory_gbyte * 1e9,
        seed=options.seed,
    )
    return Setting(
        options.world_size,
        options.parameters,
        compute,
        links,
        peers_per_itr=options.peers,
        schedule=_schedule_of(options),
        control_rates=_rates_of(options),
        local_steps=options.local_steps,
        step_size=options.step_size,
        theta=options.theta,
        budget=options.budget,
        outer_lr=options.outer_lr,
        outer_momentum=options.outer_momentum,
        seed=options.seed,
    )


def _schedule_of(options: argparse.Namespace) -> Schedule | ConsensusControl:
    """As the training scripts understand the same options."""
    if options.consensus_target is None:
        return Schedule(options.gossip_every, options.average_every)
    return ConsensusControl(
        options.consensus_target,
        remedy=options.consensus_remedy,
        gossip_every=options.gossip_every,
        max_interval=max(ConsensusControl.max_interval, options.gossip_every),
        average_every=options.average_every or ConsensusControl.average_every,
    )


def _rates_of(options: argparse.Namespace) -> ControlRates | None:
    if options.rounds_per_step is None:
        if options.averages_per_step or options.added_rounds_per_step:
            raise ValueError(
                f"got --averages-per-step {options.averages_per_step:g} and --added-rounds-per-step "
                f"{options.added_rounds_per_step:g} without --rounds-per-step, expected it too; give what comm_stats() "
                "says: num_rounds over the steps"
            )
        return None
    return ControlRates(options.rounds_per_step, options.averages_per_step, options.added_rounds_per_step)

"""The options of `python -m gossip_modules.simulate`, each with its unit in its name."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

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
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


_COUNT, _FROM_ZERO, _POSITIVE = _Number(1, is_whole=True), _Number(0), _Number(0, is_above=True)
_SHARE, _FACTOR, _SPREAD = _Number(0, most=1), _Number(1), _Number(0, most=_MAX_SPREAD)
_WHOLE = _Number(0, is_whole=True)
_NUMBERS: Sequence[tuple[str, _Number, float | None, str]] = (
    # Workers, model, compute and links.
    ("--parameters", _COUNT, 25_000_000, "of your model, float32 (default 25e6)"),
    ("--compute-ms", _POSITIVE, 250.0, "forward and backward of a step (default 250)"),
    ("--overhead-ms", _FROM_ZERO, 0.0, "the rest of a step: loading, optimizer"),
    ("--rate-gbit", _POSITIVE, 1.0, "line rate of a link, Gbit/s (default 1)"),
    ("--latency-ms", _FROM_ZERO, 0.1, "of a message (default 0.1)"),
    ("--memory-gbyte", _POSITIVE, 9.0, "GB/s of copies and mixing (default 9; GPU: 1000)"),
    ("--slow-links", _SHARE, 0.0, "share of workers with a slow link"),
    ("--slow-link-factor", _FACTOR, 10.0, "how many times slower (default 10)"),
    ("--rank-spread", _SPREAD, 0.0, "log-normal spread of workers' speeds, e.g. 0.1"),
    ("--step-spread", _SPREAD, 0.0, "log-normal spread of steps, e.g. 0.1"),
    ("--straggle-share", _SHARE, 0.0, "share of steps that straggle"),
    ("--straggle-factor", _FACTOR, 10.0, "how many times longer they take (default 10)"),
    ("--slow-rank-factor", _FACTOR, 1.0, "how many times slower worker 0 is"),
    # Methods.
    ("--peers", _COUNT, None, "peers per round (default: one, on graphs that never change all)"),
    ("--gossip-every", _COUNT, 1, "steps from one round to the next (default 1)"),
    ("--average-every", _WHOLE, 0, "rounds to a global average; 0: never"),
    ("--local-steps", _COUNT, 10, "to an average, or an outer step (default 10)"),
    ("--step-size", _Number(0, is_above=True, most=2), None, "of consensus, for codes (default: published)"),
    ("--theta", _POSITIVE, None, "of moniqua (default: the least of 1, 2, 4, ... that serves)"),
    ("--budget", _Number(0, is_above=True, most=1), 0.5, "of matcha (default 0.5)"),
    ("--outer-lr", _POSITIVE, None, "of diloco and the like (default: published)"),
    ("--outer-momentum", _Number(0, most=0.9999), None, "likewise"),
    ("--consensus-target", _POSITIVE, None, "hold this distance by ConsensusControl, in updates of a step, as 2"),
    (
        "--rounds-per-step",
        _Number(0, is_above=True, most=1),
        None,
        "share of the steps with a round under control, as measured on your model (default: that of the problem)",
    ),
    ("--averages-per-step", _SHARE, 0.0, "likewise of exact averages (default 0)"),
    ("--added-rounds-per-step", _FROM_ZERO, 0.0, "likewise of added rounds of gossip (default 0)"),
    # The problem.
    ("--label-skew", _SHARE, 0.0, "share of a worker's digits that are its own (default 0)"),
    ("--target", _POSITIVE, None, "of the error (default: the problem's own)"),
    ("--max-steps", _COUNT, MAX_STEPS, f"to give up after (default {MAX_STEPS})"),
    ("--seed", _WHOLE, 0, "of delays, data and methods"),
)
"""The options that are numbers: name, range, default and help."""


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
    add = parser.add_argument
    workers = _Number(1, is_whole=True, most=MAX_WORKERS)
    add("--world-size", type=workers, required=True, help=f"workers, at most {MAX_WORKERS}")
    for name, number, default, help_ in _NUMBERS:
        add(name, type=number, default=default, help=help_)
    add("--import", action="append", metavar="MODULE", help="a module that registers methods")
    names = ", ".join(METHODS)
    help_ = f"<method>[:<graph>[:<code>]] of {names}, or <algorithm>[:<graph>] (default: all)"
    add("--methods", nargs="+", metavar="METHOD", help=help_)
    help_ = "look for the graph, steps between rounds and outer rates with which each method is fastest"
    add("--tune", action="store_true", help=help_)
    help_ = "with --consensus-target, where ranks are further apart (default average)"
    add("--consensus-remedy", choices=["average", "rounds"], default="average", help=help_)
    add("--problem", choices=list(PROBLEMS), default="digits", help="what workers solve (default digits)")
    return parser


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

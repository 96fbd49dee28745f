"""Outer optimizers as methods: their entries, what the options say of them, and how they are simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..mixing_manager.graph_weights import default_mixing
from ..outer.anchor import Anchor
from ..outer.diloco import DiLoCo
from ..outer.gasloc import GASLoC
from ..outer.method import OuterMethod
from ..outer.noloco import NoLoCo
from ..outer.slowmo import SlowMo
from ..registry import Method, Paper
from ..schedule import Action, Schedule
from ..simulate.choice import Choice
from ..simulate.clocks import Clock, SyncClock
from ..simulate.gossip import LockstepMethod, Plain, SimulatedMethod
from ..simulate.mixing import SimulatedMixing
from ..simulate.setting import Setting
from .options import MethodOptions
from .simulated import options_of, static, undirected
from .wrapping import undirected_neighbours, wrap_with

MakeOuter: TypeAlias = Callable[[MethodOptions, int], OuterMethod]
"""Makes an outer method, given options and a seed."""


def diloco(options: MethodOptions, seed: int) -> OuterMethod:
    """DiLoCo."""
    return DiLoCo(options.sync_period, **_rates(options))


def slowmo(options: MethodOptions, seed: int) -> OuterMethod:
    """SlowMo over local SGD."""
    return SlowMo(options.sync_period, **_rates(options))


def noloco(options: MethodOptions, seed: int) -> OuterMethod:
    """NoLoCo in random pairs."""
    return NoLoCo(options.sync_period, seed=seed, **_rates(options))


def gasloc(options: MethodOptions, seed: int) -> OuterMethod:
    """GASLoC."""
    return GASLoC(options.sync_period, **_rates(options))


def _rates(options: MethodOptions) -> dict[str, Any]:
    """Those that were set."""
    rates: dict[str, Any] = {"lr": options.outer_lr} if options.outer_lr else {}
    return {**rates, "momentum": options.outer_momentum} if options.outer_momentum >= 0 else rates


class OuterSimulation(LockstepMethod):
    """An outer method itself, on the models of all ranks at once.

    Args:
        outer: the method; without gossip between outer steps.
        mixing: of outer steps; None: exact averages.
        clock: what they take.
    """

    def __init__(self, outer: OuterMethod, mixing: MixingManager | None, clock: Clock) -> None:
        super().__init__(Plain(), None if mixing is None else SimulatedMixing(mixing), Schedule(), clock)
        self.outer = outer
        self._anchor: Anchor | None = None

    def forward(self, x: Tensor) -> None:
        """See `SimulatedMethod`. The outer optimizer works element by element: one does for all ranks."""
        models = FlatVector.over(x)
        if self._anchor is None:
            self._anchor = Anchor(models, self.outer.make_optimizer)
        step = self.clock.step
        if step == 0 or step % self.outer.sync_every:
            self.clock.advance(Action.SKIP, None)
            return
        round_ = None if self.mixing is None else self.mixing.round(self._t)
        self.clock.advance(Action.AVERAGE if round_ is None else Action.GOSSIP, round_)
        self._t += 1
        if self.num_ranks > 1:
            self._count_bytes(round_)
        with torch.no_grad():
            self.outer.start(self._anchor, models.segments)
            sent = self._anchor.sent.segments[0].view(x.shape)
            sent.copy_(sent.mean(0) if round_ is None else round_.mix(sent))
            self.outer.finish(self._anchor)
            self._anchor.write_to(models)


def simulate_outer(make: MakeOuter) -> Callable[[Choice, Setting], SimulatedMethod]:
    """How an outer method is simulated: on the graph that was chosen, on its own, or with exact averages."""

    def simulate(choice: Choice, setting: Setting) -> SimulatedMethod:
        outer = make(options_of(choice, setting), setting.seed)
        own = outer.default_graph(setting.world_size)
        mixing = None
        if own is not None:
            mixing = default_mixing(own, push_sum=False)
        elif not outer.averages_exactly:
            mixing = undirected(choice, setting)
        message = setting.network.plain_message(setting.model_bytes)
        clock = SyncClock(setting.compute, setting.network, message, model_bytes=setting.model_bytes)
        return OuterSimulation(outer, mixing, clock)

    return simulate


OPTIONS = frozenset({"sync_period", "outer_lr", "outer_momentum", "nprocs_per_node"})
"""Those of all outer methods."""
OUTER_METHODS: tuple[Method, ...] = (
    Method(
        "diloco",
        "DiLoCo",
        "trains alone, and takes a Nesterov step along the mean drift of all ranks every few steps",
        DiLoCo,
        make=wrap_with("outer", diloco),
        simulate=simulate_outer(diloco),
        paper=Paper(
            "Douillard et al.",
            "DiLoCo: Distributed Low-Communication Training of Language Models",
            "2023",
            "2311.08105",
        ),
        example="GossipDataParallel(model, outer=DiLoCo())",
        options=OPTIONS,
    ),
    Method(
        "slowmo",
        "SlowMo",
        "puts a slow momentum on the averages of local SGD or gossip",
        SlowMo,
        make=wrap_with("outer", slowmo),
        simulate=simulate_outer(slowmo),
        paper=Paper(
            "Wang, Tantia, Ballas, Rabbat",
            "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
            "ICLR 2020",
            "1910.00643",
        ),
        example="GossipDataParallel(model, outer=SlowMo())",
        options=OPTIONS,
    ),
    Method(
        "noloco",
        "NoLoCo",
        "takes outer steps in random pairs, which pull their anchors together",
        NoLoCo,
        make=wrap_with("outer", noloco),
        simulate=simulate_outer(noloco),
        paper=Paper(
            "Kolehmainen et al.",
            "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
            "2025",
            "2506.10911",
        ),
        example="GossipDataParallel(model, outer=NoLoCo())",
        options=OPTIONS,
    ),
    Method(
        "gasloc",
        "GASLoC",
        "takes outer steps alone, and gossips their result along with the momentum",
        GASLoC,
        make=wrap_with("outer", gasloc, whom=undirected_neighbours),
        simulate=simulate_outer(gasloc),
        paper=Paper(
            "Cagnasso, Belilovsky, Oyallon",
            "Unifying Local Communications and Local Updates for LLM Pretraining",
            "2026",
            "2606.11081",
        ),
        example="GossipDataParallel(model, outer=GASLoC())",
        graph="undirected",
        options=OPTIONS | {"graph"},
        simulated_graph=static,
    ),
)

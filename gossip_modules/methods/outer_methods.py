"""Outer optimizers as methods: their entries, what the options say of them, and how they are simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..mixing_manager.graph_weights import default_mixing
from ..outer.anchor import Anchor
from ..outer.diloco import DiLoCo
from ..outer.eager_diloco import EagerDiLoCo
from ..outer.fragment import Fragment, Range
from ..outer.gasloc import GASLoC
from ..outer.method import OuterMethod
from ..outer.noloco import NoLoCo
from ..outer.slowmo import SlowMo
from ..outer.streaming_diloco import StreamingDiLoCo
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


def streaming_diloco(options: MethodOptions, seed: int) -> OuterMethod:
    """Streaming DiLoCo."""
    cuts: dict[str, Any] = {"fragments": options.outer_fragments, "delay": options.outer_delay}
    return StreamingDiLoCo(options.sync_period, **cuts, **_rates(options))


def eager_diloco(options: MethodOptions, seed: int) -> OuterMethod:
    """DiLoCo with eager updates."""
    return EagerDiLoCo(options.sync_period, **_rates(options))


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

    An outer step with a delay is applied that much later; its time is that of one which training waits for.

    Args:
        outer: the method; without gossip between outer steps, and with equal runs as fragments.
        mixing: of outer steps; None: exact averages.
        clock: what they take.
    """

    def __init__(self, outer: OuterMethod, mixing: MixingManager | None, clock: Clock) -> None:
        super().__init__(Plain(), None if mixing is None else SimulatedMixing(mixing), Schedule(), clock)
        self.outer = outer
        self._anchors: list[Anchor] = []
        self._due: list[tuple[int, Anchor]] = []

    @torch.no_grad()
    def forward(self, x: Tensor) -> None:
        """See `SimulatedMethod`. The outer optimizer works element by element: one does for all ranks."""
        models, step = FlatVector.over(x), self.clock.step
        if not self._anchors:
            self._anchors = [self._anchor(models, columns) for columns in self._cuts(x.shape[1])]
        self._arrive(models, step)
        starting = self.outer.starting_at(step)
        round_ = self.mixing.round(self._t) if self.mixing is not None and starting else None
        action = Action.SKIP if not starting else Action.AVERAGE if round_ is None else Action.GOSSIP
        self.clock.advance(action, round_)
        for p in starting:
            self._start(self._anchors[p], models)
            if not self.outer.delay:
                self._arrive(models, step)

    def _cuts(self, num_columns: int) -> list[tuple[int, int]]:
        """Equal runs of the elements of a model."""
        stops = [num_columns * p // self.outer.num_fragments for p in range(self.outer.num_fragments + 1)]
        return list(itertools.pairwise(stops))

    def _anchor(self, models: FlatVector, columns: tuple[int, int]) -> Anchor:
        size = models.segments[0].numel() // self.num_ranks
        ranges = [Range(0, i * size + columns[0], i * size + columns[1]) for i in range(self.num_ranks)]
        fragment = Fragment.of(models.layout, ranges)
        return Anchor(models, self.outer.make_optimizer, fragment=fragment, num_ranks=self.num_ranks)

    def _start(self, anchor: Anchor, models: FlatVector) -> None:
        """An outer step up to where it would be applied."""
        round_ = None if self.mixing is None else self.mixing.round(self._t)
        self._t += 1
        if self.num_ranks > 1:
            self._count_bytes(round_)
        self.outer.start(anchor, anchor.read(models)[0])
        if self.outer.is_eager:
            anchor.write_to(models)
        for segment in anchor.sent.segments:
            sent = segment.view(self.num_ranks, -1)
            sent.copy_(sent.mean(0) if round_ is None else round_.mix(sent))
        self._due.append((self.clock.step - 1 + self.outer.delay, anchor))

    def _arrive(self, models: FlatVector, step: int) -> None:
        """Apply the outer steps that are due."""
        while self._due and self._due[0][0] <= step:
            _, anchor = self._due.pop(0)
            self.outer.finish(anchor)
            if not self.outer.is_eager:
                anchor.write_to(models, own_weight=self.outer.kept)


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
        size = setting.model_bytes / outer.num_fragments
        message = setting.network.plain_message(size)
        clock = SyncClock(setting.compute, setting.network, message, model_bytes=size)
        return OuterSimulation(outer, mixing, clock)

    return simulate


OPTIONS = frozenset({"sync_period", "outer_lr", "outer_momentum", "nprocs_per_node"})
"""Those of all outer methods."""
ANCHORS = "its anchor must be the same on all workers, also on one that joins between two outer steps"
"""Why none takes a membership."""
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
        needs_fixed_ranks=ANCHORS,
    ),
    Method(
        "streamingdiloco",
        "Streaming DiLoCo",
        "takes the outer steps of parts of the model at different times, under the next steps of training",
        StreamingDiLoCo,
        make=wrap_with("outer", streaming_diloco),
        simulate=simulate_outer(streaming_diloco),
        paper=Paper(
            "Douillard et al.",
            "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
            "2025",
            "2501.18512",
        ),
        example="GossipDataParallel(model, outer=StreamingDiLoCo())",
        options=OPTIONS | {"outer_fragments", "outer_delay"},
    ),
    Method(
        "eagerdiloco",
        "Eager DiLoCo",
        "takes a rank's own part of the mean drift at once, and that of the others one outer step later",
        EagerDiLoCo,
        make=wrap_with("outer", eager_diloco),
        simulate=simulate_outer(eager_diloco),
        paper=Paper(
            "Kale et al.",
            "Eager Updates For Overlapped Communication and Computation in DiLoCo",
            "2025",
            "2502.12996",
        ),
        example="GossipDataParallel(model, outer=EagerDiLoCo())",
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
        needs_fixed_ranks=ANCHORS,
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
        needs_fixed_ranks=ANCHORS,
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
        needs_fixed_ranks=ANCHORS,
        simulated_graph=static,
    ),
)

"""How outer optimizers are simulated: the method itself, on the models of all ranks at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..mixing_manager.graph_weights import default_mixing
from ..outer.anchor import Anchor
from ..outer.fragment import Fragment, Range
from ..outer.method import OuterMethod
from ..rounds.rows import Rows, StackedMixing
from ..simulate.choice import Choice
from ..simulate.clocks import Clock, GatherClock, SyncClock
from ..simulate.codes import coded_message
from ..simulate.gossip import ClockedMethod, SimulatedMethod
from ..simulate.setting import Setting
from .simulated import options_of, undirected
from .simulated_options import MethodOptions

MakeOuter: TypeAlias = Callable[[MethodOptions, int], OuterMethod]
"""Makes an outer method, given options and a seed."""


class AllAnchors(Anchor):
    """The anchors of all ranks, one after the other. What a rank compresses is of that rank alone."""

    def compress(self, x: Sequence[Tensor], compressor: Compressor) -> None:
        """See `Anchor`; without messages: `gradients` become what they would mean."""
        for own, meant in zip(x, self.gradients, strict=True):
            rows = own.view(self.num_ranks, -1)
            meant.copy_(compressor.decompressed(rows, t=self._num_compressed).flatten())
            own.sub_(meant)
        self._num_compressed += 1

    def read_messages(self, compressor: Compressor) -> None:
        """See `Anchor`: `compress` has written it."""


class OuterSimulation(ClockedMethod):
    """An outer method itself, on the models of all ranks at once.

    An outer step with a delay is applied that much later; its time is that of one which training waits for.

    Args:
        outer: the method; without gossip between outer steps, and with equal runs as fragments.
        mixing: of outer steps; None: exact averages.
        clock: what they take.
    """

    def __init__(self, outer: OuterMethod, mixing: MixingManager | None, clock: Clock) -> None:
        super().__init__(clock)
        self.mixing, self._t = None if mixing is None else StackedMixing(mixing), 0
        self.outer = outer
        rates = {f"outer_{name}": getattr(outer, name) for name in ("lr", "momentum") if hasattr(outer, name)}
        step_size = {"step_size": outer.step_size} if hasattr(outer, "step_size") else {}
        self.options = {"sync_period": outer.sync_every, **rates, **step_size}
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
        round_ = self._round() if starting else None
        self.clock.advance([round_] if starting else [])
        for p in starting:
            self._start(self._anchors[p], models)
            if not self.outer.delay:
                self._arrive(models, step)

    def _cuts(self, num_columns: int) -> list[tuple[int, int]]:
        """Equal runs of the elements of a model."""
        stops = [num_columns * p // self.outer.num_fragments for p in range(self.outer.num_fragments + 1)]
        return list(itertools.pairwise(stops))

    def _anchor(self, models: FlatVector, columns: tuple[int, int]) -> AllAnchors:
        size = models.segments[0].numel() // self.num_ranks
        ranges = [Range(0, i * size + columns[0], i * size + columns[1]) for i in range(self.num_ranks)]
        fragment = Fragment.of(models.layout, ranges)
        return AllAnchors(models, self.outer.make_optimizer, fragment=fragment, num_ranks=self.num_ranks)

    def _start(self, anchor: Anchor, models: FlatVector) -> None:
        """An outer step up to where it would be applied."""
        round_ = self._round()
        self._t += 1
        self._count_bytes([round_])
        self.outer.start(anchor, anchor.read(models)[0])
        if self.outer.is_eager:
            anchor.write_to(models)
        for segment in anchor.sent.segments:
            sent = segment.view(self.num_ranks, -1)
            sent.copy_(sent.mean(0) if round_ is None else round_.mix(sent))
        self._due.append((self.clock.step - 1 + self.outer.delay, anchor))

    def _round(self) -> Rows | None:
        """The next one of the graph; each fragment meets every matrix of one that changes."""
        return None if self.mixing is None else self.mixing.round(self._t // self.outer.num_fragments)

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
        mixing = None
        if not outer.averages_exactly:
            own = outer.default_graph(setting.world_size) if not choice.graph else None
            mixing = undirected(choice, setting) if own is None else default_mixing(own, push_sum=False)
            outer.check(mixing)
        return OuterSimulation(outer, mixing, _clock(outer, setting))

    return simulate


def _clock(outer: OuterMethod, setting: Setting) -> Clock:
    """What an outer step takes."""
    if outer.wire_compressor is not None:
        num_parameters = setting.num_parameters // outer.num_fragments
        message = coded_message(outer.wire_compressor, num_parameters, setting.links)
        return GatherClock(setting.compute, setting.network, message)
    size = setting.model_bytes / outer.num_fragments
    message = setting.network.plain_message(size)
    return SyncClock(setting.compute, setting.network, message, model_bytes=size)

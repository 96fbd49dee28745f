"""How outer optimizers are simulated: the method itself, on the models of all ranks at once."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..algorithms.outer_method import OuterMethod
from ..mixing_manager.base import MixingManager
from ..mixing_manager.graph_weights import default_mixing
from ..rounds.requests import Request
from ..rounds.rows import Rows, StackedMixing
from ..rounds.stacked import Stacked
from ..rounds.vector import Vector
from ..rounds.vectors import Vectors
from ..simulate.choice import Choice
from ..simulate.clocks import Clock, GatherClock, SyncClock
from ..simulate.codes import coded_message
from ..simulate.gossip import ClockedMethod, SimulatedMethod
from ..simulate.setting import Setting
from .simulated import options_of, undirected
from .simulated_options import MethodOptions

MakeOuter: TypeAlias = Callable[[MethodOptions, int], OuterMethod]
"""Makes an outer method, given options and a seed."""


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
        self.outer, self.mixing, self._t = outer, None if mixing is None else StackedMixing(mixing), 0
        rates = {f"outer_{name}": getattr(outer, name) for name in ("lr", "momentum") if hasattr(outer, name)}
        step_size = {"step_size": outer.step_size} if hasattr(outer, "step_size") else {}
        self.options = {"sync_period": outer.sync_every, **rates, **step_size}
        self._pieces: list[tuple[slice, Stacked]] = []
        self._due: list[tuple[int, int, Generator[Request, Any, None], Vectors, Any]] = []

    @torch.no_grad()
    def forward(self, x: Tensor) -> None:
        """See `SimulatedMethod`."""
        step, num_fragments = self.clock.step, self.outer.num_fragments
        if not self._pieces:
            stops = [x.shape[1] * p // num_fragments for p in range(num_fragments + 1)]
            mixing = None if self.mixing is None else self.mixing.mixing
            for first, last in itertools.pairwise(stops):
                piece = Stacked(self.outer, mixing, self.num_ranks)
                piece._begin(x[:, first:last])
                self._pieces.append((slice(first, last), piece))
        self._arrive(x, step)
        starting = self.outer.starting_at(step)
        round_ = self._round() if starting else None
        self.clock.advance([round_] if starting else [])
        for p in starting:
            self._start(p, x, step)
            if not self.outer.delay:
                self._arrive(x, step)

    def _start(self, p: int, x: Tensor, step: int) -> None:
        """A round up to where it would be applied."""
        round_ = self._round()
        self._t += 1
        self._count_bytes([round_])
        columns, piece = self._pieces[p]
        piece.t = self.outer.number_of(p, step)
        v = piece._vectors(Vector([x[:, columns]]), None)
        generator = self.outer.round(v, piece.memory, step)
        reply = piece._answer(next(generator), v)
        self._due.append((step + self.outer.delay, p, generator, v, reply))

    def _round(self) -> Rows | None:
        """The next one of the graph; each fragment meets every matrix of one that changes."""
        return None if self.mixing is None else self.mixing.round(self._t // self.outer.num_fragments)

    def _arrive(self, x: Tensor, step: int) -> None:
        """Apply the rounds that are due."""
        while self._due and self._due[0][0] <= step:
            _, p, generator, v, reply = self._due.pop(0)
            v.x = Vector([x[:, self._pieces[p][0]]])
            with contextlib.suppress(StopIteration):
                generator.send(reply)
            self._pieces[p][1].memory.end_round()


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
    if (code := getattr(outer, "compressor", None)) is not None:
        num_parameters = setting.num_parameters // outer.num_fragments
        message = coded_message(code, num_parameters, setting.links)
        return GatherClock(setting.compute, setting.network, message)
    size = setting.model_bytes / outer.num_fragments
    message = setting.network.plain_message(size)
    return SyncClock(setting.compute, setting.network, message, model_bytes=size)

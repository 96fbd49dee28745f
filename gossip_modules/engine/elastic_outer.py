"""ElasticOuterEngine: outer steps of workers that die, come back and are added."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..flat.buffer import FlatBuffer
from ..flat.vector import FlatVector
from ..gossiper.mixer import Mixer
from ..mixing_manager.base import MixingManager
from ..outer.anchor import Anchor
from ..outer.method import OuterMethod
from ..schedule import Action, Schedule
from ..transport.agreement import broadcast_state
from ..transport.base import Transport
from .outer import OuterEngine


class ElasticOuterEngine(OuterEngine):
    """`OuterEngine` on an elastic transport: outer steps are those of the workers that live.

    [Note: One anchor] Where the method averages exactly, all workers move one anchor; if ever one of them took an outer
    step that another did not take, they would train on around different anchors for ever. An average takes effect on
    all or on none, but for a worker that dies while it says that it has the result (`ElasticAverage`). And a worker
    that joins has the anchor that its donor had some steps before. So each fragment has a stamp, the training step of
    the last outer step that its anchor took. The first round of a generation, at the same step on all workers, runs

        stamps of all workers <- all_gather
        for each fragment whose stamps differ:
            anchor, outer optimizer <- those of the first rank with the largest stamp
            x <- phi                                           # of who was behind; its steps since then are lost
        for each fragment whose last outer step has failed:
            take it now, with the drifts of those who live

    If that fails too, since another worker dies, the next generation does it. Until then there are no outer steps, and
    workers train alone. So those of one generation have the same anchors and outer momentum, bit for bit, with
    fragments and delays as well: a new generation begins with nothing under way.

    Whether anchors are of the tensors that are trained now is known of their names, which a worker that joins gets with
    the anchors of its donor: so all workers begin anew at the same outer step, or none.

    Methods that mix on a graph have an anchor for each worker. A round goes on without peers that are lost, and a
    worker that joins begins with the anchor of its donor, so they have no use for stamps. Where other tensors are
    trained than before, each worker begins anew at its own model, without an average of all, and then takes the outer
    step as ever: a worker whose donor gave its anchor before layers were frozen does so when the others have done it,
    and they wait for its part of the round.

    Args:
        gossiper, outer, buffer: see `OuterEngine`.
        options: its other arguments.

    Raises:
        ValueError: as `OuterEngine`; or a method whose drifts are compressed, or eager; or push-sum between outer
            steps, whose weights have no known sum.
    """

    def __init__(self, gossiper: Mixer, outer: OuterMethod, buffer: FlatBuffer | None = None, **options: Any) -> None:
        super().__init__(gossiper, outer, buffer, **options)
        if self._gathering is not None:
            raise ValueError(
                f"got {outer} with a membership, expected a method that averages the drifts themselves: what a rank "
                "keeps of what it has not sent is its own, and would be lost with it; e.g. DiLoCo or StreamingDiLoCo "
                "without a compressor"
            )
        if outer.is_eager:
            raise ValueError(
                f"got {outer} with a membership, expected a method that waits for its averages: the anchor has moved "
                "before an average comes, which may fail; e.g. StreamingDiLoCo"
            )
        if outer.averages_exactly:
            self._mixer = self._scheduled_average
        self._is_agreed, self._has_tried = not outer.averages_exactly, False  # on this transport
        self._loaded_names: list[str] | None = None  # of the tensors of loaded anchors, where they are known
        self._stamps = [0] * outer.num_fragments

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `LockstepEngine`."""
        super().rebind(mixing, transport)
        for anchor in self._anchors:
            anchor.num_ranks = transport.world_size
        self._is_agreed, self._has_tried = not self.outer.averages_exactly, False

    def advance(self, num_steps: int) -> None:
        """See `LockstepEngine`."""
        for _ in range(num_steps):
            self.t += self._num_rounds(self.step)
            self.step += 1

    def _num_rounds(self, step: int) -> int:
        """By how much t grows in a step: the same on all workers, whatever has failed."""
        assert isinstance(self.schedule, Schedule), "outer methods have schedules of their own"
        is_gossip = self.outer.gossip_every > 0 and self.schedule.action(step) is Action.GOSSIP
        return len(self.outer.starting_at(step)) or int(is_gossip)

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        t, step = self.t, self.step
        self._anchor_at_start(x)
        has_changed = False
        if not (self._is_agreed or self._has_tried):
            self._check_finite(range(self.outer.num_fragments), x)  # of which any may take its outer step now
            has_changed = self._agree(x)
            last = {p: self.outer.last_start(p, step) for p in range(self.outer.num_fragments)}
            for p in sorted(last, key=lambda p: last[p]):
                if self._is_agreed and self._stamps[p] < last[p] < step:
                    has_changed |= self._outer_step(p, x, last[p])
        has_changed |= super().round(x)
        self.t = t + self._num_rounds(step)
        return has_changed

    def _outer_step(self, p: int, x: FlatVector, step: int) -> bool:
        """See `OuterEngine`; step: at which it is due, which is before this one where it has failed then."""
        has_changed = False
        if not self._is_agreed:  # this fails at once, and asks for another generation
            has_changed = self._agree(x)
        if not self._is_agreed:
            return has_changed
        if self._has_other_tensors(x):
            if self.outer.averages_exactly:
                return self._begin_anew(x, step)
            self._begin_anew_at(x, "the model of this worker")
        return super()._outer_step(p, x, step) or has_changed

    def _mix(self, anchor: Anchor, t: int) -> bool:
        super()._mix(anchor, t)
        return not (self.outer.averages_exactly and self._scheduled_average.has_failed)

    def _apply(self, p: int, x: FlatVector, began: int) -> None:
        super()._apply(p, x, began)
        self._stamps[p] = began

    # [Note: One anchor]

    def _agree(self, x: FlatVector) -> bool:
        """Take the newest anchors, and set `_is_agreed`, if nobody fails; returns whether x was written."""
        self._has_tried = True
        transport, has_changed = self.gossiper.transport, False
        try:
            stamps = self._stamps_of_all(transport)
            for p, of_ranks in enumerate(stamps.unbind(1)):
                newest, source = int(of_ranks.max()), int(of_ranks.argmax())
                if int(of_ranks.min()) < newest:
                    state = self._state_of(p, x) if source == transport.rank else None
                    state = broadcast_state(transport, state, source=source, what="the anchor of an outer optimizer")
                    if self._stamps[p] < newest:
                        has_changed |= self._take_anchor(p, x, state)
                        self._stamps[p] = newest
            self._is_agreed = True
        except (ConnectionError, TimeoutError):
            self._is_agreed = False
        return has_changed

    def _stamps_of_all(self, transport: Transport) -> torch.Tensor:
        """int64 [ranks, fragments]."""
        mine = torch.tensor(self._stamps)
        stamps = mine.new_empty(transport.world_size * len(mine))
        transport.all_gather(stamps, mine, what="the last outer steps")
        return stamps.view(transport.world_size, -1)

    def _state_of(self, p: int, x: FlatVector) -> dict[str, Any]:
        return {} if self._has_other_tensors(x) else self._anchor_for(p, x).state_dict()

    def _take_anchor(self, p: int, x: FlatVector, state: dict[str, Any]) -> bool:
        """The anchor of fragment p, and x, <- those of another worker; {}: nobody has one of the tensors of x."""
        if not state:
            return False
        if self._has_other_tensors(x):
            self._anchors, self._loaded = self._anchors_at(x), []  # the others have begun anew, with all fragments
        anchor = self._anchor_for(p, x)
        anchor.load_state_dict(state)
        anchor.write_to(x)
        return True

    # Other tensors are trained than before.

    def _has_other_tensors(self, x: FlatVector) -> bool:
        if self._anchors:
            return not self._anchors[0].has_tensors_of(x)
        return bool(self._loaded) and self._loaded_names not in (None, x.layout.names)

    def _begin_anew(self, x: FlatVector, step: int) -> bool:
        """New anchors at the average of all models, unless that fails."""
        self._scheduled_average.mix(x, self.t)
        if self._scheduled_average.has_failed:
            return False
        self._begin_anew_at(x, "the average of all models")
        self._stamps = [step] * self.outer.num_fragments
        return True

    def _begin_anew_at(self, x: FlatVector, what: str) -> None:
        warnings.warn(
            f"{self.outer}: other tensors are trained than before, so the anchor becomes {what}, and the outer "
            "optimizer starts anew",
            stacklevel=2,
        )
        self._anchors, self._loaded = self._anchors_at(x), []

    # State.

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`."""
        names = self._anchors[0].names if self._anchors else self._loaded_names
        return {**super().state_dict(), "stamps": list(self._stamps), "names": names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`; also that of an `OuterEngine`, whose outer steps have not failed."""
        super().load_state_dict(state)
        taken = [self.outer.last_start(p, max(self.step - 1, 0)) for p in range(self.outer.num_fragments)]
        self._stamps = list(state.get("stamps", taken))
        self._loaded_names = state.get("names")

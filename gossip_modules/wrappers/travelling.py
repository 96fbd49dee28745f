"""Travelling: which tensors of a model are exchanged in the course of training, the same ones on all ranks."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..engine.engine import Engine, LockstepEngine
from ..flat.buffer import FlatBuffer
from ..flat.slots import Slot
from ..flat.vector import FlatVector
from ..membership.participant import ModelParticipant
from ..transport.agreement import broadcast_state, check_agreement
from ..transport.base import is_elastic
from ..transport.change_board import REMEDY, digest_of
from .node import Node

_MAX_AGREED = 1000  # choices that are remembered


class Wrapper(Protocol):
    """What is used of a wrapper."""

    _buffer: FlatBuffer
    _node: Node | None
    _elastic: ModelParticipant | None

    @property
    def _engine(self) -> Engine: ...

    def _apply_in_flight(self) -> None: ...

    def _reattach(self) -> None: ...


class Travelling:
    """Decides at the rounds of a wrapper which tensors are in its vector.

    [Note: what leaves the vector] A tensor that is frozen has been trained since the last round. It stays in the vector
    until a round has taken it along; at the next one it is averaged exactly over all ranks, once, and leaves. So all
    ranks have the same frozen tensors from then on, and parts of a model that are trained in turn stay in the vector
    while each is trained between two rounds. A tensor that is trained again, or is new, comes in at the next round.

    [Note: agreeing] Before anything of that happens all ranks compare what they train: see [Note: changes that not all
    ranks make] of `ChangeBoard`. A choice of trained tensors that ranks have agreed on before, and that leaves the
    vector as it is, they do not compare again, so that parts that are trained in turn cost nothing. With a membership a
    worker may die while they compare, or average: then the vector stays as it is, and they try again in the next step.
    And a worker may have got its model before the others have frozen layers. So in the first round of a generation each
    worker that has something else in its vector than the first one that is not new takes over the layout of that one.

    Attributes:
        frozen_at: the number of rounds when tensors of the vector were found frozen; None: none is.
        agreed: digests of what all ranks have agreed on.
        is_newcomer: whether this worker has its model of a donor, and has not been in a round since then.
    """

    def __init__(self) -> None:
        self.frozen_at: int | None = None
        self.agreed: set[str] = set()
        self.is_newcomer = False
        self._is_first = False  # the next round of a generation

    def is_due(self, engine: Engine) -> bool:
        """Whether there is something to do at this round, though this rank has changed nothing."""
        return self._is_first or self._must_leave(engine)

    def _must_leave(self, engine: Engine) -> bool:
        """Whether frozen tensors leave the vector now."""
        return self.frozen_at is not None and engine.t > self.frozen_at

    def state_dict(self) -> dict[str, Any]:
        """For a worker that joins: what its donor has in its vector and has agreed on with the others."""
        return {"frozen_at": self.frozen_at, "agreed": sorted(self.agreed), "is_first": self._is_first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that of a donor."""
        self.frozen_at, self.agreed, self._is_first = state["frozen_at"], set(state["agreed"]), state["is_first"]

    def watch(self, wrapper: Wrapper, transport: Any) -> None:
        """Let ranks that change and ranks that do not find each other over this transport."""
        if not isinstance(wrapper._engine, LockstepEngine) or not hasattr(transport, "watch_changes"):
            return
        me = weakref.ref(wrapper)

        def step() -> int:
            wrapper = me()
            return -1 if wrapper is None else int(wrapper._engine.step)  # type: ignore[attr-defined]

        def tensors() -> list[str]:
            wrapper = me()
            return [] if wrapper is None else describe(wrapper._buffer, wrapper._buffer.slots)

        transport.watch_changes(step=step, tensors=tensors)
        self._is_first = is_elastic(transport)

    def change(self, wrapper: Wrapper, transport: Any, averager: Any, *, may_leave: bool) -> None:
        """Make what is trained now what travels, on all ranks alike; may_leave: whether frozen tensors may leave.

        Raises:
            ValueError: ranks train other tensors.
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        buffer = wrapper._buffer
        if not buffer.is_attached():
            wrapper._reattach()
        if not buffer.is_trained():
            return
        if self._is_first and may_leave and not self._meet(wrapper, transport):
            return
        frozen = buffer.frozen()
        is_new = not buffer.is_complete()
        is_due = may_leave and not is_new and self._must_leave(wrapper._engine)
        leaving = frozen if is_due else []
        slots = buffer.candidates(kept=[] if leaving else frozen)
        signature = [slot.signature() for slot in slots]
        if not self._agree(wrapper, transport, slots, is_same=signature == buffer.agreed):
            return
        if leaving and not self._average(wrapper, averager, leaving):
            return
        if signature != buffer.signature():
            buffer.attach(slots)
        buffer.keep()
        buffer.agree()
        if is_new or is_due:
            self.frozen_at = wrapper._engine.t if frozen and not leaving else None

    def _meet(self, wrapper: Wrapper, transport: Any) -> bool:
        """In the first round of a generation: see [Note: agreeing]; whether no worker has died in it."""
        participant, node, buffer = wrapper._elastic, wrapper._node, wrapper._buffer
        assert participant is not None, "only a membership has generations"

        def compare() -> bool:
            own = [buffer.signature(), buffer.agreed, buffer.is_complete(), self.frozen_at, sorted(self.agreed)]
            digest = bytes.fromhex(digest_of([json.dumps(own)]))
            mine = torch.frombuffer(bytearray(digest) + bytes([self.is_newcomer]), dtype=torch.uint8)
            table = mine.new_empty(transport.world_size * len(mine))
            transport.all_gather(table, mine, what="comparing what travels")
            *digests, is_new = table.view(transport.world_size, -1).unbind(1)
            if all(len({*column.tolist()}) == 1 for column in digests):
                return False
            source = int(is_new.argmin())  # the first one of those that are not new, or of all
            state = participant.layout() if transport.rank == source else None
            state = broadcast_state(transport, state, source=source, what="what travels")
            if digest == bytes(table.view(transport.world_size, -1)[source, :-1].tolist()):
                return False
            participant.take_layout(state, freezes=self.is_newcomer)
            return True

        try:
            if node is None:
                compare()
            elif node.run(compare):
                state = participant.layout() if node.control.rank == 0 else None
                state = broadcast_state(node.control, state, source=0, what="what travels")
                if node.control.rank:
                    participant.take_layout(state)
        except (TimeoutError, ConnectionError):
            return False
        self._is_first = self.is_newcomer = False
        return True

    def _agree(self, wrapper: Wrapper, transport: Any, slots: Sequence[Slot], *, is_same: bool) -> bool:
        """Compare these tensors with those of the other ranks; whether they could be, on an elastic transport.

        Args:
            wrapper, transport: of this rank.
            slots: what travels from now on.
            is_same: whether the vector stays as all ranks have it.
        """
        description = describe(wrapper._buffer, slots)
        if not self.agreed:
            self.agreed.add(digest_of([*wrapper._buffer.agreed, *wrapper._buffer.copied_at_start]))
        digest = digest_of(description)
        if is_same and digest in self.agreed:
            return True
        # First, as it may raise, and then this rank does all of this again; and what is in flight may be a collective.
        wrapper._apply_in_flight()
        node = wrapper._node
        what: dict[str, Any] = {"what": "comparing what is trained", "remedy": REMEDY}

        def compare() -> bool:
            if transport.board is not None:
                transport.board.announce(description)
            check_agreement(transport, {"trained": description}, **what)
            return False

        try:
            if node is None:
                compare()
            else:
                check_agreement(node.control, {"trained": description}, **what)
                node.run(compare)
        except (TimeoutError, ConnectionError):
            if not is_elastic(transport):
                raise
            return False
        if len(self.agreed) >= _MAX_AGREED:
            self.agreed.clear()
        self.agreed.add(digest)
        return True

    @torch.no_grad()
    def _average(self, wrapper: Wrapper, averager: Any, leaving: Sequence[Slot]) -> bool:
        """These tensors <- their exact average over all ranks; whether it has taken effect, on an elastic transport."""
        tensors = [slot.tensor for slot in leaving]
        vector, t = FlatVector.pack(tensors), wrapper._engine.t
        vector.push_sum_weight.copy_(wrapper._buffer.vector.push_sum_weight)
        vector.multiply_by_weight_()
        try:
            averager.mix(vector, t)
            if is_elastic(averager.transport):  # as of `ElasticAverage`
                averager.transport.all_reduce(
                    torch.zeros(1, device="cpu"), what=f"end of the average of frozen tensors after {t}"
                )
        except (TimeoutError, ConnectionError):
            if not is_elastic(averager.transport):
                raise
            return False
        vector.unpack_to(tensors)
        torch.autograd.graph.increment_version(tensors)
        return True


def describe(buffer: FlatBuffer, slots: Sequence[Slot]) -> list[str]:
    """One text for each tensor: what ranks must agree on, and whether it is frozen."""
    travelling = [
        slot.signature() + (", frozen" if slot.is_parameter and not slot.tensor.requires_grad else "") for slot in slots
    ]
    return [*travelling, *buffer.copied_signature()]

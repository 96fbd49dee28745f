"""Travelling: chooses the exchanged tensors of a model in the course of training, equal on all ranks."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..engine.engine import Engine
from ..flat.buffer import FlatBuffer
from ..flat.slots import Slot
from ..flat.vector import FlatVector
from ..transport.agreement import broadcast_state, check_agreement
from ..transport.change_board import REMEDY, digest_of
from ..worlds.all_or_none import MayBeLost

_MAX_AGREED = 1000  # choices that are remembered


class Travelling:
    """Decides about the tensors in the vector of a `LocalModel`, the argument `local`, at its rounds.

    [Note: what leaves the vector] A tensor that is frozen has been trained since the last round. It stays in the vector
    until a round has taken it along; at the next one it is averaged exactly over all ranks, once, and leaves. So all
    ranks have the same frozen tensors from then on, and parts of a model that are trained in turn stay in the vector
    while each is trained between two rounds. A new tensor, or a tensor trained again, comes in at the next round.

    [Note: agreeing] Before any of this all ranks compare their trained tensors: see [Note: changes that not all ranks
    make] of `ChangeBoard`. They compare a choice of tensors only once if it leaves the vector as it is, so parts that
    are trained in turn cost nothing. With a membership a worker may die while they compare, or average: then the vector
    stays as it is, and they try again in the next step. And a worker may have got its model before the others have
    frozen layers. So in the first round of a generation each worker with other tensors in its vector than the first one
    that is not new takes over the layout of that one.

    Attributes:
        frozen_at: the number of rounds when tensors of the vector were found frozen; None: none is.
        agreed: digests of the agreed choices.
        is_newcomer: whether this worker has its model of a donor, and has not been in a round since then.
        is_first: whether the next round is the first one of a generation.
    """

    def __init__(self) -> None:
        self.frozen_at: int | None = None
        self.agreed: set[str] = set()
        self.is_newcomer = False
        self.is_first = False

    def must_leave(self, engine: Engine) -> bool:
        """Whether frozen tensors leave the vector now, though this rank has changed nothing."""
        return self.frozen_at is not None and engine.t > self.frozen_at

    def state_dict(self) -> dict[str, Any]:
        """The choice of a donor and its agreements with the others, for a joining worker."""
        return {"frozen_at": self.frozen_at, "agreed": sorted(self.agreed), "is_first": self.is_first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a donor."""
        self.frozen_at, self.agreed, self.is_first = state["frozen_at"], set(state["agreed"]), state["is_first"]

    def saved(self, local: Any) -> dict[str, Any]:
        """Return the frozen tensors still in the vector, for the checkpoint of a `LocalModel`."""
        frozen = [slot.name for slot in local.buffer.frozen()]
        at = self.frozen_at if local.buffer.is_complete() else local.engine.t
        return {"frozen": frozen, "frozen_at": at} if frozen and at is not None else {}

    def load_saved(self, local: Any, state: Mapping[str, Any]) -> None:
        """Let frozen tensors leave the vector in the same round as without the checkpoint.

        The model may have been wrapped with these tensors frozen already, so that they are not in the vector. All ranks
        compare their vectors in the next step.
        """
        buffer, frozen = local.buffer, state.get("frozen", ())
        if not frozen or local.engine.is_asynchronous:
            return
        agreed, slots = buffer.agreed, buffer.candidates(frozen=frozen)
        if [slot.signature() for slot in slots] != buffer.signature():
            buffer.attach(slots)
        buffer.keep()
        buffer.agree(agreed)
        self.frozen_at = state["frozen_at"]

    def watch(self, local: Any) -> None:
        """Let ranks that change and ranks that do not find each other over the transport."""
        transport = local.transport
        if local.engine.is_asynchronous or not hasattr(transport, "watch_changes"):
            return
        owner, buffer = weakref.ref(local), weakref.ref(local.buffer)

        def step() -> int:
            return -1 if (kept := owner()) is None else int(kept.engine.step)

        def tensors() -> list[str]:
            return [] if (kept := buffer()) is None else describe(kept, kept.slots)

        transport.watch_changes(step=step, tensors=tensors)
        self.is_first = transport.is_elastic

    def change(self, local: Any, *, may_leave: bool) -> None:
        """Exchange the trained tensors now, on all ranks alike; may_leave: whether frozen tensors may leave.

        Raises:
            ValueError: ranks train other tensors.
            TimeoutError, ConnectionError: a peer is late or gone; names it. With a membership the vector stays as it
                is, and the next step tries again.
        """
        if not local.buffer.is_attached():
            local.reattach()
        if not local.buffer.is_trained():
            return
        with MayBeLost(local.transport):
            self._change(local, may_leave=may_leave)

    def _change(self, local: Any, *, may_leave: bool) -> None:
        buffer = local.buffer
        if self.is_first and may_leave:
            self._meet(local)
        frozen = buffer.frozen()
        is_new = not buffer.is_complete()
        is_due = may_leave and not is_new and self.must_leave(local.engine)
        leaving = frozen if is_due else []
        slots = buffer.candidates(kept=[] if leaving else frozen)
        signature = [slot.signature() for slot in slots]
        self._agree(local, slots, is_same=signature == buffer.agreed)
        if leaving:
            self._average(local, leaving)
        if signature != buffer.signature():
            buffer.attach(slots)
        buffer.keep()
        buffer.agree()
        if is_new or is_due:
            self.frozen_at = local.engine.t if frozen and not leaving else None

    def _meet(self, local: Any) -> None:
        """In the first round of a generation: see [Note: agreeing]."""
        participant: Any = local.world
        transport, node, buffer = local.transport, local.node, local.buffer

        def compare() -> bool:
            """Whether this worker has taken over the layout of another one."""
            own = [buffer.signature(), buffer.agreed, buffer.is_complete(), self.frozen_at, sorted(self.agreed)]
            digest = bytes.fromhex(digest_of([json.dumps(own)]))
            mine = torch.frombuffer(bytearray(digest) + bytes([self.is_newcomer]), dtype=torch.uint8)
            table = mine.new_empty(transport.world_size * len(mine))
            transport.all_gather(table, mine, what="comparing what travels")
            rows = table.view(transport.world_size, -1)
            if bool((rows[:, :-1] == rows[0, :-1]).all()):
                return False
            source = int(rows[:, -1].argmin())  # the first one of those that are not new, or of all
            state = participant.layout() if transport.rank == source else None
            state = broadcast_state(transport, state, source=source, what="what travels")
            differs = not torch.equal(rows[source, :-1], mine[:-1])
            if differs:
                participant.take_layout(state, freezes=self.is_newcomer)
            return differs

        if node is None or node.is_sharded:
            with transport.as_one_collective():
                compare()
        elif node.run(compare):
            state = participant.layout() if node.control.rank == 0 else None
            state = broadcast_state(node.control, state, source=0, what="what travels")
            if node.control.rank:
                participant.take_layout(state)
        self.is_first = self.is_newcomer = False

    def _agree(self, local: Any, slots: Sequence[Slot], *, is_same: bool) -> None:
        """Compare these tensors with the tensors of the other ranks.

        Args:
            local: the local model of this rank.
            slots: the slots of the tensors to exchange from now on.
            is_same: whether the vector stays as all ranks have it.
        """
        buffer, node, transport = local.buffer, local.node, local.transport
        description = describe(buffer, slots)
        if not self.agreed:
            self.agreed.add(digest_of([*buffer.agreed, *buffer.copied_at_start]))
        digest = digest_of(description)
        if is_same and digest in self.agreed:
            return
        # First, as it may raise, and then this rank does all of this again; and what is in flight may be a collective.
        local.apply_in_flight()
        check = partial(check_agreement, what="comparing what is trained", remedy=REMEDY)

        def compare() -> bool:
            if transport.board is not None:
                transport.board.announce(description)
            check(transport, {"trained": description})
            return False

        if node is None:
            compare()
        else:
            if not node.is_sharded:
                check(node.control, {"trained": description})
            node.run(compare)
        if len(self.agreed) >= _MAX_AGREED:
            self.agreed.clear()
        self.agreed.add(digest)

    @torch.no_grad()
    def _average(self, local: Any, leaving: Sequence[Slot]) -> None:
        """These tensors <- their exact average over all ranks."""
        tensors = [slot.memory for slot in leaving]
        vector, t, averager = FlatVector.pack(tensors), local.engine.t, local.averager
        vector.push_sum_weight.copy_(local.buffer.vector.push_sum_weight)
        vector.multiply_by_weight_()
        averager.mix(vector, t)
        vector.unpack_to(tensors)
        torch.autograd.graph.increment_version([slot.tensor for slot in leaving])


def describe(buffer: FlatBuffer, slots: Sequence[Slot]) -> list[str]:
    """One text for each tensor: the facts to be equal on all ranks, and whether it is frozen."""
    travelling = [
        slot.signature() + (", frozen" if slot.is_parameter and not slot.tensor.requires_grad else "") for slot in slots
    ]
    return [*travelling, *buffer.copied_signature()]

"""ExchangedTensors: chooses the exchanged tensors of a model in the course of training, equal on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..flat.buffer import FlatBuffer
from ..flat.slots import Slot
from ..flat.vector import FlatVector
from ..membership.links import LinkTransport
from ..state import State, leaf
from ..transport.change_board import digest_of
from ..transport.process_group import ProcessGroupTransport

_MAX_AGREED = 1000  # choices that are remembered


class Ranks(Protocol):
    """The part of a model that reaches the other ranks, for a change of the exchanged tensors."""

    def apply_in_flight(self) -> None:
        """Apply the rounds in flight."""

    def compare_trained(self, description: list[str]) -> None:
        """Compare the description of the exchanged tensors with all other ranks.

        Raises:
            ValueError: ranks train other tensors.
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """

    def average_frozen(self, vector: FlatVector) -> None:
        """vector <- its exact average over all ranks."""


class ExchangedTensors(State):
    """Decides about the exchanged tensors of a model at its rounds.

    [Note: leaving the vector] A tensor that is frozen has been trained since the last round. It stays in the vector
    until a round has taken it along; at the next one it is averaged exactly over all ranks, once, and leaves. So all
    ranks have the same frozen tensors from then on, and parts of a model that are trained in turn stay in the vector
    while each is trained between two rounds. A new tensor, or a tensor trained again, comes in at the next round.

    [Note: agreeing] Before any of this all ranks compare their trained tensors: see [Note: changes that not all ranks
    make] of `ChangeBoard`. They compare a choice of tensors only once if it leaves the vector as it is, so parts that
    are trained in turn cost nothing. With a membership a worker may die while they compare, or average: then the vector
    stays as it is, and they try again in the next step. And a worker may have got its model before the others have
    frozen layers. So in the first round of a generation each worker with other tensors in its vector than the first one
    that is not new takes over the layout of that one.

    Args:
        buffer: the buffer of the model, which has the vector.

    Attributes:
        frozen_at: the number of rounds when tensors of the vector were found frozen; None: none is.
        agreed: digests of the agreed choices.
        is_newcomer: whether this worker has its model of a donor, and has not been in a round since then.
        is_first: whether the next round is the first one of a generation.
    """

    frozen_at: int | None = leaf(None)
    agreed: set[str] = leaf(set(), save=sorted, load=set)
    is_first: bool = leaf(False)
    is_newcomer: bool = leaf(False, is_saved=False)

    def __init__(self, buffer: FlatBuffer) -> None:
        self._buffer = buffer

    def must_leave(self, t: int) -> bool:
        """Whether frozen tensors leave the vector after t rounds, though this rank has changed nothing."""
        return self.frozen_at is not None and t > self.frozen_at

    def saved(self, t: int) -> dict[str, Any]:
        """Return the frozen tensors still in the vector after t rounds, for a checkpoint."""
        frozen = [slot.name for slot in self._buffer.frozen()]
        at = self.frozen_at if self._buffer.is_complete() else t
        return {"frozen": frozen, "frozen_at": at} if frozen and at is not None else {}

    def load_saved(self, state: Mapping[str, Any]) -> None:
        """Let frozen tensors leave the vector in the same round as without the checkpoint.

        The model may have been wrapped with these tensors frozen already, so that they are not in the vector. All ranks
        compare their vectors in the next step.
        """
        buffer, frozen = self._buffer, state.get("frozen", ())
        if not frozen:
            return
        agreed, slots = buffer.agreed, buffer.candidates(frozen=frozen)
        if [slot.signature() for slot in slots] != buffer.signature():
            buffer.attach(slots)
        buffer.keep()
        buffer.agree(agreed)
        self.frozen_at = state["frozen_at"]

    def watch(self, transport: ProcessGroupTransport | LinkTransport, *, step: Callable[[], int]) -> None:
        """Let ranks that change and ranks that do not find each other over the transport.

        Args:
            transport: the transport of the rounds.
            step: returns the number of training steps so far; it does not keep the model alive.
        """
        buffer = weakref.ref(self._buffer)

        def tensors() -> list[str]:
            return [] if (kept := buffer()) is None else describe(kept, kept.slots)

        transport.watch_changes(step=step, tensors=tensors)
        self.is_first = transport.is_elastic

    def signature(self) -> list[object]:
        """The facts about the exchanged tensors to be equal on all workers."""
        buffer = self._buffer
        return [buffer.signature(), buffer.agreed, buffer.is_complete(), self.frozen_at, sorted(self.agreed)]

    def change(self, ranks: Ranks, t: int, *, may_leave: bool) -> None:
        """Exchange the trained tensors now, on all ranks alike.

        Args:
            ranks: reaches the other ranks.
            t: the number of rounds so far.
            may_leave: whether frozen tensors may leave the vector.

        Raises:
            ValueError: ranks train other tensors.
            TimeoutError, ConnectionError: a peer is late or gone; names it. The vector stays as it is.
        """
        buffer = self._buffer
        frozen = buffer.frozen()
        is_new = not buffer.is_complete()
        is_due = may_leave and not is_new and self.must_leave(t)
        leaving = frozen if is_due else []
        slots = buffer.candidates(kept=[] if leaving else frozen)
        signature = [slot.signature() for slot in slots]
        self._agree(ranks, slots, is_same=signature == buffer.agreed)
        if leaving:
            self._average(ranks, leaving)
        if signature != buffer.signature():
            buffer.attach(slots)
        buffer.keep()
        buffer.agree()
        if is_new or is_due:
            self.frozen_at = t if frozen and not leaving else None

    def _agree(self, ranks: Ranks, slots: Sequence[Slot], *, is_same: bool) -> None:
        """Compare these tensors with the tensors of the other ranks.

        Args:
            ranks: reaches the other ranks.
            slots: the slots of the tensors to exchange from now on.
            is_same: whether the vector stays as all ranks have it.
        """
        description = describe(self._buffer, slots)
        if not self.agreed:
            self.agreed.add(digest_of([*self._buffer.agreed, *self._buffer.copied_at_start]))
        digest = digest_of(description)
        if is_same and digest in self.agreed:
            return
        # First, as it may raise, and then this rank does all of this again; and what is in flight may be a collective.
        ranks.apply_in_flight()
        ranks.compare_trained(description)
        if len(self.agreed) >= _MAX_AGREED:
            self.agreed.clear()
        self.agreed.add(digest)

    @torch.no_grad()
    def _average(self, ranks: Ranks, leaving: Sequence[Slot]) -> None:
        """These tensors <- their exact average over all ranks."""
        tensors = [slot.memory for slot in leaving]
        vector = FlatVector.pack(tensors)
        vector.push_sum_weight.copy_(self._buffer.vector.push_sum_weight)
        vector.multiply_by_weight_()
        ranks.average_frozen(vector)
        vector.unpack_to(tensors)
        torch.autograd.graph.increment_version([slot.tensor for slot in leaving])


def describe(buffer: FlatBuffer, slots: Sequence[Slot]) -> list[str]:
    """One text for each tensor: the facts to be equal on all ranks, and whether it is frozen."""
    texts = [
        slot.signature() + (", frozen" if slot.is_parameter and not slot.tensor.requires_grad else "") for slot in slots
    ]
    return [*texts, *buffer.copied_signature()]

"""Mixer: one round of communication in two halves, start and finish; and the exact average over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..schedule import Schedule
from ..state import State
from ..transport.base import Transport
from ..transport.deadline import Deadline
from ..worlds.all_or_none import MayBeLost, all_or_none
from ..worlds.world import ALONE, ModelWorld

_T = TypeVar("_T", Tensor, FlatVector)


class Mixer(State, ABC):
    """One round of communication, s <- W(t) s, in two halves, so that other work can run between them.

    `start(s, t)` posts round t. Then either `finish(s)` or `difference(s)` waits and decodes. Do not change or free `s`
    between the two calls.
    """

    _is_bound: bool = False

    def bind(self, mixing: MixingManager, transport: Transport, world: ModelWorld = ALONE) -> None:
        """Set the weights and the transport. The wrapper, or the user, calls it once.

        Args:
            mixing: the weights, over the graph of the ranks.
            transport: the transport over the ranks.
            world: adds up numbers of the processes that hold the model together.

        Raises:
            ValueError: the weights do not suit this mixer, their graph has another number of ranks than the transport,
                or the mixer is bound already.
        """
        if self._is_bound:
            raise ValueError(
                f"got {self}, which belongs to another wrapper (or was bound before), expected a new one: it holds "
                f"the messages and the state of one model; make another {type(self).__name__} with the same arguments"
            )
        self.check(mixing)
        if mixing.graph.world_size != transport.world_size:
            raise ValueError(
                f"got a graph of {mixing.graph.world_size} ranks, expected {transport.world_size}, the size of the "
                "process group; build the graph with that world size"
            )
        self.mixing = mixing
        self.transport = transport
        self._is_bound = True

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """Change the weights and the transport, and keep the state. No round may be in flight.

        Args:
            mixing: see `bind`.
            transport: see `bind`.

        Raises:
            ValueError: see `bind`.
        """
        self._is_bound = False
        self.bind(mixing, transport)

    def check(self, mixing: MixingManager) -> None:
        """Raise ValueError if the weights `mixing` do not suit this mixer."""

    def check_options(
        self,
        schedule: Schedule,
        *,
        overlap: bool | str = False,
        nprocs_per_node: int = 1,
        is_sharded: bool = False,
        has_membership: bool = False,
    ) -> None:
        """Raise ValueError where the options of a wrapper do not suit this mixer. This default takes all of them.

        Args:
            schedule: the steps with a round, and the rounds that are exact averages.
            overlap: whether rounds run during training; "auto": ranks choose.
            nprocs_per_node: the number of processes that hold one model.
            is_sharded: whether several processes hold the shards of a model.
            has_membership: whether workers may die and join.
        """

    @property
    def is_weighted(self) -> bool:
        """Whether the push-sum weight w may differ from one, so that the estimate is x / w."""
        return False

    keeps_models: bool = False
    """Whether the mixer keeps models of peers from round to round. It excludes overlap and exact averages in between.
    """

    never_waits: bool = False
    """Whether no round waits for a message. Then training asks no store either, and does not compare ranks by it."""

    is_skippable: bool = True
    """Whether a rank may leave a round out after it has received the messages. False if messages change the state."""

    @property
    def own_buffer_weight(self) -> float:
        """W_ii of the last started round, for buffers; 1: buffers are corrected in the same way as parameters.

        See [Note: late buffers] of `Overlap`.
        """
        return 1.0

    @property
    def sources(self) -> Sequence[int]:
        """The senders to this rank in the last started round."""
        return range(self.transport.world_size)

    @property
    def received(self) -> Sequence[FlatVector] | None:
        """The messages to this rank in the last round; None: the mixer does not keep them."""
        return None

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """Describe the settings to compare between ranks when the model is wrapped.

        Args:
            dtypes: the dtypes of the parameters, widened to float32 at least.
        """
        return str(self)

    def stats(self) -> dict[str, float]:
        """Return counters of the mixer itself, for `comm_stats()`."""
        return {}

    def close(self) -> None:
        """Release threads and hooks; idempotent."""

    @abstractmethod
    def start(self, s: FlatVector, t: int) -> None:
        """Post round t without waiting.

        Args:
            s: the vector to mix, with its push-sum weight.
            t: the number of the round.
        """

    def begin(self, x: FlatVector, k: int = 0) -> bool:
        """Apply results that have come since the last step; called in each step, before its round.

        Args:
            x: the model, mutated.
            k: the number of optimizer steps so far.

        Returns:
            Whether x was written.
        """
        return False

    def chunks(self, s: FlatVector) -> Sequence[FlatVector]:
        """Return the chunks of s for sending, in order; s itself if it is sent whole. Equal on all ranks."""
        return (s,)

    def start_filling(self, s: FlatVector, t: int, fill: Callable[[int], None]) -> None:
        """Do the same as `start` for a vector whose elements are not written yet.

        Args:
            s: the vector; its push-sum weight is already written.
            t: the number of the round.
            fill: `fill(k)` writes chunk k of `chunks(s)`. It is called once for each chunk, in order, just before the
                chunk is sent. Calls with larger numbers, for the weight, may follow and have no effect.
        """
        for k in range(len(self.chunks(s))):
            fill(k)
        self.start(s, t)

    @abstractmethod
    def finish(self, s: FlatVector) -> None:
        """Wait, then s <- W(t) s in place. Faster than `difference` if s is the model itself.

        Raises:
            TimeoutError, ConnectionError: a peer failed; the error names the peer and the round.
        """

    def difference(self, s: FlatVector) -> float:
        """Wait, then s <- c with alpha * c = (W(t) - I) s in place; returns alpha. This default takes a copy of s.

        c is the correction in x <- x + (W - I) s, for an x that has changed since s was taken. Raises the errors of
        `finish()`.
        """
        before = s.clone()
        self.finish(s)
        s.add_(before, alpha=-1.0)
        return 1.0

    def leave_out_late(self, s: FlatVector, alpha: float) -> None:
        """Leave out the messages to and from peers that have failed since `difference`; mutates its correction s.

        Such a peer has died before it has applied the round. This default changes nothing.

        Args:
            s: the correction, which is not applied yet.
            alpha: its factor.
        """

    def mix(self, x: _T, t: int) -> _T:
        """x <- W(t) x: one whole round on a contiguous tensor, or on a flat vector with its push-sum weight."""
        s = x if isinstance(x, FlatVector) else FlatVector.over(x)
        self.start(s, t)
        self.finish(s)
        return x

    def average(self, x: Tensor, *, num_rounds: int) -> Tensor:
        """Estimate mean_i x_i by the rounds 0, 1, ..., num_rounds - 1 (distributed averaging).

        Args:
            x: the value of this rank, any shape, floating point or complex; not changed.
            num_rounds: the number of rounds. The error falls with `mixing.spectral_gap()`.

        Returns:
            A tensor like x, divided by the push-sum weight.
        """
        result = x.detach().clone(memory_format=torch.contiguous_format)
        s = FlatVector.over(result)
        for t in range(num_rounds):
            self.mix(s, t)
        s.divide_by_weight_()
        return result

    def check_state(self, state: Mapping[str, Any], *, of: object = None) -> None:
        """See `State`."""
        if state and not self.entry_names():
            raise ValueError(
                f"got state {sorted(state)} of another algorithm, expected none for {self}; load it with the algorithm "
                "that saved it"
            )
        super().check_state(state, of=self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class GlobalAverage(Mixer):
    """x_i <- mean_j x_j exactly, by an all-reduce: W = J. The push-sum weight becomes one.

    The average takes effect on all ranks or on none: [Note: all or none] of `all_or_none`. With `may_fail` training
    goes on if a rank of an elastic transport fails during the average: [Note: a lost rank ends the exchange] of
    `MayBeLost`.

    Args:
        transport: the transport over the ranks.
        sums_weights: whether the push-sum weights may have another sum than the world size, because rounds were left
            out. The mean of x is then divided by the mean of the weights.
        may_fail: whether training goes on after an average that a lost rank has ended, instead of an error.

    Attributes:
        has_failed: whether the last average took no effect, with `may_fail`.
        restores: whether a vector whose average fails gets its values back. Else its values are undefined then, and
            the average takes no copy.
    """

    restores = True

    def __init__(self, transport: Transport, *, sums_weights: bool = False, may_fail: bool = False) -> None:
        self.transport = transport
        self._sums_weights, self._may_fail = sums_weights, may_fail
        self._round, self.has_failed = 0, False

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`; 1 if the average took no effect."""
        return 1.0 if self.has_failed else 1 / self.transport.world_size

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`. The all-reduce runs in `finish` or `difference`, and blocks."""
        self._round = t

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`. On an elastic transport s is copied, and restored if the all-reduce fails; see `restores`."""
        transport, self.has_failed = self.transport, False
        with transport.within(Deadline(transport.timeout)):
            if not transport.is_elastic:  # the error of a lost rank ends the training of all ranks
                self._sum(s)
            elif self._may_fail:
                with MayBeLost(transport) as average:
                    self._sum_on_all(s)
                self.has_failed = average.has_lost
            else:
                self._sum_on_all(s)

    def _sum_on_all(self, s: FlatVector) -> None:
        what = f"the global average in round {self._round}"
        with all_or_none(self.transport, what=what, restores=s if self.restores else None):
            self._sum(s)

    def _sum(self, s: FlatVector) -> None:
        for x in s.segments:
            # A sum of many narrow numbers loses digits, so it is taken in float32.
            total = x.float() if x.element_size() < 4 else x
            self._average(total)
            x.copy_(total)
        if self._sums_weights:
            self._average(s.push_sum_weight)
            s.divide_by_weight_()
        s.reset_weight_()

    def _average(self, x: Tensor) -> None:
        self.transport.all_reduce(x, what=f"global average in round {self._round}")
        x.div_(self.transport.world_size)

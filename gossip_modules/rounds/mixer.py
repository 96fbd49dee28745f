"""One round of mixing in two halves: the base of all algorithms, and the exact global average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..flat.buffer import FlatBuffer
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..transport.base import Transport, is_elastic

_T = TypeVar("_T", Tensor, FlatVector)


class NonfiniteRound(Exception):
    """A round has ended without effect: see `Mixer.refuse_nonfinite`."""


class Mixer(ABC):
    """One way of mixing vectors over the ranks: s <- W(t) s, in two halves so that work fits between them.

    `start(s, t)` posts round t. Then either `finish(s)` or `difference(s)` waits and decodes. `s` belongs to the
    mixer from start to then: it must be neither changed nor freed.
    """

    _is_bound: bool = False

    def bind(self, mixing: MixingManager, transport: Transport) -> None:
        """Say whom to talk to. Called once, by the wrapper or by the user.

        Raises:
            ValueError: `mixing` does not suit this algorithm, or it is bound already.
        """
        if self._is_bound:
            raise ValueError(
                f"got {self}, which belongs to another wrapper (or was bound before), expected a new one: a gossiper "
                f"has the messages and the state of one model; make another {type(self).__name__} with the same "
                "arguments"
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
        """Talk to other ranks from now on, with what is kept of the algorithm. No round may be in flight.

        Raises:
            ValueError: as `bind`.
        """
        self._is_bound = False
        self.bind(mixing, transport)

    def check(self, mixing: MixingManager) -> None:
        """Raise ValueError when the algorithm is wrong with these weights."""

    @property
    def is_weighted(self) -> bool:
        """Whether the push-sum weight leaves one, so that the estimate is x / w."""
        return False

    keeps_models: bool = False
    """Whether models of peers are kept from round to round, so that neither overlap nor exact averages fit between."""

    is_skippable: bool = True
    """Whether a round may be left out after it was received: not where its messages have changed the state."""

    @property
    def own_buffer_weight(self) -> float:
        """W_ii of the last round that was started, for buffers; 1 = buffers are corrected as parameters are.

        See [Note: late buffers] of `OverlapEngine`.
        """
        return 1.0

    @property
    def sources(self) -> Sequence[int]:
        """The ranks of the group that this one has heard in the last round that was started."""
        return range(self.transport.world_size)

    has_news: bool = False
    """Whether `begin` will exchange something with other ranks, so that x must be finite."""

    can_recover: bool = False
    """Whether `recover` makes a model finite, so that no round is ever left out."""

    def begin(self, x: FlatVector, k: int = 0) -> bool:
        """Training is at x, at a safe point after k optimizer steps; the first call is where it begins.

        Returns:
            Whether x was written.
        """
        return False

    def recover(self, x: FlatVector) -> None:
        """Where it `can_recover`: x <- a finite model, as it has infinities or NaN that are to be skipped."""

    @property
    def is_in_flight(self) -> bool:
        """Whether there is something that `flush()` would apply."""
        return False

    def flush(self, x: FlatVector) -> bool:
        """x <- x + all that the mixer itself has in flight; whether x was written."""
        return False

    def is_due(self, k: int) -> bool:
        """Whether there is a round after k optimizer steps; asked once for each of them, the same on all ranks."""
        return True

    def forget_models(self) -> None:
        """The user has let all ranks take one model: start anew what is kept of other models."""
        self.reset()

    def end_average(self) -> None:
        """All ranks have taken one model in place of a round: start anew what such a round makes wrong."""

    def refuse_nonfinite(self, agree: Callable[[bool], bool]) -> None:
        """Let rounds end with `NonfiniteRound`, all as before, where an answer to one holds infinities or NaN.

        agree: whether it is finite for all processes of a node, given whether it is here.
        """

    def shared(self, x: FlatVector) -> Sequence[Tensor]:
        """What a round has written beside x, the model, and all processes of a node must have."""
        return ()

    def take_shared(self, x: FlatVector) -> None:
        """What `shared` gives was written by another process, whose round it was."""

    def watch_optimizer(self, buffer: FlatBuffer, *, is_whole: bool = True) -> None:
        """Watch the optimizers of the model, as far as the algorithm needs it; once, after `bind`.

        is_whole: whether this process has the whole model, and not a shard of it.
        """

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """What all ranks must agree on. dtypes: of the parameters, in float32 at least."""
        return str(self)

    def close(self) -> None:
        """Let go of everything outside; idempotent."""

    @abstractmethod
    def start(self, s: FlatVector, t: int) -> None:
        """Post round t without waiting. s: the vector that is mixed, with its push-sum weight."""

    def chunks(self, s: FlatVector) -> Sequence[FlatVector]:
        """What s is sent as, one after the other; s itself where it is sent whole. The same on all ranks."""
        return (s,)

    def start_filling(self, s: FlatVector, t: int, fill: Callable[[int], None]) -> None:
        """As `start`, for an s that is not there yet.

        Args:
            s: its weight is there.
            t: the round.
            fill: `fill(k)` writes chunk k of `chunks(s)`; called once for each, in their order, just before it is sent
                where s is sent in chunks. Calls with larger numbers (the weight's) may follow; they mean nothing.
        """
        for k in range(len(self.chunks(s))):
            fill(k)
        self.start(s, t)

    @abstractmethod
    def finish(self, s: FlatVector) -> None:
        """Wait, then s <- W(t) s. In place; the fast way when nothing changed meanwhile.

        Raises:
            TimeoutError, ConnectionError: naming the peer and the round.
        """

    def difference(self, s: FlatVector) -> float:
        """Wait, then s <- c with alpha * c = (W(t) - I) s; returns alpha. In place; unless overridden by way of a copy.

        This is the correction of the law x <- x + (W - I) s, for x that has moved on since s was taken. Raises as
        `finish()`.
        """
        before = s.clone()
        self.finish(s)
        s.add_(before, alpha=-1.0)
        return 1.0

    def mix(self, x: _T, t: int) -> _T:
        """x <- W(t) x: one whole round on any contiguous tensor, or on a vector that keeps its push-sum weight."""
        s = x if isinstance(x, FlatVector) else FlatVector.over(x)
        self.start(s, t)
        self.finish(s)
        return x

    def average(self, x: Tensor, *, num_rounds: int) -> Tensor:
        """Distributed averaging: the estimate of mean_i x_i after rounds 0, 1, ..., num_rounds - 1.

        Args:
            x: this rank's value, any shape, floating point or complex; not changed.
            num_rounds: how many rounds; the error falls with `mixing.spectral_gap()`.

        Returns:
            A tensor like x, de-biased by the push-sum weight.
        """
        result = x.detach().clone(memory_format=torch.contiguous_format)
        s = FlatVector.over(result)
        for t in range(num_rounds):
            self.mix(s, t)
        s.divide_by_weight_()
        return result

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm keeps from round to round; tensors and plain values only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave."""
        if state:
            raise ValueError(f"got state {sorted(state)} of another algorithm, expected none for {self}")

    def reset(self) -> None:
        """Start anew, as without any state."""
        self.load_state_dict({})

    def state_for_newcomer(self) -> dict[str, Any]:
        """What a worker that joins goes on from: nothing of links to peers."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class GlobalAverage(Mixer):
    """x_i <- mean_j x_j exactly, by all-reduce: W = J. The weight becomes one, since weights sum to the world size.

    Args:
        transport: over the ranks.
        sums_weights: whether weights may have another sum, since rounds were left out: the mean of x is then divided by
            that of the weights.
    """

    def __init__(self, transport: Transport, *, sums_weights: bool = False) -> None:
        self.transport = transport
        self._sums_weights = sums_weights
        self._round = 0

    has_failed: bool = False
    """Whether the last one has not taken effect."""

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`."""
        return 1 / self.transport.world_size

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`. The all-reduce itself blocks, in `finish` or `difference`."""
        self._round = t

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`. Where it fails on an elastic transport, whose ranks go on, s is as before; costs a copy."""
        before = s.clone() if is_elastic(self.transport) else None
        try:
            self._sum(s)
        except BaseException:
            if before is not None:
                s.copy_(before)
            raise

    def _sum(self, s: FlatVector) -> None:
        for x in s.segments:
            # A sum of many narrow numbers loses digits, so it is taken in float32.
            total = x.float() if x.element_size() < 4 else x
            self._average(total)
            x.copy_(total)
        if self._sums_weights:
            self._average(s.push_sum_weight)
            s.divide_by_weight_()
        s.push_sum_weight.fill_(1.0)

    def _average(self, x: Tensor) -> None:
        self.transport.all_reduce(x, what=f"global average in round {self._round}")
        x.div_(self.transport.world_size)


class ElasticAverage(GlobalAverage):
    """`GlobalAverage` on an elastic transport: where a rank fails in it, those who live keep what they have.

    All ranks tell each other before it that they have come, and after it that they have the result: without a word
    from each of the others a rank goes back to what it had. So it takes effect on all or on none, unless a rank dies
    while it says the latter; then some may have averaged, and the next average makes all equal again. Costs a copy of
    the vector.
    """

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`; 1 where nothing was averaged."""
        return 1.0 if self.has_failed else super().own_buffer_weight

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`."""
        try:
            super().finish(s)
            self.has_failed = False
        except (ConnectionError, TimeoutError):
            self.has_failed = True

    def _sum(self, s: FlatVector) -> None:
        super()._sum(s)
        self.transport.all_reduce(
            torch.zeros(1, device="cpu"), what=f"end of the global average in round {self._round}"
        )

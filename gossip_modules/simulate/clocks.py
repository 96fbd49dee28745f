"""When each of n ranks starts each of its steps, for methods whose steps are in lockstep: recursions over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..rounds.rows import Array, Rows
from .delays import ComputeModel, MessageCost, Network

FORWARD_SHARE = 1 / 3
"""Of the time of forward and backward."""
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Of gradients, as DistributedDataParallel reduces them: the first bucket is small, so that the wire starts early."""
ROUND_MEASURE_BYTES, AVERAGE_MEASURE_BYTES = 32, 16
"""What each rank tells all others after a round under `ConsensusControl`, and after an average that follows a round."""
_MEASURE_PASSES = 6  # over the model, in a round under control: two norms of differences of two vectors, and a copy


class ControlledRound(NamedTuple):
    """What ranks do in a step with a round under `ConsensusControl`; after each part of it they gather measurements.

    rounds: of gossip, one after another; none where averages are exact alone.
    has_average: whether an exact average follows.
    """

    rounds: tuple[Rows, ...]
    has_average: bool

    def measure_bytes(self, num_ranks: int) -> int:
        """What a rank sends to gather measurements."""
        of_average = AVERAGE_MEASURE_BYTES if self.rounds else ROUND_MEASURE_BYTES
        return (num_ranks - 1) * (len(self.rounds) * ROUND_MEASURE_BYTES + self.has_average * of_average)


Exchanges: TypeAlias = Sequence[Rows | None] | ControlledRound
"""What ranks do in a step, one after another: rounds of gossip by the rows of W(t), and exact averages (None)."""


class Clock(ABC):
    """When each rank starts its step k: `starts`, float64 [n], in seconds from the beginning of training.

    Step k is the round or average that its forward begins with, where there is one, and the compute after it. `starts`
    is when the former is done.

    Args:
        compute: how long steps take.
        network: the links.
        message: what a rank says to a peer in one phase of a round.
        model_bytes: of the parameters, which global averages send as they are.

    Attributes:
        waited_seconds: float64 [n], what each rank has waited so far for communication and for others.
        begins_with_round: whether there is something to say at the first forward.
    """

    begins_with_round = True

    def __init__(
        self,
        compute: ComputeModel,
        network: Network,
        message: MessageCost,
        *,
        model_bytes: float | None = None,
    ) -> None:
        self.compute, self.network, self.message = compute, network, message
        self.model_bytes = message.num_bytes if model_bytes is None else model_bytes
        self.starts = np.zeros(network.num_ranks)
        self.waited_seconds = np.zeros(network.num_ranks)
        self.step = 0  # the next one

    def advance(self, exchanges: Exchanges) -> None:
        """Go on to the next step. exchanges: rounds and averages that it begins with."""
        arrivals = self.arrivals() if self.step else self.starts
        starts = self._meet(arrivals, exchanges)
        self.waited_seconds += starts - arrivals
        self.starts[:] = starts
        self.step += 1

    def arrivals(self) -> Array:
        """When each rank has computed the step that it has started."""
        return self.starts + self.compute.step_seconds(self.step - 1, num_ranks=len(self.starts))

    @abstractmethod
    def _meet(self, arrivals: Array, exchanges: Exchanges) -> Array:
        """When each rank may start, having come at `arrivals`."""

    def _exchanged(self, since: Array, exchanges: Exchanges) -> Array:
        """When each rank has the result of all exchanges, if it takes part since then."""
        if len(since) == 1:
            return since
        if isinstance(exchanges, ControlledRound):
            return self._controlled(since, exchanges)
        for rows in exchanges:
            since = self._averaged(since) if rows is None else self._mixed(since, rows)
        return since

    def _controlled(self, since: Array, step: ControlledRound) -> Array:
        """Whoever gathers measurements waits for all ranks, so all are done at one time."""
        links, measure = self.network.links, self.network.gather_seconds
        passes = _MEASURE_PASSES * links.memory_seconds(self.model_bytes)
        for round_ in step.rounds:
            since = np.full(len(since), self._mixed(since, round_).max() + passes + measure(ROUND_MEASURE_BYTES))
        if step.has_average:
            num_bytes = AVERAGE_MEASURE_BYTES if step.rounds else ROUND_MEASURE_BYTES
            since = self._averaged(since) + passes + measure(num_bytes)
        return since

    def _averaged(self, since: Array) -> Array:
        """When all have an exact average."""
        return np.full(len(since), since.max() + self._average_seconds())

    def _mixed(self, since: Array, round_: Rows) -> Array:
        """When each rank has mixed what its peers have sent in a round of gossip."""
        return round_.latest(since + self.message.encode_seconds) + self.network.exchange_seconds(round_, self.message)

    def _average_seconds(self) -> float:
        """An average over all ranks, from when the last one has come."""
        return self.network.all_reduce_seconds(self.model_bytes)


class SyncClock(Clock):
    """Rounds that training waits for: start_i(k + 1) = max over i and its in-peers of their arrival, + exchange."""

    def _meet(self, arrivals: Array, exchanges: Exchanges) -> Array:
        return self._exchanged(arrivals, exchanges)


class GatherClock(SyncClock):
    """As `SyncClock`, where every rank gets the compressed messages of all, and adds them up by itself.

    Args:
        compute, network: see `Clock`.
        message: what a rank sends to each of the others.
    """

    def __init__(self, compute: ComputeModel, network: Network, message: MessageCost) -> None:
        # An all-reduce of so many bytes sends what n - 1 messages do.
        super().__init__(compute, network, message, model_bytes=message.num_bytes * network.num_ranks / 2)

    def _average_seconds(self) -> float:
        n, message = self.network.num_ranks, self.message
        coding = message.encode_seconds + (n - 1) * message.decode_seconds
        return coding + self.network.gather_seconds(message.num_bytes)


class OverlapClock(Clock):
    """Rounds under the compute: start_i(k + 1) = max(arrival_i, when the round that began at start(k) is done).

    The snapshot and the correction, a pass over the model each, are in training's way.
    """

    _round_ends: Array | None = None  # when the round that is under way is done

    def _meet(self, arrivals: Array, exchanges: Exchanges) -> Array:
        starts = arrivals if self._round_ends is None else np.maximum(arrivals, self._round_ends)
        self._round_ends = None
        if exchanges and len(starts) > 1:
            starts = starts + 2 * self.network.links.memory_seconds(self.model_bytes)
            self._round_ends = self._exchanged(starts, exchanges)
        return starts


class BucketClock(Clock):
    """DistributedDataParallel: gradients come evenly over the backward pass, and full buckets are all-reduced under it.

    A bucket begins when all ranks have it and the one before is done; the last one nothing hides. What is averaged at a
    forward is the gradient of the step before it, so the first forward has none.
    """

    begins_with_round = False

    def _meet(self, arrivals: Array, exchanges: Exchanges) -> Array:
        if self.step == 0 or len(arrivals) == 1:
            return arrivals
        compute = self.compute.compute_seconds(self.step - 1, num_ranks=len(arrivals))
        done, reduced = 0.0, 0.0
        for size in bucket_bytes(self.message.num_bytes):
            reduced += size
            left = (1 - reduced / self.message.num_bytes) * (1 - FORWARD_SHARE) * compute  # of the backward pass
            done = max(done, float((arrivals - left).max())) + self.network.all_reduce_seconds(size)
        return np.full(len(arrivals), done)


def bucket_bytes(num_bytes: float) -> list[float]:
    """How DistributedDataParallel cuts so many bytes of gradients.

    >>> bucket_bytes(30 << 20)
    [1048576, 26214400, 4194304]
    """
    sizes = [min(FIRST_BUCKET_BYTES, num_bytes)]
    while (rest := num_bytes - sum(sizes)) > 0:
        sizes.append(min(BUCKET_BYTES, rest))
    return sizes

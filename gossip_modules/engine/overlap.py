"""Overlap: rounds on the gossip thread, under the next forward and backward."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..flat.nonfinite import is_finite
from ..flat.vector import FlatVector, add_
from ..profiling import span
from ..rounds.flights import Flight, Flights
from ..rounds.mixer import Mixer
from ..state import State, transient
from ..transport.base import Transport

_ROUNDING = 16  # units in the last place


@dataclass(eq=False)
class LateRound(Flight):
    """A round of the whole model on the gossip thread.

    Attributes:
        mixer: the mixer of the round; None: the correction comes from a checkpoint.
        is_average: whether the round is the exact average of a schedule.
        is_finite: whether the correction is finite; written by the job.
        own_buffer_weight: W_ii for buffers, when the round has arrived: see [Note: late buffers].
        is_converted: whether the buffers are converted: see [Note: late buffers].
    """

    mixer: Mixer | None = None
    is_average: bool = False
    is_finite: bool = True
    own_buffer_weight: float = 1.0
    is_converted: bool = False

    @property
    def sources(self) -> Sequence[int]:
        """The senders to this rank."""
        return () if self.mixer is None else self.mixer.sources

    @property
    def received(self) -> Sequence[FlatVector] | None:
        """See `Mixer`."""
        return None if self.mixer is None else self.mixer.received


class Overlap(State):
    """Overlap SGP: the round under training, at most one: x <- x + (W(t) - I) s when round t is done.

    Round t begins before forward k, with s_j the copies of all ranks j:

        s_i <- x_i                   # `depart`: the gossip thread sends s_i, and w_i of SGP with it
        c_i <- sum_j W_ij s_j - s_i  # the gossip thread, under forward and backward k: `_difference`
        x_i <- x_i + u_i             # the optimizer step after forward k
        x_i <- x_i + c_i             # before forward k + 1, or up to max_staleness forwards later: `apply`
        z_i = x_i / w_i              # as in SGP (algorithms/sgp.py)

    [Note: Overlap] s is a snapshot of x. The round that starts before forward k is applied before forward k + 1, after
    one optimizer step u: x <- W x + u. The step u is neither lost nor scaled. Since 1^T (W - I) = 0, the sum of x over
    ranks contains every gradient step exactly, however late a round is applied.

    [Note: Staleness] One round is in flight at a time, so with max_staleness = k a round starts every k + 1 steps at
    most (tau = k + 1 in Overlap SGP). An algorithm that chooses the steps of its rounds keeps them; a late round then
    ends at the latest when the next one begins. Rounds start at fixed steps, so their number is equal on all ranks,
    whatever the speed of a rank. With one round in flight the recursion s(t + 1) = W(t) s(t) + u(t) is stable for every
    k; a pipeline of k stale corrections is not. A round is applied as soon as it is complete. At its last forward,
    training waits for it.

    [Note: Filling] If x is sent in chunks, the gossip thread corrects x, copies it into the snapshot and sends it,
    chunk by chunk. So the first chunk leaves after 16 MB instead of two passes over the model. Training waits until the
    last chunk is copied, but not until all are posted. On a fast link posting takes the gossip thread longer than
    copying, since a send first copies into the socket. So the thread fills twice as many chunks before each next post.
    A correction belongs to the flight in `flights` until one assignment replaces the flight. An interrupt before or
    after the assignment loses nothing, and the next flush ends the round.

    [Note: late buffers] BatchNorm statistics decay while a round is in flight. The correction (W - I) s may then
    subtract more than is left, and a variance would become negative. So buffers are averaged with their present values
    when the round is applied: b <- W_ii b + r, where r = (W s)_i - W_ii s_i is the part of the peers. No weight is
    negative, so variances stay non-negative. The sum of the buffers over ranks is not kept, and need not be.

    Assran et al., arXiv 1811.10792, Algorithm 2 (Overlap SGP).

    Args:
        max_staleness: the largest lateness of a round in forwards; then training waits for it.
        is_eager: whether a complete round is applied before its last forward. False applies all rounds at a fixed step,
            so that the processes of a node agree.

    Attributes:
        flights: the round in flight.
    """

    _snapshot: FlatVector | None = transient(None)  # the model as it was sent, and then the correction
    _sent_buffers: list[Tensor] = transient([])  # copies of the snapshot's buffers, before it becomes a correction
    _flushed_alpha: float | None = transient(None)  # alpha of the correction that a flush applied since the last round
    _saved: Mapping[str, Any] | None = transient(None)  # the correction of a checkpoint, until a vector has its layout

    def __init__(self, *, max_staleness: int = 0, is_eager: bool = True) -> None:
        self.max_staleness, self.is_eager = max_staleness, is_eager
        self.flights: Flights[LateRound] = Flights()

    @property
    def flight(self) -> LateRound | None:
        """The round in flight."""
        return self.flights.oldest

    def begin_step(self) -> LateRound | None:
        """Let `add_again` add nothing from now on; returns the round in flight."""
        self._flushed_alpha = None
        return self.flights.oldest

    # A round departs.

    def depart(
        self,
        x: FlatVector,
        mixer: Mixer,
        t: int,
        *,
        begun: int,
        landing: LateRound | None,
        is_average: bool,
        checks: bool,
    ) -> float:
        """Apply the correction of the round that has arrived, and pass a snapshot of x to the gossip thread.

        Args:
            x: the model, mutated.
            mixer: the mixer of the new round.
            t: the number of the new round.
            begun: the number of optimizer steps before the new round.
            landing: the round that has arrived; None: no round is in flight.
            is_average: whether the new round is the exact average of a schedule.
            checks: whether the gossip thread checks that the correction is finite.

        Returns:
            The seconds for which training waited for the copy.
        """
        transport = mixer.transport

        def describe() -> str:
            names, rank = transport.names, transport.rank
            return f"rank {names[rank]}: round {t} with ranks {[names[i] for i in mixer.sources if i != rank]}"

        last = begun + 1 + self.max_staleness
        flight = LateRound(begun, begun + 1 if self.is_eager else last, last, t, describe=describe)
        flight.mixer, flight.is_average = mixer, is_average
        cut = mixer.chunks(x) if x.raw.device.type == "cpu" else ()
        if len(cut) > 1:
            return self._fill(flight, mixer, x, cut, landing, checks=checks)
        if landing is not None:
            self.apply(landing, x)
        assert self.flight is None, "one round in flight at a time"
        snapshot = self._snapshot_of(x).copy_(x)
        self.flights.follow_training(x.raw.device)  # s is written before it is sent

        def run() -> float:
            mixer.start(snapshot, t)
            return _difference(flight, mixer, snapshot, checks=checks)

        flight.job = run
        self._keep_buffers(snapshot)
        self.flights.begin(flight, transport)
        return 0.0

    def _fill(
        self,
        flight: LateRound,
        mixer: Mixer,
        x: FlatVector,
        cut: Sequence[FlatVector],
        landing: LateRound | None,
        *,
        checks: bool,
    ) -> float:
        """Let the gossip thread fill and send the snapshot in chunks: see [Note: Filling]."""
        assert landing is not None or self.flight is None, "one round in flight at a time"
        snapshot = self._snapshot_of(x)
        pairs = tuple(zip(cut, mixer.chunks(snapshot), strict=True))
        filling = Filling(x, snapshot, pairs, alpha=None if landing is None else landing.result)

        def run() -> float:
            with filling:
                mixer.start_filling(snapshot, flight.t, filling.fill)
            return _difference(flight, mixer, snapshot, checks=checks)

        flight.job = run
        start = time.perf_counter()
        self.flights.begin(flight, mixer.transport, in_place_of=landing)
        with span("gossip.fill"):
            try:
                filling.wait()
            finally:  # x and the snapshot are equal now
                self._keep_buffers(x)
        return time.perf_counter() - start

    def _keep_buffers(self, s: FlatVector) -> None:
        """Copy the sent buffers, before the gossip thread overwrites them: see [Note: late buffers]."""
        for kept, buffer in zip(self._sent_buffers, s.buffers, strict=True):
            kept.copy_(buffer)

    def _snapshot_of(self, x: FlatVector) -> FlatVector:
        """Return the memory for a snapshot of x."""
        if self._snapshot is None or self._snapshot.layout != x.layout or self._snapshot.raw.device != x.raw.device:
            assert self.flight is None, "a correction is in the snapshot"
            self._snapshot = x.like()
            self._sent_buffers = [torch.empty_like(buffer) for buffer in x.buffers]
        return self._snapshot

    # A round arrives.

    def wait(self, flight: LateRound, transport: Transport) -> None:
        """Wait for the round, which stays in flight, with its correction in the snapshot."""
        self.flights.wait(flight, transport)
        if flight.mixer is not None:
            assert self._snapshot is not None
            flight.mixer.leave_out_late(self._snapshot, flight.result)
            flight.own_buffer_weight = flight.mixer.own_buffer_weight

    def convert_buffers(self, flight: LateRound, x: FlatVector) -> None:
        """Prepare the buffers of x and of the correction c, once for an arrived round.

        b <- W_ii b in x, and c <- r / alpha, so that x + alpha c has the average: see [Note: late buffers].
        """
        self._take_saved(x)
        assert self._snapshot is not None
        own = flight.own_buffer_weight
        if flight.is_converted or own == 1.0:
            return
        flight.is_converted = True
        share = (1 - own) / flight.result
        vectors = x.buffers, self._snapshot.buffers, self._sent_buffers
        for segment, b, c, s in zip(x.layout.buffer_segments, *vectors, strict=True):
            add_(c, s, alpha=share)
            b.mul_(own)
            for first, last, is_moment in segment.coded():
                if not is_moment:  # a rest of W_ii s - W_ii s is a rounding error, and no part of a peer
                    rest, least = c[first:last], _ROUNDING * torch.finfo(c.dtype).eps * abs(share)
                    rest.masked_fill_(rest.abs() <= least * s[first:last].abs(), 0.0)

    def apply(self, flight: LateRound, x: FlatVector, *, is_flush: bool = False) -> None:
        """x <- x + the correction of the round that has arrived. The round is no longer in flight.

        Args:
            flight: the round, with converted buffers.
            x: the model, mutated.
            is_flush: whether `add_again` may add the correction once more.
        """
        assert self._snapshot is not None
        self.flights.end(flight)
        with span("gossip.apply"):
            x.add_(self._snapshot, alpha=flight.result)
        if is_flush:
            self._flushed_alpha = flight.result

    def leave_out(self, flight: LateRound) -> None:
        """Let the correction of an arrived round be zero."""
        assert self._snapshot is not None
        self._snapshot.raw.zero_()
        self._snapshot.push_sum_weight.zero_()
        flight.is_finite = flight.is_converted = True

    def add_again(self, x: FlatVector) -> bool:
        """Add the correction of the last flush to x once more; it is in the snapshot until the next round.

        Returns:
            Whether x was written.
        """
        if self._snapshot is None or self._flushed_alpha is None or self._snapshot.layout != x.layout:
            return False
        parameters, corrections = (vector.where(is_buffer=False).segments for vector in (x, self._snapshot))
        for own, correction in zip(parameters, corrections, strict=True):
            add_(own, correction, alpha=self._flushed_alpha)
        return True

    # A round in a checkpoint.

    def saved(self, flight: LateRound) -> dict[str, Any]:
        """Return an arrived round for a checkpoint; shares memory."""
        if self._saved is not None:
            return dict(self._saved)
        assert self._snapshot is not None
        return {
            "begun": flight.begun,
            "first": flight.first,
            "last": flight.last,
            "t": flight.t,
            "alpha": flight.result,
            "is_average": flight.is_average,
            "is_finite": flight.is_finite,
            "own_buffer_weight": flight.own_buffer_weight,
            "is_converted": flight.is_converted,
            "correction": self._snapshot.raw,
            "weight": self._snapshot.push_sum_weight.clone(),  # torch.save refuses one memory of two types
            "sent_buffers": self._sent_buffers,
        }

    def resume(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the rounds of `saved`, one or none."""
        self.flights.cancel()
        self._saved = None
        for each in saved:
            flight = LateRound(*(each[name] for name in ("begun", "first", "last", "t")))
            flight.is_average, flight.is_finite = each["is_average"], each["is_finite"]
            flight.own_buffer_weight, flight.is_converted = each["own_buffer_weight"], each["is_converted"]
            self.flights.note(flight, each["alpha"])
            self._saved = copy.deepcopy(each)

    def _take_saved(self, x: FlatVector) -> None:
        """Put the correction of a checkpoint into the snapshot, which has the layout of x."""
        if (saved := self._saved) is None:
            return
        snapshot = self._snapshot = x.like()
        self._saved = None
        snapshot.raw.copy_(saved["correction"])
        snapshot.push_sum_weight.copy_(saved["weight"])
        self._sent_buffers = [own.clone().copy_(b) for own, b in zip(x.buffers, saved["sent_buffers"], strict=True)]

    def close(self) -> None:
        """End the thread and free the buffers; idempotent."""
        self.flights.close()
        self._snapshot, self._sent_buffers, self._saved = None, [], None


def _difference(flight: LateRound, mixer: Mixer, snapshot: FlatVector, *, checks: bool) -> float:
    """Turn the snapshot into the correction, on the gossip thread; returns alpha."""
    alpha = mixer.difference(snapshot)
    flight.is_finite = not checks or is_finite(snapshot)
    return alpha


class Filling:
    """x <- x + alpha * s, then s <- x, chunk by chunk on the gossip thread.

    Use it as a context manager. At its end all chunks are processed, even if the round fails.

    Args:
        x, s: two vectors with equal layouts; s is the correction of the last round, if there is one.
        chunks: the chunks of x and s, in pairs.
        alpha: the alpha of the correction; None: there is no correction.
    """

    def __init__(
        self, x: FlatVector, s: FlatVector, chunks: Sequence[tuple[FlatVector, FlatVector]], *, alpha: float | None
    ) -> None:
        self._x, self._s, self._chunks, self._alpha = x, s, chunks, alpha
        self._num_done = 0
        self._is_done = threading.Event()

    def __enter__(self) -> Filling:
        if self._alpha is not None:
            self._x.push_sum_weight.add_(self._s.push_sum_weight, alpha=self._alpha)
        self._s.push_sum_weight.copy_(self._x.push_sum_weight)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for k in range(self._num_done, len(self._chunks)):
                self._fill(k)
        finally:
            self._is_done.set()

    def fill(self, k: int) -> None:
        """Process at least the chunks up to k; see `Mixer.start_filling`.

        Each call doubles the number of processed chunks: see [Note: Filling] of `Overlap`.
        """
        for index in range(self._num_done, min((2 << k) - 1, len(self._chunks))):
            self._fill(index)

    def _fill(self, k: int) -> None:
        x, s = self._chunks[k]
        self._num_done = k + 1  # before the work, so that a chunk that fails is not corrected twice
        with span("gossip.fill"):
            if self._alpha is None:
                s.raw.copy_(x.raw)
            else:
                x.apply_and_refresh_(s, alpha=self._alpha)
        if self._num_done == len(self._chunks):
            self._is_done.set()

    def wait(self) -> None:
        """Wait until all chunks are processed. It depends on this process only, not on peers."""
        try:
            self._is_done.wait()
        except BaseException:  # Control-C: x must not stay half corrected
            self._is_done.wait()
            raise

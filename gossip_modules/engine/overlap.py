"""OverlapEngine: runs rounds on the gossip thread, under the next forward and backward."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..flat.nonfinite import FiniteCheck, is_finite, log_left_out
from ..flat.vector import FlatVector, add_
from ..profiling import span
from ..rounds.mixer import Mixer
from ..schedule import Action, Schedule
from ..state import Restart, transient
from ..transport.threads import CallThread
from ..worlds.world import ALONE, ModelWorld
from .engine import LockstepEngine

_ROUNDING = 16  # units in the last place


@dataclass
class _Flight:
    """A round on the gossip thread, and the step before it."""

    job: Callable[[], float]
    step: int
    mixer: Mixer
    t: int
    is_finite: bool = True  # whether the correction is finite; written by the job
    is_converted: bool = False  # see [Note: late buffers]
    future: Future[float] = field(default_factory=Future)
    is_submitted: bool = False


class OverlapEngine(LockstepEngine):
    """Rounds on the gossip thread while training computes: x <- x + (W(t) - I) s when round t is done.

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
    A correction belongs to the flight in `_flight` until one assignment replaces the flight. An interrupt before or
    after the assignment loses nothing, and the next flush ends the round.

    [Note: late buffers] BatchNorm statistics decay while a round is in flight. The correction (W - I) s may then
    subtract more than is left, and a variance would become negative. So buffers are averaged with their present values
    when the round is applied: b <- W_ii b + r, where r = (W s)_i - W_ii s_i is the part of the peers. No weight is
    negative, so variances stay non-negative. The sum of the buffers over ranks is not kept, and need not be.

    Assran et al., arXiv 1811.10792, Algorithm 2 (Overlap SGP).

    Args:
        gossiper: the mixer, bound to its peers; rounds call it on the gossip thread.
        schedule: the steps with gossip or averages. A round starts every max_staleness + 1 steps at most, unless the
            algorithm chooses the steps.
        max_staleness: the largest lateness of a round in forwards; then training waits for it.
        is_eager: whether a complete round is applied before its last forward. False applies all rounds at a fixed step,
            so that the processes of a node agree.
        on_nonfinite: see `LockstepEngine`; the gossip thread checks the correction before it is applied. If messages
            change the state of peers, "raise" checks x before each round and each exact average, as `SyncEngine` does.
        world: see `LockstepEngine`.
    """

    adds_again = True

    _snapshot: FlatVector | None = transient(None)
    _sent_buffers: list[Tensor] = transient([])  # copies of the snapshot's buffers, before it becomes a correction
    _flushed_alpha: float | None = transient(None)  # alpha of the correction that a flush applied since the last round
    _thread: CallThread | None = transient(None)
    _stream: torch.Stream | None = transient(None)

    def __init__(
        self,
        gossiper: Mixer,
        schedule: Schedule,
        *,
        max_staleness: int = 0,
        is_eager: bool = True,
        on_nonfinite: str = "raise",
        world: ModelWorld = ALONE,
    ) -> None:
        if not gossiper.has_own_times:
            schedule = replace(schedule, gossip_every=max(schedule.gossip_every, max_staleness + 1))
        super().__init__(gossiper, schedule, on_nonfinite=on_nonfinite, world=world)
        self.max_staleness = max_staleness
        self.is_eager = is_eager
        self._flight: _Flight | None = None
        self._is_finite = FiniteCheck()

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        return self._flight is not None

    @property
    def can_leave_out(self) -> bool:
        """See `Engine`: the memory of an algorithm may change on the gossip thread."""
        return self.gossiper.is_plain

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        flight, alpha, staleness, has_changed = self._flight, None, 0, False
        if flight is None:
            if self.gossiper.has_news:
                self._check_finite(self.gossiper, x)
            has_changed = self.gossiper.begin(x, self.step)
        self._flushed_alpha = None
        if flight is not None:
            is_last = self.step - flight.step > self.max_staleness or self._begins_round()
            if is_last or (self.is_eager and flight.future.done()):
                alpha, staleness = self._arrive(flight, x), self._staleness_of(flight)
        mixer = self._next_mixer()
        if mixer is not None:
            self._check_finite(mixer, x)
        if alpha is not None:
            self._convert_buffers(x, alpha)
        if mixer is not None and x.raw.device.type == "cpu" and len(mixer.chunks(x)) > 1:
            self._fill_and_depart(mixer, x, alpha)
        else:
            if alpha is not None:
                self._apply(x, alpha)
            if mixer is not None:
                self._copy_and_depart(mixer, x)
        if alpha is not None:
            self.stats.record(staleness)
        return alpha is not None or has_changed

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`."""
        flight = self._flight
        if flight is None:
            return False
        alpha = self._arrive(flight, x)
        self._convert_buffers(x, alpha)
        self._apply(x, alpha)
        self._flushed_alpha = alpha
        self.stats.record(self._staleness_of(flight))
        return True

    def saved_flights(self) -> list[dict[str, Any]] | None:
        """See `Engine`."""
        return None if self._flight is not None else super().saved_flights()

    def add_again(self, x: FlatVector, *, after: int = 0) -> bool:
        """See `Engine`: the correction of the only flush is in the snapshot until the next round."""
        if after or self._snapshot is None or self._flushed_alpha is None or self._snapshot.layout != x.layout:
            return False
        parameters, corrections = (vector.where(is_buffer=False).segments for vector in (x, self._snapshot))
        for own, correction in zip(parameters, corrections, strict=True):
            add_(own, correction, alpha=self._flushed_alpha)
        return True

    def close(self) -> None:
        """See `Engine`. A round in flight ends by itself, since peers have its message."""
        super().close()
        if self._thread is not None:
            self._thread.close()
        self._thread = self._snapshot = self._flight = None
        self._sent_buffers = []

    def __getstate__(self) -> dict[str, Any]:
        assert self._flight is None, "flush() before copying: a round is in flight"
        return super().__getstate__()

    def _begins_round(self) -> bool:
        """Whether a round begins in this step, as in each step at the beginning with `average_until`."""
        return self._action(self.step) is not Action.SKIP

    def _staleness_of(self, flight: _Flight) -> int:
        return max(self.step - flight.step - 1, 0)

    def _arrive(self, flight: _Flight, x: FlatVector) -> float:
        """Wait for the round and return its alpha. The round stays in flight, with its correction in the snapshot."""
        if not flight.is_submitted:  # an interrupt came before
            self._submit(flight)
        start = time.perf_counter()
        with span("gossip.wait"):
            try:
                assert self._thread is not None, "a round in flight runs on the gossip thread"
                self.is_waiting = True
                alpha = self._thread.result(flight.future, **self._limit_of(flight.mixer, flight.t))
            except Exception:  # an error of the round; an interrupt leaves the round in flight
                self._flight = None
                raise
            finally:
                self.is_waiting = False
        self.stats.wait_seconds += time.perf_counter() - start
        self.gossiper.transport.traffic.mixed(self._staleness_of(flight))  # before the next round departs
        if self._stream is not None:
            torch.accelerator.current_stream(x.raw.device).wait_stream(self._stream)  # c is written before it is added
        assert self._snapshot is not None
        flight.mixer.leave_out_late(self._snapshot, alpha)
        if self.on_nonfinite != "spread" and not self.world.agree(flight.is_finite):
            self._leave_out(flight, x)
        if flight.mixer is self._scheduled_average and not self._scheduled_average.has_failed:
            self.gossiper.restart(Restart.AVERAGE)
        return alpha

    def _leave_out(self, flight: _Flight, x: FlatVector) -> None:
        """Raise an error because the correction has infinities or NaN.

        In a membership only the worker that has sent them raises. The others set the correction to zero.
        """
        received, transport = flight.mixer.received, self.gossiper.transport
        # If another process of the node has found them, all that this one has received is finite.
        is_sent = not flight.is_finite and received is not None and all(map(is_finite, received))
        is_own = is_sent or not is_finite(x)
        if not transport.is_elastic or not self.world.agree(not is_own):
            self._flight = None
            self._refuse_nonfinite(flight.mixer, flight.t, is_own=is_own, is_here=not flight.is_finite)
        senders = [transport.names[i] for i in flight.mixer.sources if i != transport.rank]
        log_left_out(transport.names[transport.rank], f"round {flight.t}", senders)
        assert self._snapshot is not None
        self._snapshot.raw.zero_()
        self._snapshot.push_sum_weight.zero_()
        flight.is_finite = flight.is_converted = True
        self.stats.num_skipped += 1

    def _check_finite(self, mixer: Mixer, x: FlatVector) -> None:
        """Raise FloatingPointError if x is not finite and peers cannot leave its message out.

        A round that has arrived is then still in flight and not applied, so you can repair x and repeat the step.
        """
        looks = self.on_nonfinite == "raise" and not self.gossiper.is_skippable  # also before exact averages
        if looks and not self.world.agree(self._is_finite(x)):
            self._refuse_nonfinite(mixer, self.t, is_own=True)

    def _convert_buffers(self, x: FlatVector, alpha: float) -> None:
        """Prepare the buffers of x and of the correction c, once for an arrived round.

        b <- W_ii b in x, and c <- r / alpha, so that x + alpha c has the average: see [Note: late buffers].
        """
        flight = self._flight
        assert flight is not None
        assert self._snapshot is not None
        if flight.is_converted:
            return
        flight.is_converted = True
        own = flight.mixer.own_buffer_weight
        if own == 1.0:
            return
        for b, c, s in zip(x.buffers, self._snapshot.buffers, self._sent_buffers, strict=True):
            given_away = s.mul_((1 - own) / alpha)
            c.add_(given_away)
            # A rest of W_ii s - W_ii s is a rounding error, and no part of a peer.
            c.masked_fill_(c.abs() <= _ROUNDING * torch.finfo(c.dtype).eps * given_away.abs(), 0.0)
            b.mul_(own)

    def _apply(self, x: FlatVector, alpha: float) -> None:
        """x <- x + the correction of the round that has arrived. The round is no longer in flight."""
        assert self._snapshot is not None
        self._flight = None
        with span("gossip.apply"):
            x.add_(self._snapshot, alpha=alpha)

    def _copy_and_depart(self, mixer: Mixer, x: FlatVector) -> None:
        """Take the snapshot and pass it to the gossip thread."""
        assert self._flight is None, "one round in flight at a time"
        snapshot, stream, t = self._snapshot_of(x).copy_(x), self._stream, self.t
        self.t += 1
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(x.raw.device))  # s is written before it is sent

        def run() -> float:
            on_stream = stream or contextlib.nullcontext()
            with torch.no_grad(), on_stream, span("gossip.round", f"t={t}"):
                mixer.start(snapshot, t)
                return self._difference(flight, snapshot)

        flight = self._flight = _Flight(run, self.step - 1, mixer, t)
        self._keep_buffers(snapshot)
        self._submit(flight)

    def _fill_and_depart(self, mixer: Mixer, x: FlatVector, alpha: float | None) -> None:
        """Let the gossip thread fill and send the snapshot in chunks: see [Note: Filling].

        Args:
            mixer: the mixer of the new round.
            x: the model, mutated.
            alpha: the alpha of the round that has arrived; None: no round has arrived.
        """
        assert alpha is not None or self._flight is None, "one round in flight at a time"
        snapshot, t = self._snapshot_of(x), self.t
        pairs = tuple(zip(mixer.chunks(x), mixer.chunks(snapshot), strict=True))
        filling = Filling(x, snapshot, pairs, alpha=alpha)
        self.t += 1

        def run() -> float:
            with torch.no_grad(), span("gossip.round", f"t={t}"):
                with filling:
                    mixer.start_filling(snapshot, t, filling.fill)
                return self._difference(flight, snapshot)

        flight = self._flight = _Flight(run, self.step - 1, mixer, t)
        start = time.perf_counter()
        self._submit(flight)
        with span("gossip.fill"):
            try:
                filling.wait()
            finally:  # x and the snapshot are equal now
                self._keep_buffers(x)
        self.stats.wait_seconds += time.perf_counter() - start

    def _difference(self, flight: _Flight, snapshot: FlatVector) -> float:
        """Turn the snapshot into the correction, on the gossip thread."""
        alpha = flight.mixer.difference(snapshot)
        flight.is_finite = self.on_nonfinite == "spread" or is_finite(snapshot)
        return alpha

    def _keep_buffers(self, s: FlatVector) -> None:
        """Copy the sent buffers, before the gossip thread overwrites them: see [Note: late buffers]."""
        for kept, buffer in zip(self._sent_buffers, s.buffers, strict=True):
            kept.copy_(buffer)

    def _submit(self, flight: _Flight) -> None:
        if self._thread is None:
            self._thread = CallThread(f"gossip-{self.gossiper.transport.rank}")
        self._thread.submit(flight.job, flight.future)
        flight.is_submitted = True

    def _snapshot_of(self, x: FlatVector) -> FlatVector:
        """Return the memory for a snapshot of x."""
        if self._snapshot is None or self._snapshot.layout != x.layout or self._snapshot.raw.device != x.raw.device:
            assert self._flight is None, "a correction is in the snapshot"
            self._snapshot = x.like()
            self._sent_buffers = [torch.empty_like(buffer) for buffer in x.buffers]
            self._stream = None if x.raw.device.type == "cpu" else torch.Stream(x.raw.device)
        return self._snapshot


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

        Each call doubles the number of processed chunks: see [Note: Filling] of `OverlapEngine`.
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

"""OverlapEngine: rounds that run on the gossip thread under the next forward and backward."""

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
from torch.profiler import record_function

from ..consensus_control import ConsensusControl
from ..flat.nonfinite import FiniteCheck, is_finite
from ..flat.vector import FlatVector, add_
from ..rounds.gossip_thread import GossipThread
from ..rounds.mixer import Mixer
from ..schedule import Schedule
from .engine import LockstepEngine

_ROUNDING = 16  # units in the last place


@dataclass
class _Flight:
    """A round of the gossip thread, and after which step it began."""

    job: Callable[[], float]
    step: int
    mixer: Mixer
    t: int
    is_finite: bool = True  # its correction; said by the job
    is_converted: bool = False  # see [Note: late buffers]
    future: Future[float] = field(default_factory=Future)
    is_submitted: bool = False


class OverlapEngine(LockstepEngine):
    """Rounds that run on the gossip thread while training computes: x <- x + (W(t) - I) s when round t is done.

    [Note: Overlap] s is a snapshot of x. The round started before forward k is applied before forward k + 1, when x
    has taken one optimizer step u: x <- W x + u. Nothing of u is lost or scaled, and since 1^T (W - I) = 0 the sum
    of x over ranks keeps every gradient step exactly, however late a round is applied.

    [Note: Staleness] One round is in flight at a time, so with max_staleness = k one starts every k + 1 steps at most
    (tau = k + 1 in Overlap SGP). Starting at fixed steps keeps the number of rounds equal on all ranks whatever
    their speed, and with one in flight the recursion s(t + 1) = W(t) s(t) + u(t) is stable for every k; a pipeline of
    k stale corrections is not. A round is applied as soon as it is complete, and waited for at its last forward.

    [Note: Filling] Where x is sent in chunks, the gossip thread corrects x, copies it into the snapshot and sends it,
    chunk by chunk: the first leaves after 4 MB and not after two passes over the model. Training waits until the last
    is copied, but not until all are posted: on a fast link that takes the gossip thread longer than copying, since a
    send first copies into the socket. So ever more chunks are filled between two posts. A correction belongs to the
    flight in `_flight`, to apply it or to fill with it, and one assignment hands it on: an interrupt before or after
    that loses nothing, and who flushes then ends what was begun.

    [Note: late buffers] Statistics of BatchNorm decay while a round is under way: what (W - I) s takes away may then be
    more than is left, and a variance become negative. So buffers are not corrected but averaged as they are when the
    round is applied: b <- W_ii b + r, where r = (W s)_i - W_ii s_i is what the peers give. No weight is negative, so a
    variance stays one. Their sum over ranks is not kept, and need not be.

    Assran et al., arXiv 1811.10792, Algorithm 2 (Overlap SGP).

    Args:
        gossiper: bound to its peers; only the gossip thread calls it.
        schedule: which step gossips, or what controls that; no more often than every max_staleness + 1 steps.
        max_staleness: forwards that a round may be late before training waits for it.
        is_eager: apply a round that is complete before its last forward. False applies all rounds at a fixed step,
            so that the processes of a node agree.
        on_nonfinite: see `LockstepEngine`; the gossip thread looks at the correction before it is applied. With a
            gossiper whose messages change what peers keep, "raise" looks at x before each round, exact averages
            included, as `SyncEngine` does.
    """

    def __init__(
        self,
        gossiper: Mixer,
        schedule: Schedule | ConsensusControl,
        *,
        max_staleness: int = 0,
        is_eager: bool = True,
        on_nonfinite: str = "raise",
    ) -> None:
        if gossiper.keeps_models:
            raise ValueError(
                f"got overlap=True with {gossiper}, expected overlap=False: it replaces the model by an average of "
                "models as they were sent, in which steps taken meanwhile would be missing"
            )
        schedule = replace(schedule, gossip_every=max(schedule.gossip_every, max_staleness + 1))
        super().__init__(gossiper, schedule, on_nonfinite=on_nonfinite)
        self.max_staleness = max_staleness
        self.is_eager = is_eager
        self._snapshot: FlatVector | None = None
        self._sent_buffers: list[Tensor] = []  # of the snapshot, which becomes a correction
        self._flight: _Flight | None = None
        self._flushed_alpha: float | None = None  # of the correction that a flush has applied since the last round
        self._thread: GossipThread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._is_finite = FiniteCheck()

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        return self._flight is not None

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        flight, alpha, staleness, has_changed = self._flight, None, 0, False
        if flight is None:
            if self.on_nonfinite == "skip":
                self._recover(None, x)
            elif self.gossiper.has_news:
                self._check_finite(self.gossiper, x)
            has_changed = self.gossiper.begin(x, self.step)
        self._flushed_alpha = None
        if flight is not None:
            is_last = self.step - flight.step > self.max_staleness
            if is_last or (self.is_eager and flight.future.done()):
                alpha, staleness = self._arrive(flight, x), self._staleness_of(flight)
        mixer = self._next_mixer()
        if mixer is not None:
            self._check_finite(mixer, x)
            if self.on_nonfinite == "skip":
                self._recover(mixer, x)
        if alpha is not None:
            self._convert_buffers(x, alpha)
        if mixer is not None and not x.raw.is_cuda and len(mixer.chunks(x)) > 1:
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

    def add_again(self, x: FlatVector) -> bool:
        """See `Engine`: the correction is in the snapshot until the next round."""
        if self._snapshot is None or self._flushed_alpha is None or self._snapshot.layout != x.layout:
            return False
        parameters, corrections = (vector.where(is_buffer=False).segments for vector in (x, self._snapshot))
        for own, correction in zip(parameters, corrections, strict=True):
            add_(own, correction, alpha=self._flushed_alpha)
        return True

    def close(self) -> None:
        """See `Engine`. A round in flight is left to end by itself: its peers have its message."""
        super().close()
        if self._thread is not None:
            self._thread.close()
        self._thread = self._snapshot = self._flight = None
        self._sent_buffers = []

    def __getstate__(self) -> dict[str, Any]:
        assert self._flight is None, "flush() before copying: a round is in flight"
        fresh: dict[str, Any] = {
            "_thread": None,
            "_stream": None,
            "_snapshot": None,
            "_sent_buffers": [],
            "_flushed_alpha": None,
        }
        return {**self.__dict__, **fresh}

    def _staleness_of(self, flight: _Flight) -> int:
        return max(self.step - flight.step - 1, 0)

    def _arrive(self, flight: _Flight, x: FlatVector) -> float:
        """Wait for the round; its alpha. It stays in flight: its correction is in the snapshot, to be applied."""
        if not flight.is_submitted:  # an interrupt came first
            self._submit(flight)
        start = time.perf_counter()
        with record_function("gossip.wait"):
            try:
                assert self._thread is not None
                alpha = self._thread.result(flight.future, **self._limit_of(flight.mixer, flight.t))
            except Exception:  # of the round; an interrupt instead leaves it in flight, done or not
                self._flight = None
                raise
        self.stats.wait_seconds += time.perf_counter() - start
        if self._stream is not None:
            torch.cuda.current_stream(x.raw.device).wait_stream(self._stream)  # c is written before it is added
        if self.on_nonfinite != "spread" and not self.agree_finite(flight.is_finite):
            self._leave_out(flight, x)
        if flight.mixer is self._scheduled_average and not self._scheduled_average.has_failed:
            self.gossiper.end_average()
        return alpha

    def _leave_out(self, flight: _Flight, x: FlatVector) -> None:
        """Raise, or make the correction nothing."""
        if self.on_nonfinite == "raise":
            self._flight = None
            self._refuse_nonfinite(flight.mixer, flight.t, is_own=not is_finite(x), is_here=not flight.is_finite)
        assert self._snapshot is not None
        self._snapshot.raw.zero_()
        self._snapshot.push_sum_weight.zero_()
        flight.is_finite = flight.is_converted = True
        self.stats.num_skipped += 1

    def _check_finite(self, mixer: Mixer, x: FlatVector) -> None:
        """Raise FloatingPointError where peers cannot leave messages out, and this one would not be finite.

        What has arrived is still in flight then, and nothing of it in x: who mends x takes this step again.
        """
        looks = self.on_nonfinite == "raise" and not self.gossiper.is_skippable  # before exact averages too
        if looks and not self.agree_finite(self._is_finite(x)):
            self._refuse_nonfinite(mixer, self.t, is_own=True)

    def _convert_buffers(self, x: FlatVector, alpha: float) -> None:
        """[Note: late buffers] x <- W_ii x, c <- r / alpha for the buffers of both: x + alpha c is their average.

        Of the round that has arrived; once.
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
            # What rounding leaves of W_ii s - W_ii s is nothing that a peer has given.
            c.masked_fill_(c.abs() <= _ROUNDING * torch.finfo(c.dtype).eps * given_away.abs(), 0.0)
            b.mul_(own)

    def _apply(self, x: FlatVector, alpha: float) -> None:
        """x <- x + the correction of the round that has arrived, which is in flight no more."""
        assert self._snapshot is not None
        self._flight = None
        with record_function("gossip.apply"):
            x.add_(self._snapshot, alpha=alpha)

    def _copy_and_depart(self, mixer: Mixer, x: FlatVector) -> None:
        """Take the snapshot and hand it to the gossip thread."""
        assert self._flight is None, "one round in flight at a time"
        snapshot, stream, t = self._snapshot_of(x).copy_(x), self._stream, self.t
        self.t += 1
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(x.raw.device))  # s is written before it is sent

        def run() -> float:
            on_stream = torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
            with torch.no_grad(), on_stream, record_function("gossip.round", f"t={t}"):
                mixer.start(snapshot, t)
                return self._difference(flight, snapshot)

        flight = self._flight = _Flight(run, self.step - 1, mixer, t)
        self._keep_buffers(snapshot)
        self._submit(flight)

    def _fill_and_depart(self, mixer: Mixer, x: FlatVector, alpha: float | None) -> None:
        """[Note: Filling] alpha: of the round that has arrived; None = there is none."""
        assert alpha is not None or self._flight is None, "one round in flight at a time"
        snapshot, t = self._snapshot_of(x), self.t
        pairs = tuple(zip(mixer.chunks(x), mixer.chunks(snapshot), strict=True))
        filling = Filling(x, snapshot, pairs, alpha=alpha)
        self.t += 1

        def run() -> float:
            with torch.no_grad(), record_function("gossip.round", f"t={t}"):
                with filling:
                    mixer.start_filling(snapshot, t, filling.fill)
                return self._difference(flight, snapshot)

        flight = self._flight = _Flight(run, self.step - 1, mixer, t)
        start = time.perf_counter()
        self._submit(flight)
        with record_function("gossip.fill"):
            try:
                filling.wait()
            finally:  # x and what was sent of it are the same now
                self._keep_buffers(x)
        self.stats.wait_seconds += time.perf_counter() - start

    def _difference(self, flight: _Flight, snapshot: FlatVector) -> float:
        """On the gossip thread: the snapshot becomes the correction."""
        alpha = flight.mixer.difference(snapshot)
        flight.is_finite = self.on_nonfinite == "spread" or is_finite(snapshot)
        return alpha

    def _keep_buffers(self, s: FlatVector) -> None:
        """[Note: late buffers] What is sent of the buffers, before the gossip thread writes the correction over it."""
        for kept, buffer in zip(self._sent_buffers, s.buffers, strict=True):
            kept.copy_(buffer)

    def _submit(self, flight: _Flight) -> None:
        if self._thread is None:
            self._thread = GossipThread(f"gossip-{self.gossiper.transport.rank}")
        self._thread.submit(flight.job, flight.future)
        flight.is_submitted = True

    def _snapshot_of(self, x: FlatVector) -> FlatVector:
        """Room for a snapshot of x."""
        if self._snapshot is None or self._snapshot.layout != x.layout or self._snapshot.raw.device != x.raw.device:
            assert self._flight is None, "a correction is in the snapshot"
            self._snapshot = x.like()
            self._sent_buffers = [torch.empty_like(buffer) for buffer in x.buffers]
            self._stream = torch.cuda.Stream(x.raw.device) if x.raw.is_cuda else None
        return self._snapshot


class Filling:
    """x <- x + alpha * s, then s <- x, chunk by chunk on the gossip thread.

    Inside a `with` of it, so that x is whole when training goes on, whatever happens to the round.

    Args:
        x, s: of one layout; s is the correction of the last round, if there is one.
        chunks: of both, in pairs.
        alpha: of that correction; None = there is none.
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
        """Chunks up to k; see `Mixer.start_filling`.

        Twice as many with each call: see [Note: Filling] of `OverlapEngine`.
        """
        for index in range(self._num_done, min((2 << k) - 1, len(self._chunks))):
            self._fill(index)

    def _fill(self, k: int) -> None:
        x, s = self._chunks[k]
        self._num_done = k + 1  # before the work: a chunk that fails may not be corrected twice
        with record_function("gossip.fill"):
            if self._alpha is None:
                s.raw.copy_(x.raw)
            else:
                x.apply_and_refresh_(s, alpha=self._alpha)
        if self._num_done == len(self._chunks):
            self._is_done.set()

    def wait(self) -> None:
        """Return when x may be touched. Waits for this process only: no peer is asked for anything meanwhile."""
        try:
            self._is_done.wait()
        except BaseException:  # Control-C: who catches it must not find x half corrected
            self._is_done.wait()
            raise

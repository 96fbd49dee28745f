"""The engine of WAGMA-SGD: group averages that whoever is first starts, and that take of the others what is there."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import record_function

from ..engine.engine import Engine
from ..flat.nonfinite import is_finite, refuse
from ..flat.vector import FlatVector
from ..gossip.gossiper import GlobalAverage
from .control import Kind, Word
from .group_average import GroupAverage
from .pace import Pace
from .watch import Place, Watch
from .worker import WaitAvoidingWorker


class WaitAvoidingEngine(Engine):
    """Version t of the model is averaged in groups as soon as one rank has come to it, or globally when all have.

    [Note: wait-avoiding average] Versions are counted, alike on all ranks. A worker thread per rank runs the group
    averages in their order, each once, from y, what training has published last. At the safe point before step t + 1,
    with x = W'_t, the model after step t:

    - the worker has not started version t: y <- x, the worker is told, x <- the group's average. On time.
    - it has: y <- x, for the versions to come. The group has used what was there before. So with the newest average
      that x has no part in yet, over n members, x <- (n * average + x) / (n + 1). Late.
    - every `sync_period`-th version is an average over all ranks, in person, and no version after it starts before. So
      what a rank contributes is less than `sync_period` versions old.

    [Note: stragglers] By the rule of the paper every rank takes part in every version in person, if late, so everyone
    waits at each global average for the slowest. Here a rank goes to the global average at its next safe point once
    somebody is there. A rank that is slow all the time (see `Pace`) skips versions that others have passed, and where
    its next step would end after the others have come to the global average, it waits for them instead; no longer than
    two such steps, in case they have stopped training. What this gains is measured in benchmarks/stragglers.

    [Note: overlapped groups] With `overlap` a rank that is on time does not wait: at its next safe point, when x has
    taken another step, x <- x + (average - y), the law with what this rank contributed as s. One that is late merges
    what is there and does not wait for a version that runs. Only global averages wait then.

    [Note: beginning] Before the first step, of a run or after something was loaded, ranks wait for all others. Else
    a fast rank would get averages with models that are about to be replaced, of versions that are counted anew.

    [Note: settling] A rank that settles waits until all do (a dissemination barrier in words) and goes to the global
    averages of those who still train. So loops of equal length and loops `while engine.t < n` both end together.

    Args:
        average: of the groups, over Gloo, with messages in CPU memory; `average.transport` carries nothing else.
        averager: of all, over the same transport.
        x: the parameters.
        sync_period: versions from one global average to the next; 0 = never.
        overlap: take the group's average one step later instead of waiting for it.
        on_nonfinite: see `WaitAvoidingWorker`; at averages over all ranks, "skip" keeps x.
    """

    is_asynchronous = True

    def __init__(
        self,
        average: GroupAverage,
        averager: GlobalAverage,
        x: FlatVector,
        *,
        sync_period: int,
        overlap: bool = False,
        on_nonfinite: str = "raise",
    ) -> None:
        super().__init__()
        self.on_nonfinite = on_nonfinite
        self.overlap = overlap
        self._awaited: int | None = None  # the version that is under way, with what x was as y
        self.worker = WaitAvoidingWorker(
            average, x, sync_period=sync_period, stats=self.stats, on_nonfinite=on_nonfinite
        )
        self._groups, self._averager, self._transport = average.groups, averager, self.worker.transport
        self._device = x.raw.device
        self._merged = -1  # the newest version whose result is in x
        self._num_meetings = 0
        self._is_reset = False
        self._pace = Pace()

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`: only with `overlap`."""
        return self._awaited is not None

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`."""
        with self.worker.state:
            try:
                return self._land(x)
            except Exception:  # of the average, which is lost; an interrupt instead leaves it in flight
                self._awaited = None
                raise

    def round(self, x: FlatVector) -> bool:
        """See `Engine` and [Note: wait-avoiding average].

        Raises:
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        worker, watch = self.worker, self.worker.watch
        watch.version = self.t
        watch.engage()
        self.begin()
        watch.check_present()
        with worker.state:
            due = self.worker.next_global(self.t)
            self._pace.arrive(worker.num_started, is_halted=worker.num_started == due)
            is_written, is_there = self._land(x), self.t == due
            if due is None or not (is_there or worker.newest_arrival >= due):
                is_written = self._average_in_group(x) or is_written
            is_called = due is not None and (is_there or worker.newest_arrival >= due)
            if due is not None and not is_called and self._would_be_late_for(due):
                is_called = worker.wait(lambda: worker.newest_arrival >= due, seconds=2 * self._pace.seconds)
        if due is not None and is_called:
            self._average_globally(x, due)
            is_written = True
        self._pace.depart(worker.num_started)
        return is_written

    def begin(self) -> None:
        """Let the worker work, once all ranks are here; collective. Later calls do nothing, until something is loaded.

        `round()` and `settle()` call it. See [Note: beginning].

        Raises:
            ValueError: ranks are at different versions.
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        worker = self.worker
        if not worker.is_held:
            return
        worker.watch.engage()
        with worker.state:
            meeting = worker.begin()
        oldest = newest = self.t
        patience = _Patience(worker.watch, is_patient=False)
        for stage, (out_peer, in_peer) in enumerate(zip(worker.words.out_peers, worker.words.in_peers, strict=True)):
            self._say(Word(Kind.BEGINNING, newest, meeting, stage, oldest), out_peer)
            heard = self._hear_of(Kind.BEGINNING, meeting, stage, in_peer, patience)
            assert heard is not None
            oldest, newest = min(oldest, heard.oldest), max(newest, heard.version)
        if oldest != newest:
            raise ValueError(
                f"got a model of round {self.t} among models of rounds {oldest} to {newest} on other ranks, expected "
                "one round on all; load checkpoints of one moment on all ranks: call settle() before the checkpoint"
            )
        with worker.state:
            worker.release()

    def settle(self, x: FlatVector, *, is_patient: bool = False) -> bool:
        """Wait until all ranks settle, with all at the same version and no worker at work; collective.

        See [Note: settling]. Raises as `round()`.

        Args:
            is_patient: wait as long as those who are missing take a step, or settle, within the timeout.

        Returns:
            Whether x was written: by global averages that others asked for.
        """
        watch = self.worker.watch
        watch.engage()
        self.begin()
        patience = _Patience(watch, is_patient=is_patient)
        is_written = self._meet(x, patience, serves=True)  # to know the newest version
        # Until all workers are done with it. Whoever is at a global average now has settled, and trains on.
        self._meet(x, patience, serves=False)
        watch.is_idle = True
        return is_written

    @property
    def is_settled(self) -> bool:
        """Whether no rank needs this one any more: nothing was done since it was made, loaded or settled."""
        return self.worker.watch.is_idle

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Inside, all ranks do something together: an error names who is at fault, see `Watch`."""
        watch = self.worker.watch
        was_idle, watch.version, watch.place = watch.is_idle, self.t, Place.GLOBAL
        watch.engage()
        try:
            with watch.waiting(what, lambda: -1):
                yield
        finally:
            watch.place, watch.is_idle = Place.TRAINING, was_idle

    def close(self, *, error: BaseException | None = None) -> None:
        """See `Engine`. Does not settle. error: of this rank's own code, for which it leaves the others at once."""
        self.is_closed = True
        self.worker.close(error=error)
        if self._awaited is not None and self.worker.num_done <= self._awaited:
            warnings.warn(f"closed before the group average of round {self._awaited}: it is lost", stacklevel=2)
            self._awaited = None

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`. After `settle()`, so that all ranks are at one version."""
        published = self.worker.mailbox.host_vector()
        with self.worker.state:
            self.worker.mailbox.snapshot(published)
            return {**super().state_dict(), "published": published.raw, "published_at": self.worker.published_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`, and [Note: beginning]. Raises ValueError where the state is that of another model too."""
        if "published" not in state:  # of a copy, which has published nothing
            super().load_state_dict(state)
            self._set_version(state["t"])
            self._is_reset = True
            return
        raw, result = state["published"], self.worker.result
        if raw.dtype != torch.uint8 or raw.shape != result.raw.shape:
            raise ValueError(
                f"got a published model of {raw.numel()} elements of {raw.dtype}, expected {result.raw.numel()} bytes "
                "(torch.uint8); load the state of a wrapper around the same model"
            )
        super().load_state_dict(state)
        self._set_version(state["t"])
        with self.worker.state:
            published = FlatVector(result.layout, raw.to(self._device))
            self.worker.publish(published, version=state["published_at"])

    def reset(self) -> None:
        """See `Engine`. `publish_loaded()` is to follow."""
        self._set_version(0)
        self._is_reset = True

    def publish_loaded(self, x: FlatVector) -> None:
        """y <- x if there was a `reset()`: what was published is another model, which no peer should get."""
        if self._is_reset:
            with self.worker.state:
                self.worker.publish(x, version=self.t - 1)
            self._is_reset = False

    def _average_in_group(self, x: FlatVector) -> bool:
        """[Note: wait-avoiding average]"""
        worker, t = self.worker, self.t
        is_late = worker.num_started > t
        worker.publish(x, version=t)
        if not is_late:
            worker.arrive_at(t)
        if self.overlap and not is_late:
            self._awaited, self.t = t, t + 1
            return False
        if not self.overlap:
            self._wait_for_group(t)
        newest = worker.num_done - 1
        if newest == self._merged:
            assert is_late, "a version that nobody has started has no result"
        elif is_late:
            n = self._groups.num_members(self._transport.rank, newest)
            worker.merge_to(x, weight=n / (n + 1))
        else:
            worker.merge_to(x, weight=1.0)
        is_written, self._merged = newest > self._merged, newest
        self.t = worker.num_started if is_late and self._pace.is_slow else t + 1
        return is_written

    def _land(self, x: FlatVector) -> bool:
        """[Note: overlapped groups]"""
        if self._awaited is None:
            return False
        self._wait_for_group(self._awaited)
        self._awaited = None
        # Perhaps of a later version: that has had the same y of us.
        self._merged = self.worker.num_done - 1
        self.worker.correct(x)
        return True

    def _wait_for_group(self, t: int) -> None:
        worker = self.worker
        what = f"waiting for the group average of ranks {self._group(t)} in round {t}"
        self._wait_for(lambda: worker.num_done > t, what)

    def _wait_for(self, is_over: Callable[[], bool], what: str) -> None:
        """By who holds the lock."""
        watch = self.worker.watch
        watch.version, watch.place = self.t, Place.GROUP
        try:
            self.worker.wait_for(is_over, what)
        finally:
            watch.place = Place.TRAINING

    def _would_be_late_for(self, due: int) -> bool:
        """[Note: stragglers]"""
        # The pace in whole versions is up to one too low, and the others need one more to come from the last to `due`.
        return self._pace.is_slow and self.worker.num_started + self._pace.versions + 1 >= due

    def _average_globally(self, x: FlatVector, t: int) -> None:
        """x <- the mean over all ranks; y too."""
        worker = self.worker
        with worker.state:
            worker.arrive_at(t)
            # All workers are to be idle. Their last version is that of a group in which nobody waits any more.
            self._wait_for(lambda: worker.num_done >= t, f"waiting for the group averages before round {t}")
        start = time.perf_counter()
        if self.on_nonfinite == "raise" and not is_finite(x):
            refuse(self._transport.names[self._transport.rank], f"round {t}")
        before = x.clone() if self.on_nonfinite == "skip" else None
        with record_function("gossip.average", f"t={t}"), self.together(f"the global average in round {t}"):
            self._averager.mix(x, t)
        if before is not None and not is_finite(x):
            x.copy_(before)
            self.stats.num_skipped += 1
        self.stats.wait_seconds += time.perf_counter() - start
        with worker.state:
            worker.publish(x, version=t)
            worker.finish_global(t)
            self.stats.record(0)
        self.t, self._merged = t + 1, t

    def _say(self, word: Word, peer: int) -> None:
        with self.worker.watch.waiting(f"telling rank {self._transport.names[peer]} of {word.kind.name}", lambda: peer):
            self.worker.words.say(word, peers=[peer])

    def _meet(self, x: FlatVector, patience: _Patience, *, serves: bool) -> bool:
        """[Note: settling]. `serves`: goes to the global averages of those who train."""
        worker = self.worker
        meeting, self._num_meetings = self._num_meetings, self._num_meetings + 1
        is_written = False
        newest = self.t
        for stage, (out_peer, in_peer) in enumerate(zip(worker.words.out_peers, worker.words.in_peers, strict=True)):
            self._say(Word(Kind.SETTLING, newest, meeting, stage), out_peer)
            while (heard := self._hear_of(Kind.SETTLING, meeting, stage, in_peer, patience, serves=serves)) is None:
                due = self.worker.next_global(self.t)
                assert due is not None
                self._average_globally(x, due)
                is_written = True
            newest = max(newest, heard.version, self.t)
        with worker.state:
            worker.arrive_at(newest - 1)  # the word of it may still be on its way
            self._wait_for(lambda: worker.num_done >= newest, f"waiting for the group averages before round {newest}")
        self.t = newest
        return is_written

    def _hear_of(
        self, kind: Kind, meeting: int, stage: int, peer: int, patience: _Patience, *, serves: bool = False
    ) -> Word | None:
        """What `peer` says at a meeting; None when, if this rank `serves`, somebody comes to a global average before.

        Raises:
            TimeoutError, ConnectionError: it says nothing or has closed; names it.
        """
        worker, watch, due = self.worker, self.worker.watch, self.worker.next_global(self.t) if serves else None
        key, name = (kind, meeting, stage), self._transport.names[peer]

        def is_heard() -> bool:
            return key in worker.meetings or (due is not None and worker.newest_arrival >= due)

        is_settling = kind is Kind.SETTLING
        what = f"waiting for rank {name} to {'settle' if is_settling else 'begin'} after round {self.t}"
        place = Place.SETTLING if is_settling else Place.BEGINNING
        with watch.waiting(what, lambda: peer, has_deadline=False):
            watch.version, watch.place, watch.peer = self.t, place, peer
            try:
                while True:
                    with worker.state:
                        worker.wait(lambda: is_heard() or peer in worker.words.gone, seconds=patience.interval)
                        if is_heard():
                            return worker.meetings.pop(key, None)
                    if peer in worker.words.gone:
                        watch.check_present()
                    patience.ask(peer, what)
            finally:
                watch.place, watch.peer = Place.TRAINING, -1

    def _group(self, t: int) -> list[int]:
        return [self._transport.names[rank] for rank in self._groups.members(self._transport.rank, t)]

    def _set_version(self, t: int) -> None:
        with self.worker.state:
            self.worker.set_version(t)
        self.t, self._merged, self._awaited = t, t - 1, None


class _Patience:
    """How long a rank that meets the others waits for those who are missing.

    Args:
        watch: of this rank.
        is_patient: as long as a missing one takes a step, or waits for others itself, within the timeout.
    """

    def __init__(self, watch: Watch, *, is_patient: bool) -> None:
        self._watch, self._is_patient = watch, is_patient
        self._start = self._progress = time.monotonic()
        self._standing: Word | None = None
        self.interval = min(0.25, watch.timeout / 20)  # seconds between two questions

    def ask(self, peer: int, what: str) -> None:
        """A question to all. Raises TimeoutError that names who is missing when the time is over."""
        watch, now = self._watch, time.monotonic()
        watch.ask()
        standing = watch.standings.get(peer)
        if self._is_patient and standing is not None and not watch.is_silent(peer):
            is_meeting = Place(standing.stage) is watch.place
            last, self._standing = self._standing, standing
            if is_meeting or last is None or (last.version, last.stage) != (standing.version, standing.stage):
                self._progress = now
        if now - self._progress > watch.timeout:
            watch.give_up(what, now - self._start, peer=peer)

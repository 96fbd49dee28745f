"""The engine of WAGMA-SGD: group averages that whoever is first starts, and that take of the others what is there."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.profiler import record_function

from .engine import Engine
from .flat_vector import FlatVector
from .gossiper import GlobalAverage
from .group_average import GroupAverage
from .wait_avoiding_pace import Pace
from .wait_avoiding_words import Kind, Word
from .wait_avoiding_worker import WaitAvoidingWorker


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
    two such steps, in case they have stopped training. Simulated, time per own step over that without communication, at
    a period of 10, by the paper's rule and by this one: 8 ranks of which one is 5 times slower, the others: 5.0, 1.03;
    8 ranks with steps of 50 ms, in each two of them 320 ms more: 1.55, 1.25; 4 ranks with steps of 11 ms, each 100 ms
    more with probability 1/4: 1.37, 1.16.

    [Note: settling] A rank that settles waits until all do (a dissemination barrier in words) and goes to the global
    averages of those who still train. So loops of equal length and loops `while engine.t < n` both end together.

    Args:
        average: of the groups, over Gloo, with messages in CPU memory; `average.transport` carries nothing else.
        averager: of all, over the same transport.
        x: the parameters.
        sync_period: versions from one global average to the next; 0 = never.
    """

    is_asynchronous = True

    def __init__(self, average: GroupAverage, averager: GlobalAverage, x: FlatVector, *, sync_period: int) -> None:
        super().__init__()
        self.worker = WaitAvoidingWorker(average, x, sync_period=sync_period, stats=self.stats)
        self._groups, self._averager, self._transport = average.groups, averager, self.worker.transport
        self._device = x.raw.device
        self._merged = -1  # the newest version whose result is in x
        self._num_meetings = 0
        self._is_reset = False
        self._pace = Pace()

    def round(self, x: FlatVector) -> bool:
        """See `Engine` and [Note: wait-avoiding average].

        Raises:
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        worker = self.worker
        worker.raise_if_failed()
        with worker.state:
            due = self.worker.next_global(self.t)
            self._pace.arrive(worker.num_started, is_halted=worker.num_started == due)
            is_written, is_there = False, self.t == due
            if due is None or not (is_there or worker.newest_arrival >= due):
                is_written = self._average_in_group(x)
            is_called = due is not None and (is_there or worker.newest_arrival >= due)
            if due is not None and not is_called and self._would_be_late_for(due):
                is_called = worker.wait(lambda: worker.newest_arrival >= due, seconds=2 * self._pace.seconds)
        if due is not None and is_called:
            self._average_globally(x, due)
            is_written = True
        self._pace.depart(worker.num_started)
        return is_written

    def settle(self, x: FlatVector) -> bool:
        """Wait until all ranks settle, with all at the same version and no worker at work; collective.

        See [Note: settling]. Raises as `round()`.

        Returns:
            Whether x was written: by global averages that others asked for.
        """
        first = self._meet(x)
        return self._meet(x) or first  # once to know the newest version, once more until all workers are done with it

    def close(self) -> None:
        """See `Engine`."""
        self.worker.close()

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`. After `settle()`, so that all ranks are at one version."""
        published = self.worker.mailbox.host_vector()
        with self.worker.state:
            self.worker.mailbox.snapshot(published)
            return {**super().state_dict(), "published": published.raw, "published_at": self.worker.published_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`. Raises ValueError where the state is that of another model."""
        raw, result = state["published"], self.worker.result
        if raw.dtype != torch.uint8 or raw.shape != result.raw.shape:
            raise ValueError(
                f"got a published model of {raw.numel()} elements of {raw.dtype}, expected {result.raw.numel()} bytes "
                "(torch.uint8); load the state of a wrapper around the same model"
            )
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
                self.worker.publish(x, version=-1)
            self._is_reset = False

    def _average_in_group(self, x: FlatVector) -> bool:
        """[Note: wait-avoiding average]"""
        worker, t = self.worker, self.t
        is_late = worker.num_started > t
        worker.publish(x, version=t)
        if not is_late:
            worker.arrive_at(t)
        worker.wait_for(lambda: worker.num_done > t, f"the group average of ranks {self._group(t)} in round {t}")
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
            worker.wait_for(lambda: worker.num_done >= t, f"the group averages before round {t}")
        start = time.perf_counter()
        with record_function("gossip.average", f"t={t}"):
            self._averager.mix(x, t)
        self.stats.wait_seconds += time.perf_counter() - start
        with worker.state:
            worker.publish(x, version=t)
            worker.finish_global(t)
            self.stats.record(0)
        self.t, self._merged = t + 1, t

    def _meet(self, x: FlatVector) -> bool:
        """[Note: settling]"""
        worker = self.worker
        worker.raise_if_failed()
        meeting, self._num_meetings = self._num_meetings, self._num_meetings + 1
        is_written = False
        newest = self.t
        for stage, (out_peer, in_peer) in enumerate(zip(worker.words.out_peers, worker.words.in_peers, strict=True)):
            worker.words.say(Word(Kind.SETTLING, newest, meeting, stage), peers=[out_peer])
            while (heard := self._hear_of(meeting, stage, in_peer)) is None:
                due = self.worker.next_global(self.t)
                assert due is not None
                self._average_globally(x, due)
                is_written = True
            newest = max(newest, heard, self.t)
        with worker.state:
            worker.arrive_at(newest - 1)  # the word of it may still be on its way
            worker.wait_for(lambda: worker.num_done >= newest, f"the group averages before round {newest}")
        self.t = newest
        return is_written

    def _hear_of(self, meeting: int, stage: int, peer: int) -> int | None:
        """What `peer` says when it settles; None when somebody comes to a global average before."""
        worker, due = self.worker, self.worker.next_global(self.t)
        with worker.state:
            worker.wait_for(
                lambda: (meeting, stage) in worker.settling or (due is not None and worker.newest_arrival >= due),
                f"rank {self._transport.names[peer]} to settle after round {self.t}",
            )
            return worker.settling.pop((meeting, stage), None)

    def _group(self, t: int) -> list[int]:
        return [self._transport.names[rank] for rank in self._groups.members(self._transport.rank, t)]

    def _set_version(self, t: int) -> None:
        with self.worker.state:
            self.worker.set_version(t)
        self.t, self._merged = t, t - 1

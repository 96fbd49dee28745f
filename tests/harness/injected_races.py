"""Races that are put into the engines, to see whether the sanitiser finds them: each is a few lines that leave out a
lock, a wait or a copy.

Delays fall between the lines of this file too. Each race has the seed of an episode in which it is soon found.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gossip_modules.ad_psgd.exchange import BilateralAverage
from gossip_modules.ad_psgd.shared_model import SharedModel
from gossip_modules.dpwa.engine import PairwiseEngine
from gossip_modules.dpwa.fetcher import ModelFetcher
from gossip_modules.engine.lockstep import LockstepEngine
from gossip_modules.engine.overlap import Filling, LateRound, Overlap
from gossip_modules.engine.snapshots import Snapshot, SnapshotPool
from gossip_modules.flat.vector import FlatVector
from gossip_modules.transport.deadline import Deadline
from gossip_modules.wagma.engine import WaitAvoidingEngine
from gossip_modules.wagma.group_average import GroupAverage
from gossip_modules.wagma.group_result import GroupResult, LentModel
from gossip_modules.wagma.worker import WaitAvoidingWorker
from tests.harness.ranks_at_work import LENGTH, LONG

Inject = Callable[[pytest.MonkeyPatch], None]
SUM, TORN, HULL, IN_FLIGHT = "got a sum of", "a torn model: entries from", "got a model of", "in flight after settle"
IN_EVAL = "the model has changed in eval mode"
DEADLOCK = "no progress of rank 0(?=.*--- gossip-0)(?=.*wait_with_the_lock)"  # with the stacks of all threads


class Race(NamedTuple):
    """One of them.

    Attributes:
        name: what is wrong.
        engine: of the workload that it is put into.
        inject: does it.
        finding: a regular expression of what the sanitiser says.
        seed, length: of the episode.
    """

    name: str
    engine: str
    inject: Inject
    finding: str
    seed: int
    length: int = LENGTH


@contextlib.contextmanager
def let_go_of(lock: Any) -> Iterator[None]:
    """As if it had not been taken, however often it was."""
    state = lock._release_save()
    try:
        yield
    finally:
        lock._acquire_restore(state)


def copy_in_halves(out: FlatVector, x: FlatVector, *, slowness: int = 1) -> None:
    """As slow as that of a large model is."""
    for to, part in zip(halves(out), halves(x), strict=True):
        to.copy_(part)
        linger(slowness)


def halves(x: FlatVector) -> tuple[Tensor, Tensor]:
    """Both, as numbers."""
    first, second = x.segments[0].chunk(2)
    return first, second


def linger(k: int) -> None:
    """As a slow link does between two parts of a message, and a large model between two parts of a pass."""
    threading.Event().wait(0.002 * k)


# AD-PSGD.


def lose_updates(patch: pytest.MonkeyPatch) -> None:
    """The steps that training has taken since it published y are lost."""

    def overwrite(shared: SharedModel, x: FlatVector, **_: object) -> Sequence[int]:
        steps, shared._steps = shared._steps, []
        if steps:
            x.raw.copy_(shared.snapshots.latest.vector.raw)
        return steps

    patch.setattr(SharedModel, "collect", overwrite)


def publish_over_what_is_read(patch: pytest.MonkeyPatch, *, slowness: int = 1) -> None:
    """A snapshot is written over while it is on its way to a peer."""

    def publish(pool: SnapshotPool, x: FlatVector, standing: Any = None) -> bool:
        if not pool.snapshots:
            pool.snapshots.append(Snapshot(pool.vector()))
        with pool.lock, let_go_of(pool.lock):
            copy_in_halves(pool.latest.vector, x, slowness=slowness)
        pool.latest.standing, pool.is_open = standing, True
        return True

    patch.setattr(SnapshotPool, "publish", publish)


def read_early(patch: pytest.MonkeyPatch) -> None:
    """What a peer sends is read before it has arrived."""

    def exchange(
        bilateral: BilateralAverage, peer: int, weight: float, y: Snapshot, what: str, deadline: Deadline
    ) -> None:
        sends, recvs = {peer: [y.vector.raw]}, {peer: [bilateral._received.raw]}
        pending = bilateral.transport.exchange(sends, recvs, tag=1, what=what)
        received = bilateral._received.clone()
        pending.wait()
        received.add_segments_(y.vector, alpha=-1.0)
        bilateral.shared.deliver(received, alpha=weight, step=y.standing)

    patch.setattr(BilateralAverage, "_exchange", exchange)


def deliver_without_the_lock(patch: pytest.MonkeyPatch) -> None:
    """A correction is added to a pending one that training has taken meanwhile."""

    def deliver(shared: SharedModel, correction: FlatVector, *, alpha: float, step: int) -> None:
        shared.snapshots.latest.vector.add_segments_(correction, alpha=alpha)
        if shared._pending is None:
            shared._pending = shared.snapshots.vector()
        pending, steps = shared._pending, shared._steps
        has_pending = bool(steps)
        steps.append(step)
        with shared.lock, let_go_of(shared.lock):
            linger(1)
        if has_pending:
            pending.add_segments_(correction, alpha=alpha)
        else:
            torch.mul(correction.segments[0], alpha, out=pending.segments[0])

    patch.setattr(SharedModel, "deliver", deliver)


def collect_without_the_lock(patch: pytest.MonkeyPatch) -> None:
    """What is delivered while the pending correction is added to x is lost."""

    def collect(shared: SharedModel, x: FlatVector, **_: object) -> Sequence[int]:
        if not shared.has_pending:
            return ()
        assert shared._pending is not None
        with shared.lock, let_go_of(shared.lock):
            x.add_segments_(shared._pending, alpha=1.0)
            linger(1)
            steps, shared._steps = shared._steps, []
        return steps

    patch.setattr(SharedModel, "collect", collect)


def wait_with_the_lock(patch: pytest.MonkeyPatch) -> None:
    """Training waits for an exchange with the lock in hand that the exchange needs."""
    wait = BilateralAverage.wait

    def wait_with_the_lock(bilateral: BilateralAverage, seconds: float) -> bool:
        with bilateral.shared.lock:
            return wait(bilateral, seconds)

    patch.setattr(BilateralAverage, "wait", wait_with_the_lock)


# Overlapped SGP.


def train_while_x_is_filled(patch: pytest.MonkeyPatch) -> None:
    """Training computes with x, and steps, while the gossip thread corrects and copies it."""
    patch.setattr(Filling, "wait", lambda filling: None)


def overwrite_what_is_sent(patch: pytest.MonkeyPatch) -> None:
    """The snapshot is written over at the next forward, whether it has left or not."""
    wait = LockstepEngine._wait

    def wait_over(engine: LockstepEngine, overlap: Overlap, flight: LateRound, x: FlatVector) -> None:
        if not flight.future.done():
            snapshot_of(engine).raw.copy_(x.raw)
        wait(engine, overlap, flight, x)

    patch.setattr(LockstepEngine, "_wait", wait_over)


def correct_too_soon(patch: pytest.MonkeyPatch) -> None:
    """A round is applied before it is complete."""

    def wait_for_nothing(engine: LockstepEngine, overlap: Overlap, flight: LateRound, x: FlatVector) -> None:
        flight.is_converted, flight.future = True, Future()
        flight.future.set_result(1.0)

    patch.setattr(LockstepEngine, "_wait", wait_for_nothing)


def correct_twice(patch: pytest.MonkeyPatch) -> None:
    """A round that a flush has applied stays in flight."""

    def apply(overlap: Overlap, flight: LateRound, x: FlatVector, *, is_flush: bool = False) -> None:
        assert overlap._snapshot is not None
        x.add_(overlap._snapshot, alpha=flight.result)

    patch.setattr(Overlap, "apply", apply)


def flush_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """A flush applies a round only if that is complete."""
    flush = LockstepEngine.flush

    def flush_if_done(engine: LockstepEngine, x: FlatVector) -> bool:
        flight = None if engine.overlap is None else engine.overlap.flight
        return flight is not None and flight.future.done() and flush(engine, x)

    patch.setattr(LockstepEngine, "flush", flush_if_done)


def snapshot_of(engine: LockstepEngine) -> FlatVector:
    """The vector that is sent."""
    assert engine.overlap is not None
    assert engine.overlap._snapshot is not None
    return engine.overlap._snapshot


# WAGMA.


def merge_without_the_lock(patch: pytest.MonkeyPatch) -> None:
    """The worker puts the next result in the place of the one that is merged.

    A merge reads its second half once the next result is there, as that of a large model does. So the race shows in
    each merge during which the next group average ends, however slow the machine makes its threads. One rank merges
    without such a wait, and others for longer: they reach the next round at different times.
    """
    seen: dict[GroupResult, int] = {}

    def merge_to(result: GroupResult, x: FlatVector, *, weight: float) -> None:
        slowness = seen.setdefault(result, len(seen))
        newest = result._newest
        assert newest is not None
        result._end()
        last = halves(newest)[1][-1:]
        before, until = float(last), time.monotonic() + slowness
        for part, average in zip(halves(x), halves(newest), strict=True):
            part.mul_(1 - weight).add_(average, alpha=weight)
            with let_go_of(result._published.lock):
                while time.monotonic() < until and float(last) == before:
                    linger(1)
                linger(1)

    lend_nothing(patch)
    patch.setattr(GroupResult, "merge_to", merge_to)
    patch.setattr(WaitAvoidingWorker, "holding_back", lambda worker, t: contextlib.nullcontext())


def publish_over_the_contribution(patch: pytest.MonkeyPatch) -> None:
    """`publish_over_what_is_read`, in rounds that read a snapshot."""
    lend_nothing(patch)
    publish_over_what_is_read(patch, slowness=10)


def train_on_a_lent_model(patch: pytest.MonkeyPatch) -> None:
    """Training waits for the begin of a round in place, and not for its end."""

    def wait(engine: WaitAvoidingEngine, lent: LentModel, t: int) -> None:
        engine.worker.wait_for(lambda: engine.worker.num_started > t, f"the begin of round {t}")
        engine._merged = t - 2  # so that the average of the round before is no error

    patch.setattr(WaitAvoidingEngine, "_wait_for_average_in_place", wait)


def lend_nothing(patch: pytest.MonkeyPatch) -> None:
    """Let all rounds read a snapshot and write a vector of their own, as those of late ranks do."""
    patch.setattr(WaitAvoidingWorker, "lend", lambda worker, x, *, t: worker.publish(x, t=t))


def reuse_the_inbox(patch: pytest.MonkeyPatch) -> None:
    """The message of the next phase comes into the inbox before the last one is added."""
    finish = GroupAverage.finish_to

    def finish_early(average: GroupAverage, out: FlatVector) -> None:
        _, *others = [message.phase for message in average._messages]
        if len(others) != 1 or len(average._posted) != 1:
            finish(average, out)
            return
        ((inbox,),), (pending,) = average._inbox, average._posted
        assert others[0].in_peer is not None
        assert others[0].out_peer is not None
        pending.wait()
        coming = average.transport.exchange({}, {others[0].in_peer: [inbox.raw]}, tag=average._t)
        linger(1)
        out.raw.copy_(average._source.raw)
        out.add_segments_(inbox, alpha=1.0)
        average.transport.exchange({others[0].out_peer: [out.raw]}, {}, tag=average._t).wait()
        coming.wait()
        out.add_segments_(inbox, alpha=1.0)
        average._posted.clear()
        average._num_posted = 0
        out.segments[0].div_(average.groups.num_members(average.transport.rank, average._t))

    patch.setattr(GroupAverage, "finish_to", finish_early)


# dpwa.


def merge_while_the_next_arrives(patch: pytest.MonkeyPatch) -> None:
    """The next fetch starts before the last model is merged, in the same memory."""
    wait = ModelFetcher.wait

    def wait_and_start(fetcher: ModelFetcher) -> Any:
        fetched = wait(fetcher)
        if fetched is not None:
            with contextlib.suppress(RuntimeError):  # at the end of a wrapper its thread takes no jobs any more
                fetcher.start()
        return fetched

    def flush(engine: PairwiseEngine, x: FlatVector) -> bool:
        if engine._await() is None:
            return False
        for to, part in zip(halves(x), halves(engine.fetcher.arrived), strict=True):
            to.copy_(part)
            futures.wait([] if engine.fetcher._future is None else [engine.fetcher._future], 0.2)
        engine.stats.record(0)
        return True

    patch.setattr(ModelFetcher, "wait", wait_and_start)
    patch.setattr(PairwiseEngine, "flush", flush)


RACES = (
    Race("updates that are lost", "adpsgd", lose_updates, SUM, 2),
    Race("lock left out in deliver", "adpsgd", deliver_without_the_lock, f"{SUM}|{TORN}", 2),
    Race("lock left out in collect", "adpsgd", collect_without_the_lock, f"{SUM}|{TORN}", 5),
    Race("message read before it is there", "adpsgd", read_early, f"{SUM}|{TORN}", 2),
    Race("y overwritten while sent", "adpsgd", publish_over_what_is_read, f"{SUM}|{TORN}", 5),
    Race("deadlock", "adpsgd", wait_with_the_lock, DEADLOCK, 2),
    Race("training while x is filled", "osgp", train_while_x_is_filled, f"{SUM}|{TORN}", 1),
    Race("snapshot overwritten while sent", "osgp", overwrite_what_is_sent, f"{SUM}|{TORN}", 1, LONG),
    Race("correction before it is complete", "osgp", correct_too_soon, f"{SUM}|{TORN}", 1),
    Race("correction applied twice", "osgp", correct_twice, f"{SUM}|{TORN}|{IN_FLIGHT}", 9),
    Race("flush that does not wait", "osgp", flush_without_waiting, f"{SUM}|{TORN}|{IN_FLIGHT}", 9),
    Race("result replaced while merged", "wagma", merge_without_the_lock, f"{HULL}|{TORN}", 3),
    Race("y overwritten while sent", "wagma", publish_over_the_contribution, f"{HULL}|{TORN}", 9),
    Race("x trained while it is lent", "wagma", train_on_a_lent_model, f"{HULL}|{TORN}|{IN_EVAL}", 9),
    Race("inbox used again before it is added", "wagma", reuse_the_inbox, f"{HULL}|{TORN}", 10),
    Race("snapshot reused while served", "dpwa", publish_over_what_is_read, f"{HULL}|{TORN}", 5),
    Race("fetch into what is merged", "dpwa", merge_while_the_next_arrives, f"{HULL}|{TORN}", 5),
)

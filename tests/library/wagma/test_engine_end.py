"""Checkpoints, failures and the end of WAGMA-SGD's engine."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gossip_modules.engine.liveness import ControlMessage
from gossip_modules.extend import FlatVector
from gossip_modules.wagma.engine import WaitAvoidingEngine
from gossip_modules.wagma.pace import RelativePace
from gossip_modules.wagma.worker import ARRIVED, WaitAvoidingWorker
from tests.harness.ranks import assert_no_gossip_threads, gossip_threads, run_ranks
from tests.library.wagma.workers import PATIENCE, Rank, be_on_time


def test_a_resumed_rank_contributes_its_published_model(monkeypatch: pytest.MonkeyPatch) -> None:
    be_on_time(monkeypatch, before=1)
    turn = threading.Barrier(2)
    states: dict[int, dict[str, Any]] = {}

    def before(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        rank.round(10.0 * (1 + group.rank()))
        if group.rank() == 0:
            rank.round()
        rank.engine.settle(rank.vector)
        states[group.rank()] = rank.engine.state_dict()
        rank.end()

    def after(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        rank.engine.load_state_dict(states[group.rank()])
        assert rank.engine.t == 2
        rank.engine.begin()
        turn.wait(PATIENCE)
        if group.rank() == 0:
            assert rank.round(4.0) == (4 + 20) / 2
            turn.wait(PATIENCE)
        else:
            turn.wait(PATIENCE)
            assert rank.round(6.0) == pytest.approx((4 + 20 + 6) / 3, abs=1e-6)
            assert rank.engine.stats.max_staleness == 2  # published at 0, for round 2
        rank.end()

    run_ranks(2, before)
    assert states[1]["published_at"] == 0
    run_ranks(2, after)


@pytest.mark.parametrize("n", [2, 5])
def test_ranks_that_load_different_rounds_are_told(n: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        t = 2 if group.rank() == 1 else 4
        rank.engine.load_state_dict({**rank.engine.state_dict(), "t": t})
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"got a model of round {t} among models of rounds 2 to 4 on other"):
                rank.round()
        rank.engine.close()

    run_ranks(n, body)


@pytest.mark.parametrize("settles", [False, True])
def test_a_fast_rank_waits_until_the_others_have_loaded(settles: bool) -> None:
    """Its averages would be of models that are about to be replaced, and of rounds that are counted anew."""
    workers: dict[int, WaitAvoidingWorker] = {}

    def body(group: dist.ProcessGroup) -> float:
        rank = Rank(group)
        workers[group.rank()] = rank.worker
        rank.round()
        rank.engine.settle(rank.vector)
        rank.x.fill_(3.0 + 2 * group.rank())
        state = {**rank.engine.state_dict(), "published": rank.vector.raw.clone()}
        rank.x.fill_(99.0)
        if group.rank() == 1:
            deadline = time.monotonic() + PATIENCE
            while workers[0].num_beginnings < 2:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert rank.worker.num_started == 1
        rank.engine.load_state_dict(state)
        if settles:
            rank.engine.settle(rank.vector)
        value = rank.round(3.0 + 2 * group.rank())
        assert rank.engine.t == 2
        rank.end()
        return value

    assert run_ranks(2, body) in ([4.0, pytest.approx(13 / 3)], [pytest.approx(11 / 3), 4.0], [4.0, 4.0])


def test_arrivals_of_before_a_load_start_nothing() -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        rank.engine.restart()
        rank.engine.publish_loaded(rank.vector)
        rank.worker.liveness.post(1 - group.rank(), ControlMessage(ARRIVED, 7, rank.worker.num_beginnings))
        rank.engine.begin()
        rank.worker.liveness.post(1 - group.rank(), ControlMessage(ARRIVED, 7, rank.worker.num_beginnings - 1))
        rank.engine.settle(rank.vector)
        assert rank.worker.newest_arrival == -1
        rank.end()
        assert rank.engine.t == 0

    run_ranks(2, body)


def test_settle_ends_in_one_round_though_others_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is late in `settle()` does not join the global average of those that have left it."""
    gather = WaitAvoidingEngine._gather_rounds
    workers: dict[int, WaitAvoidingWorker] = {}

    def late(engine: WaitAvoidingEngine, what: str) -> list[int]:
        rounds = gather(engine, what)
        if what == "the end of all rounds" and engine.worker.transport.rank == 3 and engine.t == 2:
            worker = workers[1]
            with worker.state:
                assert worker.state.wait_for(lambda: worker.newest_arrival >= 2, PATIENCE)
        return rounds

    monkeypatch.setattr(WaitAvoidingEngine, "_gather_rounds", late)

    def body(group: dist.ProcessGroup) -> int:
        rank = Rank(group, period=3)
        workers[group.rank()] = rank.worker
        rank.round()
        rank.round()
        rank.engine.settle(rank.vector)
        settled = rank.engine.t
        rank.round()
        rank.end()
        return settled

    assert run_ranks(4, body) == [2] * 4


def test_a_peer_that_has_closed_is_named() -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, period=4)
        rank.engine.settle(rank.vector)
        if group.rank() == 0:
            with rank.worker.state:
                assert rank.worker.state.wait_for(lambda: bool(rank.worker.liveness.closed), PATIENCE)
            for go_on in (rank.round, lambda: rank.engine.settle(rank.vector)):
                with pytest.raises(ConnectionError, match=r"^rank 0: in round 0, ranks \[1\] have closed; call settle"):
                    go_on()
        rank.engine.close()

    run_ranks(2, body)


def test_an_interrupted_flush_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    be_on_time(monkeypatch)

    def body(group: dist.ProcessGroup) -> float:
        rank = Rank(group, overlap=True)
        rank.round()
        wait_for = rank.worker.wait_for

        def interrupt(is_over: Any, what: str) -> None:
            rank.worker.wait_for = wait_for  # type: ignore[method-assign]
            raise KeyboardInterrupt

        rank.worker.wait_for = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            rank.engine.flush(rank.vector)
        assert rank.engine.is_in_flight
        rank.end()
        return rank.value

    assert run_ranks(2, body) == [0.5, 0.5]


def test_after_a_failure_the_state_can_be_saved() -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, overlap=True)
        rank.engine.settle(rank.vector)
        rank.engine._round_in_flight = 0  # as if started
        rank.worker.liveness.background.fail(ConnectionError("lost"))
        with pytest.raises(ConnectionError, match="lost"):
            rank.engine.flush(rank.vector)
        assert not rank.engine.flush(rank.vector)
        assert rank.engine.state_dict()
        rank.engine.close()

    run_ranks(2, body)


def test_state_of_another_model_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, numel=8)
        state = rank.engine.state_dict()
        for published in (state["published"][:-1], state["published"].float()):
            with pytest.raises(ValueError, match=r"got a published model of \d+ elements of .*, expected \d+ bytes"):
                rank.engine.load_state_dict({**state, "published": published})
        rank.end()

    run_ranks(2, body)


def test_a_hung_peer_is_named(impatient_close: None, monkeypatch: pytest.MonkeyPatch) -> None:
    be_on_time(monkeypatch, before=1)
    n, hung = 4, 2
    barrier, all_know = threading.Barrier(n), threading.Barrier(n)
    errors: dict[int, str] = {}

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, size=4, timeout=timedelta(seconds=1))
        rank.round()
        rank.engine.settle(rank.vector)
        if group.rank() == hung:
            average = rank.worker.average
            start = average.start

            def held_start(s: FlatVector, t: int, fill: Any = None) -> None:
                all_know.wait(PATIENCE)
                start(s, t, fill)

            average.start = held_start  # type: ignore[method-assign]
            barrier.wait(PATIENCE)
            with rank.worker.state:  # the others give it up
                rank.worker.state.wait_for(rank.worker.liveness.failed.done, PATIENCE)
            with contextlib.suppress(ConnectionError, TimeoutError):
                rank.engine.close()
            return
        barrier.wait(PATIENCE)
        if group.rank() == 0:  # does not wait for it, and hears of it in its next round
            with rank.worker.state:
                rank.worker.state.wait_for(rank.worker.liveness.failed.done, PATIENCE)
        for _ in range(2):  # and again: there is no going on
            with pytest.raises((ConnectionError, TimeoutError)) as caught:
                rank.round()
        errors[group.rank()] = str(caught.value)
        all_know.wait(PATIENCE)
        rank.engine.close()

    run_ranks(n, body)
    assert len(errors) == n - 1
    for rank, error in errors.items():
        assert re.search(rf"^rank {rank}: .*round 1\b.*rank {hung} did not come", error), error


def test_close_ends_all_threads() -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, period=3)
        for _ in range(7):
            rank.round()
        rank.end()
        rank.engine.close()

    run_ranks(4, body)
    assert_no_gossip_threads()


def test_close_leaves_no_threads_behind_though_the_others_stay() -> None:
    closed = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        rank.engine.settle(rank.vector)
        if group.rank() == 1:
            assert closed.wait(PATIENCE)
        rank.engine.close()
        if group.rank() == 0:
            deadline = time.monotonic() + PATIENCE
            while any(name.split("-")[2] == "0" for name in names()):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        closed.set()

    def names() -> list[str]:
        return [thread.name for thread in gossip_threads()]

    run_ranks(3, body)
    assert_no_gossip_threads()


def test_an_unseen_error_is_raised_on_close() -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        rank.round()
        if group.rank() == 0:
            rank.worker.liveness.background.fail(ConnectionError("lost"))
            with pytest.raises(ConnectionError, match="lost"):
                rank.engine.close()
        rank.engine.close()

    run_ranks(2, body)


def test_pace_is_the_least_of_three_steps() -> None:
    pace = RelativePace()
    pace.finish_step(7, is_halted=False)  # the first round of all: no step before it
    for front, expected in ((5, 1), (4, 1), (6, 4), (1, 1), (5, 1), (5, 1), (5, 5)):
        pace.start_step(10)
        pace.finish_step(10 + front, is_halted=False)
        assert pace.rounds == expected
        assert pace.is_slow == (expected > 1)
    pace.start_step(0)
    pace.finish_step(2, is_halted=True)  # cut short: says nothing
    assert pace.rounds == 5
    pace.start_step(0)
    pace.finish_step(9, is_halted=True)  # at least nine
    assert list(pace._rounds) == [5, 5, 9]
    assert pace.seconds >= 0

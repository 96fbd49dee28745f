"""A rank of WAGMA that dies, is stopped or does not come: every survivor says who it was, and in time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from gossip_modules import GroupAverageDataParallel
from gossip_modules.engine.liveness import ControlKind, ControlMessage, FailureReason, Liveness
from gossip_modules.transport.listener import ConnectionLost, Listener
from tests.harness.problems import mlp, sgd, train_step
from tests.harness.processes import run_processes, start_clock
from tests.harness.ranks import HangUp, assert_no_gossip_threads, run_ranks
from tests.library.wagma.workers import Rank

PATIENCE = 10.0
TIMEOUT = 30.0  # far from what a closed connection takes


def die(rank: Rank) -> NoReturn:
    """Close all connections without a last message, as the end of a process does."""
    rank.worker.liveness.fail(ConnectionError("it dies"))  # its threads say nothing while connections close
    rank.worker.control.close_connections()
    with contextlib.suppress(ConnectionError):
        rank.engine.close()
    raise HangUp


def go_on(rank: Rank, *, settles: bool = False) -> NoReturn:
    """Until an error."""
    while True:
        if settles:
            rank.engine.settle(rank.vector)
        else:
            rank.round()


# Each pair of a size, an action of the ranks and a dying rank occurs together.
@pytest.mark.parametrize(
    ("n", "action", "victim"),
    [
        *((n, action, victim) for n in (2, 4) for action, victim in (("train", 0), ("settle", 1))),
        *((n, action, victim) for n in (3, 6) for action, victim in (("train", 1), ("settle", 0))),
    ],
)
def test_a_dead_rank_is_named_by_all_at_once(n: int, action: str, victim: int) -> None:
    together = threading.Barrier(n)
    errors: dict[int, tuple[str, float]] = {}

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, period=3, timeout=timedelta(seconds=TIMEOUT))
        rank.round()
        together.wait(PATIENCE)
        if group.rank() == victim:
            die(rank)
        start = time.monotonic()
        with pytest.raises(ConnectionError) as caught:
            go_on(rank, settles=action == "settle")
        errors[group.rank()] = str(caught.value), time.monotonic() - start
        rank.engine.close()

    run_ranks(n, body)
    assert len(errors) == n - 1
    for rank, (message, seconds) in errors.items():
        assert re.search(rf"^rank {rank}: in round \d+, rank {victim} died: its connection closed", message), message
        assert seconds < TIMEOUT / 2
    assert_no_gossip_threads()


def test_the_reason_of_a_failure_is_known_before_the_rank_counts_as_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the training thread could say that it has closed, and not who died."""
    fail = Liveness.fail
    was_closed: list[bool] = []

    def watch(liveness: Liveness, error: BaseException, *cause: Any) -> None:
        if "rank 1 left" in str(error) and not liveness.has_failed:
            was_closed.append(1 in liveness.closed)
        fail(liveness, error, *cause)

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        together.wait(PATIENCE)
        if group.rank() == 1:
            rank.worker.liveness.leave(ValueError("of its own"))
            raise HangUp
        with pytest.raises(ConnectionError, match="rank 1"):
            go_on(rank)
        rank.engine.close()

    together = threading.Barrier(3)
    monkeypatch.setattr(Liveness, "fail", watch)
    run_ranks(3, body)
    assert was_closed
    assert not any(was_closed)


def test_a_rank_that_fails_closes_no_connection_before_its_peers_have_read_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that writes to a connection that has closed drops the messages that it has not read.

    With more peers one of them may hear the cause from another one first.
    """
    handle = Liveness._handle
    told: set[int] = set()
    told_at_close: list[set[int]] = []

    def handle_late(liveness: Liveness, sender: int, message: ControlMessage) -> None:
        if message.kind == ControlKind.FAILED and sender == 1:
            time.sleep(0.2)
            told.add(liveness.transport.rank)
        handle(liveness, sender, message)

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        together.wait(PATIENCE)
        if group.rank() == 1:
            close_connections = rank.worker.control.close_connections

            def close() -> None:
                told_at_close.append({*told})
                close_connections()

            monkeypatch.setattr(rank.worker.control, "close_connections", close)
            rank.worker.liveness.leave(ValueError("of its own"))
            raise HangUp
        with pytest.raises(ConnectionError, match="rank 1"):
            go_on(rank)
        rank.engine.close()

    together = threading.Barrier(2)
    monkeypatch.setattr(Liveness, "_handle", handle_late)
    run_ranks(2, body)
    assert told_at_close == [{0}]


def test_a_collective_that_fails_before_the_dead_rank_is_heard_of_blames_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If its rank closed the connections at once, its peers would take that for the death of this rank."""
    n, victim = 3, 1
    lost = Listener._lost

    def late(listener: Listener, peer: int, *how: Any) -> ConnectionLost:
        if peer == victim:
            time.sleep(0.2)
        return lost(listener, peer, *how)

    def body(group: dist.ProcessGroup) -> str:
        rank = Rank(group, period=1, timeout=timedelta(seconds=TIMEOUT))  # each round is a collective
        rank.round()
        together.wait(PATIENCE)
        if group.rank() == victim:
            die(rank)
        with pytest.raises(ConnectionError) as caught:
            go_on(rank)
        rank.engine.close()
        return str(caught.value)

    together = threading.Barrier(n)
    monkeypatch.setattr(Listener, "_lost", late)
    for message in run_ranks(n, body):
        assert re.search(rf"^rank \d: in round \d+, rank {victim} died", message), message


def test_a_rank_that_answers_nothing_is_named_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its process is stopped: its connections stay open."""
    n, stopped, timeout = 4, 2, 2.0
    handle = Liveness._handle
    over = threading.Event()
    errors: dict[int, tuple[str, float]] = {}

    def deaf(liveness: Liveness, sender: int, message: ControlMessage) -> None:
        if liveness.transport.rank != stopped or message.kind == ControlKind.FAILED or over.is_set():
            handle(liveness, sender, message)

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, period=2, timeout=timedelta(seconds=timeout))
        rank.round()
        together.wait(PATIENCE)
        if group.rank() == stopped:
            all_know.wait(PATIENCE)
            over.set()
            raise HangUp
        start = time.monotonic()
        with pytest.raises(TimeoutError) as caught:
            go_on(rank)
        errors[group.rank()] = str(caught.value), time.monotonic() - start
        all_know.wait(PATIENCE)
        rank.engine.close()

    together, all_know = threading.Barrier(n), threading.Barrier(n)
    monkeypatch.setattr(Liveness, "_handle", deaf)
    run_ranks(n, body)
    for rank, (message, seconds) in errors.items():
        assert re.search(rf"^rank {rank}: .*rank {stopped} does not answer", message), message
        assert seconds < timeout + 1


def test_a_failure_after_settle_is_none_until_training_goes_on() -> None:
    dead = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        rank.round()
        rank.engine.settle(rank.vector)
        if group.rank() == 1:
            dead.set()
            die(rank)
        assert dead.wait(PATIENCE)
        liveness = rank.worker.liveness
        with rank.worker.state:
            assert rank.worker.state.wait_for(liveness.failed.done, PATIENCE)
        if group.rank() == 0:
            with pytest.raises(ConnectionError, match=r"rank 1 died"):
                rank.round()
        rank.engine.close()

    run_ranks(3, body)


def test_a_rank_that_was_stopped_says_so_itself() -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        if group.rank() == 0:
            message = r"^rank 0: in round 0, rank 1 has given this rank up, which it waited for \(timeout 20 s\)"
            rank.worker.liveness._handle(1, ControlMessage(ControlKind.FAILED, 0, FailureReason.SILENT))
            with pytest.raises(TimeoutError, match=message):
                rank.round()
        with pytest.raises((TimeoutError, ConnectionError)):
            go_on(rank)
        rank.engine.close()

    run_ranks(2, body)


def lose_a_rank(rank: int, victim: int, how: str) -> None:
    """Train; one process is killed between two steps, while it trains or while the others settle."""
    wrapper = GroupAverageDataParallel(mlp(), sync_period=4, timeout=timedelta(seconds=TIMEOUT))
    optimizer = sgd(wrapper)
    for step in range(1000):
        if step == 6:
            # Unlike in dist.barrier(), ranks that wait here take part in the global average of one that was slow and
            # skipped rounds, and so comes to it in an earlier step.
            wrapper.settle()
            start_clock()
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "averaged":
                with wrapper.averaged():
                    pass
        train_step(wrapper, optimizer, rank, step)


@pytest.mark.e2e
@pytest.mark.parametrize(("victim", "how"), [(0, "train"), pytest.param(1, "averaged", marks=pytest.mark.soak)])
def test_a_killed_process_is_named_by_all_at_once(victim: int, how: str) -> None:
    outcomes = run_processes(4, lose_a_rank, victim, how, expect_result=False)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.exit_code == 1
            assert outcome.seconds < TIMEOUT / 2
            pattern = rf"^ConnectionError: rank {rank}: in round \d+, rank {victim} died"
            assert re.search(pattern, outcome.error), outcome.error


def stop_a_rank(rank: int, victim: int) -> None:
    """Train; one process is stopped when all have met."""
    wrapper = GroupAverageDataParallel(mlp(), sync_period=4, timeout=timedelta(seconds=8.0))
    optimizer = sgd(wrapper)
    for step in range(100_000):
        if step == 6:
            wrapper.settle()
            start_clock()
            if rank == victim:
                os.kill(os.getpid(), signal.SIGSTOP)
        train_step(wrapper, optimizer, rank, step)


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_stopped_is_named_by_all(victim: int) -> None:
    outcomes = run_processes(4, stop_a_rank, victim, expect_result=False, hung=(victim,))
    for rank in {*range(4)} - {victim}:
        pattern = rf"^TimeoutError: rank {rank}: .*rank {victim} does not answer"
        assert re.search(pattern, outcomes[rank].error), outcomes[rank]
        assert outcomes[rank].exit_code == 1
        assert outcomes[rank].seconds < 9.0


def close_without_settling(rank: int) -> int:
    """A plain loop of equal steps at unequal speed."""
    wrapper = GroupAverageDataParallel(mlp(), sync_period=4, timeout=timedelta(seconds=TIMEOUT))
    for _ in range(10):
        time.sleep(0.002 * rank)
        wrapper(torch.ones(1, 3))
    wrapper.close()
    assert_no_gossip_threads()
    return wrapper.round


@pytest.mark.e2e
def test_processes_with_equal_steps_end_together() -> None:
    assert len({outcome.result for outcome in run_processes(3, close_without_settling)}) == 1

"""A peer that dies or hangs: every neighbour says so by name and in time, and every process ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from gossip_modules import AllReduceDataParallel, GossipDataParallel, RingGraph, Schedule
from gossip_modules.transport.stores import job_store
from tests.harness.problems import mlp, sgd, train_step
from tests.harness.processes import Outcome, run_processes, start_clock

NUM_RANKS = 4
VICTIM = 1
NEIGHBOURS = (0, 2)
ROUND = 3
SECONDS = {signal.SIGKILL: 30.0, signal.SIGSTOP: 10.0}  # the timeout: a killed peer is noticed long before


def fork_a_child() -> None:
    """A child that lives until the test has ended, as a loader process that reads from a slow file system."""
    store: Any = job_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if os.fork() == 0:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO(os.fstat(int(name)).st_mode):  # by which the test sees the end of its parent
                    os.close(int(name))
        while os.path.exists(store.path):
            threading.Event().wait(0.05)
        os._exit(0)


def lose_a_peer(rank: int, overlap: bool, how: int, average_every: int) -> None:
    """Train on a ring; one rank gets a signal between two rounds."""
    wrapper = GossipDataParallel(
        mlp(),
        graph=RingGraph(NUM_RANKS, peers_per_itr=2),
        overlap=overlap,
        schedule=Schedule(average_every=average_every),
        timeout=timedelta(seconds=SECONDS[signal.Signals(how)]),
    )
    optimizer = sgd(wrapper)
    for step in range(1000):
        if step == ROUND:
            # So that no rank is late for a reason of its own, and the round before is over.
            wrapper.flush()
            dist.barrier()
            start_clock()
            if rank == VICTIM:
                fork_a_child()
                os.kill(os.getpid(), how)
        train_step(wrapper, optimizer, rank, step)


def outcomes_of(overlap: bool, how: signal.Signals, average_every: int = 0) -> list[Outcome]:
    """How the ranks ended; all of them did, by themselves (a stopped one is killed by the helper)."""
    hung = (VICTIM,) if how is signal.SIGSTOP else ()
    outcomes = run_processes(NUM_RANKS, lose_a_peer, overlap, int(how), average_every, expect_result=False, hung=hung)
    assert outcomes[VICTIM].exit_code == (-signal.SIGKILL if how is signal.SIGKILL else None)
    assert all(outcomes[rank].exit_code == 1 for rank in range(NUM_RANKS) if rank != VICTIM), outcomes
    return outcomes


@pytest.mark.e2e
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_killed_peer_is_named_by_its_neighbours(overlap: bool) -> None:
    outcomes = outcomes_of(overlap, signal.SIGKILL)
    for rank in NEIGHBOURS:
        assert outcomes[rank].seconds < SECONDS[signal.SIGKILL]
        pattern = rf"^ConnectionError: rank {rank}: round {ROUND}: .*(from|to) rank {VICTIM}\b.* failed after \d+\.\d s"
        assert re.search(pattern, outcomes[rank].error), outcomes[rank].error
    # The rank opposite hears of it from the ranks that ended first, and blames the first one.
    assert re.search(rf"^ConnectionError: rank 3: .*rank {VICTIM} is gone \(seen by", outcomes[3].error), outcomes[
        3
    ].error


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.parametrize("overlap", [False, True])
def test_a_hung_peer_is_named_by_its_neighbours(overlap: bool) -> None:
    outcomes, timeout = outcomes_of(overlap, signal.SIGSTOP), SECONDS[signal.SIGSTOP]
    for rank in NEIGHBOURS:
        assert 0.9 * timeout < outcomes[rank].seconds < timeout + 3
        pattern = rf"^TimeoutError: rank {rank}: round {ROUND}: .*from rank {VICTIM}\b.*\(timeout {timeout:g} s\)"
        assert re.search(pattern, outcomes[rank].error), outcomes[rank].error
    assert f"rank {VICTIM} does not answer" in outcomes[3].error


@pytest.mark.soak
@pytest.mark.e2e
def test_a_hung_peer_is_named_in_a_global_average() -> None:
    outcomes = outcomes_of(False, signal.SIGSTOP, average_every=ROUND + 1)
    for rank in (0, 2, 3):
        what = rf"rank {rank}: global average in round {ROUND} among ranks \[0, 1, 2, 3\] failed after"
        pattern = rf"^TimeoutError: {what} .*: rank {VICTIM} did not take part in global average in round {ROUND};"
        assert re.search(pattern, outcomes[rank].error), outcomes[rank].error
        assert outcomes[rank].seconds < SECONDS[signal.SIGSTOP] + 3


def average_alone(rank: int) -> None:
    """One rank calls averaged() while the others train."""
    timeout = timedelta(seconds=SECONDS[signal.SIGSTOP])
    wrapper = GossipDataParallel(mlp(), graph=RingGraph(NUM_RANKS, peers_per_itr=2), timeout=timeout)
    optimizer = sgd(wrapper)
    for step in range(1000):
        if step == ROUND:
            dist.barrier()
            start_clock()
            if rank == VICTIM:
                with wrapper.averaged():
                    pass
        train_step(wrapper, optimizer, rank, step)


@pytest.mark.soak
@pytest.mark.e2e
def test_a_rank_that_calls_a_collective_alone_gets_the_names_of_the_others() -> None:
    outcomes, timeout = run_processes(NUM_RANKS, average_alone, expect_result=False), SECONDS[signal.SIGSTOP]
    assert all(outcome.seconds < timeout + 3 for outcome in outcomes)
    assert all(outcome.exit_code == 1 for outcome in outcomes)
    pattern = r"averaged\(\): global average in round 0 among ranks \[0, 1, 2, 3\] failed .*did not call averaged\(\)"
    assert re.search(pattern, outcomes[VICTIM].error), outcomes[VICTIM].error
    for rank in NEIGHBOURS:
        assert re.search(rf"rank {VICTIM} gave up averaged\(\)", outcomes[rank].error), outcomes[rank].error


def lose_a_peer_of_all_reduce(rank: int, how: int) -> None:
    """DistributedDataParallel with the common methods, in small buckets; one rank gets a signal between two steps."""
    wrapper = AllReduceDataParallel(mlp(), bucket_cap_mb=0.001)
    optimizer = sgd(wrapper)
    for step in range(1000):
        if step == ROUND:
            dist.barrier()
            start_clock()
            if rank == VICTIM:
                fork_a_child()
                os.kill(os.getpid(), how)
        train_step(wrapper, optimizer, rank, step)


@pytest.mark.e2e
def test_after_a_killed_peer_the_backward_of_all_reduce_raises_on_all_ranks() -> None:
    """The error is torch's own: it names an address, and no rank."""
    outcomes = run_processes(NUM_RANKS, lose_a_peer_of_all_reduce, int(signal.SIGKILL), expect_result=False)
    for rank in (0, 2, 3):
        assert outcomes[rank].exit_code == 1
        assert outcomes[rank].seconds < SECONDS[signal.SIGKILL]
        assert re.search(r"^RuntimeError: .*Connection", outcomes[rank].error), outcomes[rank].error


def lose_a_peer_in_construction(rank: int) -> None:
    """One rank ends before it has made its wrapper, and so before anybody is connected to it."""
    start_clock()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    GossipDataParallel(mlp(), timeout=timedelta(seconds=SECONDS[signal.SIGSTOP]))


@pytest.mark.soak
@pytest.mark.e2e
def test_a_peer_killed_in_construction_is_named() -> None:
    outcomes = run_processes(NUM_RANKS, lose_a_peer_in_construction, expect_result=False)
    for rank in (0, 2, 3):
        error = outcomes[rank].error
        assert error.startswith(f"ConnectionError: rank {rank}: "), error
        assert "comparing model and options among ranks" in error
        assert re.search(rf"rank {VICTIM} (is gone|did not take part in comparing)", error), error
        assert outcomes[rank].seconds < SECONDS[signal.SIGSTOP] + 3


def lose_a_peer_in_join(rank: int) -> None:
    """Uneven inputs; one rank stops between two steps, before it has told the others of its next batch."""
    wrapper = GossipDataParallel(mlp(), timeout=timedelta(seconds=SECONDS[signal.SIGSTOP]))
    optimizer = sgd(wrapper)
    with Join([wrapper]):
        for step in range(1000):
            if step == ROUND:
                dist.barrier()
                start_clock()
                if rank == VICTIM:
                    os.kill(os.getpid(), signal.SIGSTOP)
            train_step(wrapper, optimizer, rank, step)


@pytest.mark.soak
@pytest.mark.e2e
def test_a_hung_peer_in_join_is_an_error_in_time() -> None:
    """Within the wrapper's timeout, not that of the default group, which is 30 s here."""
    outcomes, timeout = (
        run_processes(3, lose_a_peer_in_join, expect_result=False, hung=(VICTIM,)),
        SECONDS[signal.SIGSTOP],
    )
    for rank in (0, 2):
        what = r"telling ranks 0 to 2 of another batch \(Join\) failed after \d+\.\d s"
        pattern = rf"^(Timeout|Connection)Error: rank {rank}: (.*: )?{what} \(timeout {timeout:g} s\)"
        assert f"rank {VICTIM} does not answer" in outcomes[rank].error, outcomes[rank].error
        assert re.search(pattern, outcomes[rank].error), outcomes[rank].error
        assert outcomes[rank].seconds < timeout + 3
        assert outcomes[rank].exit_code == 1
    assert any(outcomes[rank].error.startswith("TimeoutError") for rank in (0, 2))


def sum_of_ranks(rank: int) -> float:
    """A healthy world, for the helper itself."""
    x = torch.full((1,), float(rank))
    dist.all_reduce(x)
    return float(x)


@pytest.mark.e2e
def test_the_helper_returns_results() -> None:
    assert [outcome.result for outcome in run_processes(2, sum_of_ranks)] == [1.0, 1.0]

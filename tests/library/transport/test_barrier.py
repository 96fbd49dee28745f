"""Barriers: all ranks name the same late ranks, whichever of them each one has waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from gossip_modules import connect
from gossip_modules.transport.deadline import Deadline
from gossip_modules.transport.gloo import CAN_BE_LAZY, at_once, gloo_group
from gossip_modules.transport.process_group import ProcessGroupTransport
from gossip_modules.transport.waits import InTurn
from tests.harness.ranks import CPU, TIMEOUT, HangUp, run_ranks

T = TypeVar("T")
few = pytest.mark.skipif(not CAN_BE_LAZY, reason="this torch connects all ranks")
SECONDS = 1.0
MARGIN = 4.0  # half a second for the notes of other ranks, the rest for a busy machine


def over(group: dist.ProcessGroup, seconds: float = SECONDS) -> ProcessGroupTransport:
    """With a store, as in a job."""
    return connect(group, module_device=CPU, timeout=timedelta(seconds=seconds))


def errors_where(n: int, late: set[int], *, is_closed: bool = False) -> list[tuple[str, float]]:
    """The error of each rank that calls an all-reduce, and its seconds; `late` ranks do not call it, or close."""
    barrier = threading.Barrier(n)

    def body(group: dist.ProcessGroup) -> tuple[str, float]:
        transport = over(group, TIMEOUT.total_seconds() if is_closed else SECONDS)
        transport.all_reduce(torch.zeros(1), what="a first sum")
        barrier.wait(TIMEOUT.total_seconds())
        if transport.rank in late:
            if is_closed:
                raise HangUp
            return "", 0.0
        start = time.monotonic()
        with pytest.raises((TimeoutError, ConnectionError)) as caught:
            transport.all_reduce(torch.zeros(1), what="a sum")
        return str(caught.value), time.monotonic() - start

    return [result for rank, result in enumerate(run_ranks(n, body)) if rank not in late or not is_closed]


@pytest.mark.parametrize("n", [4, 5, 8, 16])
def test_every_rank_names_the_late_rank_within_one_timeout(n: int) -> None:
    for message, seconds in errors_where(n, {2}):
        assert not message or ": rank 2 did not take part in a sum" in message
        assert seconds < SECONDS + MARGIN


@pytest.mark.parametrize("n", [5, 16])
def test_every_rank_names_both_late_ranks(n: int) -> None:
    for message, seconds in errors_where(n, {1, 4}):
        assert not message or ": ranks 1, 4 did not take part in a sum" in message
        assert seconds < SECONDS + MARGIN


@pytest.mark.parametrize("n", [4, 5, 8, 16])
def test_every_rank_names_the_closed_rank_long_before_the_timeout(n: int) -> None:
    for message, seconds in errors_where(n, {3}, is_closed=True):
        assert "rank 3 did not take part in a sum" in message
        assert seconds < TIMEOUT.total_seconds() / 2


@pytest.mark.parametrize("n", [3, 6])
def test_ranks_in_different_operations_are_named(n: int) -> None:
    def body(group: dist.ProcessGroup) -> str:
        transport = over(group, TIMEOUT.total_seconds())
        with pytest.raises(RuntimeError) as caught:
            transport.all_reduce(torch.zeros(1), what="one sum" if transport.rank == 1 else "a sum of round 7")
        return str(caught.value)

    messages = run_ranks(n, body)
    assert all("rank 1 is in 'one sum'" in message for rank, message in enumerate(messages) if rank != 1)
    assert "rank 0 is in 'a sum of round 7', rank 2 is in 'a sum of round 7'" in messages[1]


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_gather"])
def test_tensors_of_different_sizes_do_not_meet_in_gloo(n: int, operation: str) -> None:
    """Gloo would end the process: see [Note: sizes meet first] of `meet`."""

    def body(group: dist.ProcessGroup) -> str:
        transport, x = over(group, TIMEOUT.total_seconds()), torch.zeros(587 if group.rank() else 567)
        act = {
            "all_reduce": lambda: transport.all_reduce(x, what="a fragment of round 9"),
            "broadcast": lambda: transport.broadcast(x, source=0, what="a fragment of round 9"),
            "all_gather": lambda: transport.all_gather(x.new_empty(n * len(x)), x, what="a fragment of round 9"),
        }[operation]
        with pytest.raises(RuntimeError) as caught:
            act()
        return str(caught.value)

    first, *others = run_ranks(n, body)
    assert "rank 1 is in the same with 2348 bytes where this rank has 2268" in first
    assert all("rank 0 is in the same with 2268 bytes where this rank has 2348" in message for message in others)


def test_a_rank_sends_few_messages() -> None:
    """The numbers of messages of one barrier: log2 n instead of n - 1."""
    n = 16

    def body(group: dist.ProcessGroup) -> int:
        transport, num_waits = over(group), 0

        def count(work: dist.Work | InTurn, timeout: timedelta) -> None:
            nonlocal num_waits
            num_waits += 1
            work.wait(timeout)

        transport.wait_for = count  # type: ignore[method-assign]
        transport.barrier(what="a barrier")
        return num_waits

    assert run_ranks(n, body) == [8] * n


def in_few(n: int, body: Callable[[ProcessGroupTransport], T], peers: Callable[[int], Collection[int]]) -> list[T]:
    """`body` over groups whose ranks are connected with these peers, and those of collectives."""
    store = dist.HashStore()

    def run(rank: int) -> T:
        group = gloo_group(store, rank, n, TIMEOUT, peers=peers(rank))
        return body(ProcessGroupTransport(group, device=CPU, timeout=timedelta(seconds=SECONDS)))

    return at_once([partial(run, rank) for rank in range(n)], name="rank")


@few
@pytest.mark.parametrize("n", [1, 2, 7, 16, 19])
def test_collectives_need_few_connections(n: int) -> None:
    def body(transport: ProcessGroupTransport) -> int:
        x = torch.tensor([float(transport.rank)])
        transport.all_reduce(x, what="a sum")
        assert float(x) == sum(range(n))
        for source in range(n):
            y = torch.tensor([transport.rank])
            transport.broadcast(y, source=source, what="a broadcast")
            assert int(y) == source
        out = torch.zeros(n)
        transport.all_gather(out, torch.tensor([float(transport.rank)]), what="a gather")
        assert out.tolist() == list(range(n))
        return len(transport._peers)

    assert max(in_few(n, body, lambda rank: ())) <= 2 * (n - 1).bit_length()


@few
def test_named_peers_are_connected_and_others_refused() -> None:
    def body(transport: ProcessGroupTransport) -> None:
        peer, inbox = (transport.rank + 3) % 6, torch.zeros(1)
        transport.exchange({peer: [torch.ones(1)]}, {peer: [inbox]}, tag=0).wait()
        assert inbox == 1
        transport.barrier(what="the end")

    in_few(6, body, lambda rank: [(rank + 3) % 6])

    def alone(transport: ProcessGroupTransport) -> None:
        with pytest.raises(ValueError, match=r"got a message to or from rank \d, expected one of \[.*name all peers"):
            transport.exchange({(transport.rank + 3) % 6: [torch.ones(1)]}, {}, tag=0)
        transport.barrier(what="the end")

    in_few(6, alone, lambda rank: ())


@few
def test_over_few_connections_a_late_rank_ends_the_barrier_everywhere() -> None:
    def body(transport: ProcessGroupTransport) -> tuple[str, float]:
        start = time.monotonic()
        if transport.rank == 2:
            time.sleep(2 * SECONDS)
            return "", 0.0
        with pytest.raises((TimeoutError, ConnectionError)) as caught:
            transport.all_reduce(torch.zeros(1), what="a sum")
        return str(caught.value), time.monotonic() - start

    for message, seconds in in_few(9, body, lambda rank: ()):
        assert not message or "a sum among ranks [0, 1, 2, 3, 4, 5, 6, 7, 8] failed" in message
        assert seconds < SECONDS + MARGIN


def test_the_collectives_of_one_operation_share_a_deadline() -> None:
    """What the first one has waited is missing in the second one."""
    late, has_begun = 0.3, threading.Barrier(2)

    def body(group: dist.ProcessGroup) -> list[float]:
        transport, limits = over(group, TIMEOUT.total_seconds()), []

        def note(work: dist.Work | InTurn, timeout: timedelta) -> None:
            limits.append(timeout.total_seconds())
            work.wait(timeout)

        transport.wait_for = note  # type: ignore[method-assign]
        with transport.within(Deadline(TIMEOUT)):
            has_begun.wait(TIMEOUT.total_seconds())  # so that the deadlines of both pass while rank 1 is late
            time.sleep(late * transport.rank)
            transport.barrier(what="the first")
            limits.clear()
            transport.all_reduce(torch.zeros(1), what="the second")
        return limits

    assert all(limit < TIMEOUT.total_seconds() - late for limits in run_ranks(2, body) for limit in limits)

"""Paces: who takes which step, where all meet, and how a request to stop reaches everyone without a deadlock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from tests.train.training.test_checkpoint import Ranks
from train.job.preemption import StopRequest
from train.job.stop import StoreStop
from train.methods.pace import Meeting, SharedSteps


@dataclass
class Request:
    """A request to stop without signal handlers, which only the main thread may set."""

    is_made: bool = False


def run_paces(size: int, body: Callable[[Any, dist.Store], Any]) -> list[Any]:
    """body(world, store) in a thread per rank; results in rank order."""
    store, ranks = dist.HashStore(), Ranks(size)

    def run(member: Any) -> Any:
        world = SimpleNamespace(
            rank=member.rank, size=size, gather=member.gather, barrier=lambda: member.gather(None), store=store
        )
        return body(world, store)

    results = ranks.run(run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def shared_steps(world: Any, steps: int = 0, request: Request | None = None) -> tuple[SharedSteps, Any]:
    state = SimpleNamespace(step=steps)
    return SharedSteps(state, request or Request(), world), state  # type: ignore[arg-type]


def test_fast_ranks_take_more_of_the_steps_and_all_together_exactly_as_many() -> None:
    slow_has_begun, fast_are_done = threading.Event(), threading.Barrier(3, timeout=10)

    def body(world: Any, store: dist.Store) -> tuple[int, list[int], Meeting]:
        pace, state = shared_steps(world)
        positions = []
        if world.rank == 2:  # in its first step until the others have found no more
            first = pace.claim(10)
            assert first is not None
            positions.append(first)
            state.step += 1
            slow_has_begun.set()
            fast_are_done.wait()
            assert pace.claim(10) is None
        else:
            assert slow_has_begun.wait(10)
            while (position := pace.claim(10)) is not None:
                positions.append(position)
                state.step += 1
            fast_are_done.wait()
        meeting = pace.meet(is_told_to_stop=False)
        assert pace.position == 10
        return state.step, positions, meeting

    results = run_paces(3, body)
    assert [steps for steps, _, _ in results][2] == 1
    assert sorted(position for _, positions, _ in results for position in positions) == sorted([*range(10)] * 3)
    assert {meeting for _, _, meeting in results} == {Meeting(10, False)}


def test_steps_are_counted_on_from_those_of_a_checkpoint() -> None:
    def body(world: Any, store: dist.Store) -> tuple[Meeting, int | None]:
        pace, _ = shared_steps(world, steps=(7, 3)[world.rank])
        meeting = pace.meet(is_told_to_stop=False)
        claim = pace.claim(6)
        world.barrier()
        return meeting, claim

    assert run_paces(2, body) == [(Meeting(5, False), 5)] * 2


def test_claims_that_were_given_up_are_taken_by_others_until_all_are_equally_far() -> None:
    def body(world: Any, store: dist.Store) -> tuple[int, Meeting, int]:
        request = Request(is_made=world.rank == 0)
        pace, state = shared_steps(world, request=request)
        # Rank 1 takes five steps before rank 0 asks to stop; both then have a claim in hand.
        if world.rank == 1:
            for _ in range(5):
                assert pace.claim(100) is not None
                state.step += 1
        world.barrier()
        assert pace.claim(100) is not None
        if world.rank == 0:
            assert pace.should_stop()
        world.barrier()
        assert pace.should_stop()
        meeting = pace.meet(is_told_to_stop=True)
        while pace.claim(meeting.position) is not None:
            state.step += 1
        assert pace.position == meeting.position
        world.barrier()
        return state.step, meeting, pace.meet(is_told_to_stop=False).position

    results = run_paces(2, body)
    assert [meeting for _, meeting, _ in results] == [Meeting(3, True)] * 2  # five steps, rounded up
    assert sum(steps for steps, _, _ in results) == 6
    assert {position for _, _, position in results} == {3}


def test_one_rank_that_was_told_stops_those_that_had_come_to_the_boundary_before() -> None:
    def body(world: Any, store: dist.Store) -> bool:
        pace, _ = shared_steps(world)
        return pace.meet(is_told_to_stop=world.rank == 1).is_told_to_stop

    assert run_paces(3, body) == [True] * 3


def test_a_request_is_seen_by_whoever_asks_later() -> None:
    store, request = dist.HashStore(), Request()
    mine, other = StoreStop(request, store), StoreStop(Request(), store)  # type: ignore[arg-type]
    assert not mine.should_stop()
    request.is_made = True
    assert not other.should_stop()  # nobody has told the store
    assert mine.should_stop()
    assert other.should_stop()


def test_a_request_outlives_its_handlers_only() -> None:
    request = StopRequest()
    try:
        assert not request.is_made
        request.request()
        assert request.is_made
    finally:
        request.close()
        request.close()

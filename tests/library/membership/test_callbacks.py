"""Callbacks of `Membership.on_change` that raise: who catches the error goes on with the others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from gossip_modules import GossipDataParallel, Membership
from gossip_modules.membership.view import Change
from tests.harness.progress import round_of, step_of
from tests.library.membership.test_membership import member_of, model_of


class Failing:
    """A callback that raises at each change of which `when` says so."""

    def __init__(self, when: Callable[[Change], bool], error: type[Exception] = OSError) -> None:
        self.when, self.error = when, error
        self.num_raised = 0

    def __call__(self, change: Change) -> None:
        if self.when(change):
            self.num_raised += 1
            raise self.error(f"generation {change.generation}")


def follow(member: Membership, wrapper: GossipDataParallel, caught: list[int], *, uses_steps: bool) -> int:
    """Train until the job has three workers and two more steps are over; a script that goes on after each error."""
    last = 1 << 30

    def train() -> None:
        nonlocal last
        wrapper(torch.ones(4, 4)).sum().backward()
        if last == 1 << 30 and member.world_size == 3:
            last = step_of(wrapper) + 2

    def train_on() -> None:
        if uses_steps:
            for step in member.steps(1 << 30):
                assert step == step_of(wrapper)
                train()
                if step + 1 >= last:
                    return
        while step_of(wrapper) < last:
            train()

    while True:
        try:
            train_on()
            return step_of(wrapper)
        except (OSError, FloatingPointError):
            caught.append(step_of(wrapper))


@pytest.mark.parametrize("error", [OSError, FloatingPointError])
@pytest.mark.parametrize("uses_steps", [True, False])
def test_a_worker_that_catches_the_error_of_a_callback_takes_that_step(
    uses_steps: bool, error: type[Exception]
) -> None:
    """In members and in the worker that joins: all take the first step of the generation once, and together."""
    store = dist.HashStore()
    heard: dict[int, list[int]] = {}
    caught: dict[int, list[int]] = {}
    clocks: dict[int, tuple[int, int, int]] = {}
    failures: list[BaseException] = []
    failing = [Failing(lambda change: len(change.members) == 3, error) for _ in range(3)]
    has_begun = threading.Event()

    def work(k: int) -> None:
        try:
            member = member_of(store, min_workers=2)
            member.on_change(failing[k])
            member.on_change(lambda change: heard.setdefault(k, []).append(len(change.members)))
            wrapper = GossipDataParallel(model_of(k), membership=member)
            has_begun.set()
            last = follow(member, wrapper, caught.setdefault(k, []), uses_steps=uses_steps)
            clocks[k] = member.worker.generations.clock, round_of(wrapper), last
            wrapper.flush()
            both.wait(30.0)
            wrapper.close()
        except BaseException as failure:  # noqa: BLE001 (raised in the thread of the test)
            failures.append(failure)
            both.abort()

    both = threading.Barrier(3)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads[:2]:
        thread.start()
    assert has_begun.wait(30.0)
    threads[2].start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert [failure.num_raised for failure in failing] == [1, 1, 1]
    assert heard == {0: [2, 3], 1: [2, 3], 2: [3]}, "a callback after one that raises is called too"
    assert len(set(clocks.values())) == 1, f"got {clocks}, expected one step and one round for all"
    clock, t, last = clocks[0]
    assert (clock, t) == (last - 1, last)
    assert all(len(steps) == 1 for steps in caught.values()), caught


def test_the_error_of_a_callback_at_the_first_generation_ends_the_wrapper() -> None:
    member = member_of(dist.HashStore(), min_workers=1)
    member.on_change(Failing(lambda change: True))
    with pytest.raises(OSError, match="generation 1"):
        GossipDataParallel(model_of(), membership=member)
    with pytest.raises(RuntimeError, match="is closed"):
        member.join()

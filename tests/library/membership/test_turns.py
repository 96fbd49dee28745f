"""Turns: each number is given once, whoever comes, also in a job that goes on from a checkpoint."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import GossipDataParallel
from gossip_modules.membership.joining import go_on_alone
from gossip_modules.membership.view import Change
from gossip_modules.testing import Chaos, Join, Worker
from tests.library.membership.test_membership import member_of

LOADED = 7  # steps of the checkpoint


def checkpoint() -> dict[str, Any]:
    """Of an earlier job, after `LOADED` steps of a worker."""
    member = member_of(dist.HashStore(), min_workers=1)
    wrapper = GossipDataParallel(nn.Linear(4, 1), membership=member)
    for step in member.steps(LOADED):
        assert member.turn(step) == step
        wrapper(torch.ones(2, 4)).sum().backward()
    state: dict[str, Any] = wrapper.state_dict()
    wrapper.close()
    return state


def test_the_numbers_of_a_worker_that_leaves_are_left_out_up_to_the_next_generation() -> None:
    lock, seen, left = threading.Lock(), Counter[int](), [0, 0]  # its last number and step
    starts: list[int] = []

    def train(worker: Worker) -> int:
        member = worker.membership(min_workers=3, timeout=60.0, min_deadline=20.0)
        wrapper = GossipDataParallel(nn.Linear(4, 1), membership=member)
        member.on_change(lambda change: starts.append(change.step))
        is_last = member.join() == 0 and member.rank == 2
        for step in member.steps(1 << 30):
            if starts and step >= starts[0] + 5:
                break
            turn = member.turn(step)
            with lock:
                seen[turn] += 1
                if is_last and step == 10:
                    left[:] = turn, step
                    member.leave()
            wrapper(torch.ones(2, 4)).sum().backward()
        wrapper.close()
        return member.generation

    results = Chaos([]).run(train, 3)
    assert sorted(results.values()) == [1, 2, 2]
    (start,) = set(starts)
    assert set(seen.values()) == {1}
    assert sorted(set(range(max(seen))) - seen.keys()) == [left[0] + 3 * i for i in range(1, start - left[1])]


@pytest.mark.parametrize("is_resumed", [False, True], ids=["fresh", "resumed"])
def test_each_number_is_given_once_where_a_worker_joins(is_resumed: bool) -> None:
    state = checkpoint() if is_resumed else None
    lock, seen, reached = threading.Lock(), Counter[int](), [0]
    last = [1 << 30]

    def train(worker: Worker) -> list[tuple[int, int]]:
        member = worker.membership(min_workers=2, timeout=60.0, min_deadline=20.0)
        wrapper = GossipDataParallel(nn.Linear(4, 1), membership=member)
        changes: list[Change] = []
        firsts: dict[int, int] = {}  # by generation, its first step as it was handed out
        member.on_change(changes.append)
        if state is not None:
            wrapper.load_state_dict(state)
        first = member.join()
        if worker.rank < 2:
            assert member.turn(first) == 2 * first + member.rank, "what it was before its first step"
        for i, step in enumerate(member.steps(1 << 30)):
            with lock:
                if step >= last[0]:
                    break
                reached[0] = max(reached[0], step)
                seen[member.turn(step)] += 1
                if worker.rank == 2 and i == 5:
                    last[0] = reached[0] + 5
            firsts.setdefault(member.generation, step)
            wrapper(torch.ones(2, 4)).sum().backward()
        wrapper.close()
        return [(firsts[change.generation], change.step) for change in changes]

    results = Chaos([Join(step=LOADED + 3)]).run(train, 2)
    begin = 2 * LOADED if is_resumed else 0
    assert seen == Counter(range(begin, begin + seen.total()))
    for starts in results.values():
        assert all(first == start for first, start in starts), starts


def test_a_worker_that_cannot_join_again_counts_on() -> None:
    member = member_of(dist.HashStore(), min_workers=1)
    wrapper = GossipDataParallel(nn.Linear(4, 1), membership=member)
    turns = []
    for step in member.steps(np.int64(6)):  # type: ignore[arg-type]
        turns.append(member.turn(step))
        wrapper(torch.ones(2, 4)).sum().backward()
        if step == 2:
            go_on_alone(member.worker, member.view, member.number, member.worker.generations.clock, 0.0)
    wrapper.close()
    assert turns == [0, 1, 2, 3, 4, 5]

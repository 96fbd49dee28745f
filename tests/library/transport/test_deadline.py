"""Deadline: several waits within one limit."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from gossip_modules.transport.deadline import Deadline
from gossip_modules.transport.gloo import at_once
from tests.library.transport.clock import Clock


def test_waits_share_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock.begin(monkeypatch)
    deadline = Deadline(timedelta(seconds=8))
    assert (deadline.seconds, deadline.left, deadline.passed) == (8.0, 8.0, 0.0)
    clock.now += 6.0
    assert (deadline.left, deadline.passed, deadline.is_over) == (2.0, 6.0, False)
    assert deadline.left_for_gloo == timedelta(seconds=2)
    deadline.extend(1.0)
    clock.now += 3.0
    assert (deadline.left, deadline.is_over) == (0.0, True)
    assert deadline.left_for_gloo == timedelta(milliseconds=1), "Gloo takes zero for its own timeout"


def test_groups_are_made_by_daemons_and_the_first_error_is_raised() -> None:
    """The interpreter waits without a limit for the threads of a ThreadPoolExecutor."""
    are_daemons: list[bool] = []

    def make(i: int) -> int:
        are_daemons.append(threading.current_thread().daemon)
        if i in (1, 2):
            raise RuntimeError(f"rank {i} did not come")
        return i

    assert at_once([lambda: make(0), lambda: make(3)], name="making") == [0, 3]
    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        at_once([lambda i=i: make(i) for i in range(3)], name="making")  # type: ignore[misc]
    assert are_daemons == [True] * 5

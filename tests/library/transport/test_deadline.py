"""Deadline: several waits within one limit."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from gossip_modules.transport.deadline import Deadline
from gossip_modules.transport.gloo import at_once, gloo_backend, gloo_group
from gossip_modules.transport.stores import EndableStore
from tests.harness.ranks import TIMEOUT
from tests.library.transport.clock import Clock


def test_waits_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("is_void", [False, True])
def test_the_wait_of_a_group_for_an_address_is_ended(is_void: bool) -> None:
    ended, voided, errors = threading.Event(), threading.Event(), []
    store = EndableStore(dist.HashStore(), ended, timeout=TIMEOUT, is_void=voided.is_set)

    def make() -> None:
        try:
            gloo_backend(store, 0, 2, TIMEOUT)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    (voided if is_void else ended).set()
    thread.join(TIMEOUT.total_seconds() / 2)
    assert not thread.is_alive()
    missing = "0/1"
    why = "another group is made in its place" if is_void else "this worker has closed"
    assert errors == [f"the wait for {missing} was ended, since {why}"]


def test_the_store_of_a_group_answers_when_its_waits_are_over() -> None:
    """What ranks leave for each other is put there later, such as the tensors that they exchange."""
    group = gloo_group(EndableStore(dist.HashStore(), threading.Event(), timeout=TIMEOUT), 0, 1, TIMEOUT)
    store = group.get_group_store()
    assert store is not None
    store.set("a", "1")
    assert (store.add("count", 1), store.get("a")) == (1, b"1")


def test_a_wait_in_a_store_ends_in_time() -> None:
    store = EndableStore(dist.HashStore(), threading.Event(), timeout=timedelta(milliseconds=1))
    with pytest.raises(RuntimeError, match=r"a, b did not come within 0.001 s"):
        store.wait(["a", "b"])
    with pytest.raises(RuntimeError, match=r"a did not come within 0.002 s"):
        store.wait(["a"], timedelta(milliseconds=2))
    store.set("a", "1")
    assert store.get("a") == b"1"


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

"""An error that nothing catches: the rank leaves the others at once, whatever its process does until it ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from gossip_modules import (
    BilatGossipDataParallel,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    SlowMo,
)
from gossip_modules.extend import GossipWrapper
from gossip_modules.transport import uncaught_errors
from gossip_modules.transport.failure_notes import FailureNotes
from gossip_modules.transport.stores import BoundedStore, Records
from gossip_modules.transport.uncaught_errors import leave_at_error, stay
from tests.harness.problems import mlp, sgd, train_step
from tests.harness.ranks import TIMEOUT, run_ranks

NUM_STEPS = 3
MAX_STEPS = 10_000

MAKERS: dict[str, Callable[[dist.ProcessGroup], GossipWrapper]] = {
    "SGP": lambda group: GossipDataParallel(mlp(), process_group=group, timeout=TIMEOUT),
    "Overlap SGP": lambda group: GossipDataParallel(mlp(), process_group=group, timeout=TIMEOUT, overlap=True),
    "DiLoCo": lambda group: GossipDataParallel(mlp(), process_group=group, timeout=TIMEOUT, algorithm=DiLoCo(2)),
    "SlowMo": lambda group: GossipDataParallel(
        mlp(), process_group=group, timeout=TIMEOUT, algorithm=SlowMo(sync_every=2)
    ),
    "AD-PSGD": lambda group: BilatGossipDataParallel(mlp(), process_group=group, timeout=TIMEOUT),
    "WAGMA": lambda group: GroupAverageDataParallel(mlp(), process_group=group, timeout=TIMEOUT),
}


@pytest.mark.parametrize("method", MAKERS)
def test_the_others_fail_with_the_name_of_the_rank_before_its_process_ends(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the process of the rank does not end at all: the ranks are threads."""
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    has_failed = threading.Event()

    def train(wrapper: GossipWrapper, rank: int, num_steps: int) -> None:
        optimizer = sgd(wrapper)
        for step in range(num_steps):
            train_step(wrapper, optimizer, rank, step)

    def body(group: dist.ProcessGroup) -> str:
        wrapper, rank = MAKERS[method](group), group.rank()
        error, text = ValueError("a broken file"), ""
        if rank == 1:
            train(wrapper, rank, NUM_STEPS)
            threading.excepthook(threading.ExceptHookArgs((ValueError, error, None, threading.current_thread())))
            has_failed.wait(TIMEOUT.total_seconds())
        else:
            try:
                with pytest.raises(ConnectionError) as found:
                    train(wrapper, rank, MAX_STEPS)
            finally:
                has_failed.set()
            text = str(found.value)
        try:
            wrapper.close()
        except ValueError as own:  # of this rank, which no call has raised yet
            text = text or str(own)
        except ConnectionError as ended:  # of a round of rank 1 that was in flight
            if rank != 1:
                raise
            text = str(ended)
        return text

    text, own = run_ranks(2, body)
    assert own in ("", "a broken file") or "this rank failed: ValueError: a broken file, and has left the others" in own
    assert "rank 1 failed: ValueError: a broken file" in text or "rank 1 left after an error of its own" in text


def test_a_round_in_flight_at_an_error_names_the_error_and_blames_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    has_closed = threading.Event()

    def body(group: dist.ProcessGroup) -> str:
        wrapper, rank = MAKERS["Overlap SGP"](group), group.rank()
        if rank == 0:
            has_closed.wait(TIMEOUT.total_seconds())
            wrapper.close()
            return ""
        train_step(wrapper, sgd(wrapper), rank, 0)  # it starts a round, for which rank 0 sends nothing
        error = ValueError("a broken file")
        threading.excepthook(threading.ExceptHookArgs((ValueError, error, None, threading.current_thread())))
        with pytest.raises(ConnectionError) as found:
            wrapper.close()
        has_closed.set()
        return str(found.value)

    _, text = run_ranks(2, body)
    assert "this rank failed: ValueError: a broken file, and has left the others" in text
    assert "gone" not in text


class Held:
    """A leaver that keeps the errors by which it was ended."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.errors: list[BaseException] = []

    def end_by(self, error: BaseException) -> None:
        """See `Leaver`."""
        self.errors.append(error)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The errors that the hooks of a script print, in the place of those that print to the screen."""
    found: list[BaseException] = []
    monkeypatch.setattr(uncaught_errors, "_live", {})
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, place: found.append(error))
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.append(arguments.exc_value))
    return found


def test_an_error_ends_the_wrappers_of_its_thread_and_calls_the_hook_of_the_script(told: list[BaseException]) -> None:
    own, other = Held(), Held()
    leave_at_error(own)
    leave_at_error(other)
    error = ValueError("a broken file")

    def train() -> None:
        other.thread = threading.get_ident()
        raise error

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert (own.errors, other.errors, told) == ([], [error], [error])
    sys.excepthook(KeyboardInterrupt, interrupt := KeyboardInterrupt(), None)
    assert (own.errors, other.errors, told) == ([interrupt], [error, interrupt], [error, interrupt])


def test_the_last_object_that_is_closed_takes_the_hooks_away(told: list[BaseException]) -> None:
    hooks = sys.excepthook, threading.excepthook
    first, second = Held(), Held()
    for held in (first, second):
        leave_at_error(held)
    stay(first)
    sys.excepthook(ValueError, ValueError(), None)
    assert (len(first.errors), len(second.errors)) == (0, 1)
    for held in (second, second):
        stay(held)
    assert (sys.excepthook, threading.excepthook) == hooks


def test_a_hook_that_calls_no_other_leaves_it_to_the_end_of_the_main_thread(
    told: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    leave_at_error(held)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    error = ValueError("a broken file")
    monkeypatch.delattr(sys, "last_value", raising=False)
    uncaught_errors._leave_at_end()
    assert held.errors == []
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    uncaught_errors._leave_at_end()
    assert held.errors == [error]


def test_ctrl_c_is_the_reason_in_a_note() -> None:
    store = BoundedStore(dist.HashStore())
    FailureNotes(Records(store), 2).leave_for(KeyboardInterrupt())
    cause = FailureNotes(Records(store), 0).explain({2: "is gone"}, members=range(3))
    assert cause == (frozenset({2}), "rank 2 was interrupted (KeyboardInterrupt)")

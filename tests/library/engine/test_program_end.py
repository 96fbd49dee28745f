"""The end of a program closes the engines that nobody has closed, unless they are still used, or the program failed."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from gossip_modules import BilatGossipDataParallel
from gossip_modules.engine import background
from gossip_modules.engine.background import close_at_program_end, close_in_thread
from tests.harness.problems import loss_of, mlp, sgd
from tests.harness.processes import run_processes
from tests.harness.progress import engine_of


class Recording:
    """An engine that notes when it is closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True
        raise ConnectionError("a peer has gone meanwhile")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.setattr(background, "_makers", {})
    return Recording()


def test_the_end_of_a_program_closes(engine: Any) -> None:
    close_at_program_end(engine)
    background._close_all()
    assert engine.is_closed


def test_a_program_that_an_exception_ends_leaves_peers_to_see_that_it_failed(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("a bug"), raising=False)
    close_at_program_end(engine)
    background._close_all()
    assert not engine.is_closed


def test_an_engine_is_left_to_a_thread_that_trains_on(engine: Any) -> None:
    may_end = threading.Event()

    def train() -> None:
        close_at_program_end(engine)
        has_made.set()
        may_end.wait()

    has_made = threading.Event()
    thread = threading.Thread(target=train)
    thread.start()
    has_made.wait()
    background._close_all()
    assert not engine.is_closed
    may_end.set()
    thread.join()
    background._close_all()
    assert engine.is_closed


def test_the_end_of_a_program_waits_for_those_that_are_closing() -> None:
    entered, may_end = threading.Event(), threading.Event()

    class Slow(Recording):
        def close(self) -> None:
            entered.set()
            may_end.wait()
            self.is_closed = True

    engine: Any = Slow()
    close_in_thread(engine)
    entered.wait()
    may_end.set()
    background._close_all()
    assert engine.is_closed


_kept: list[Any] = []


def end_without_close(rank: int, is_kept: bool) -> list[int]:
    """Rank 0, which answers, ends first. Rank 1 trains until it has learned that, and on."""
    model = BilatGossipDataParallel(mlp())
    if is_kept:
        _kept.append(model)
    optimizer = sgd(model)
    closed: Any = engine_of(model)._bilateral.closed_peers
    num_left = 5
    while num_left:
        loss_of(model, rank, num_left).backward()
        optimizer.step()
        optimizer.zero_grad()
        num_left -= rank == 0 or 0 in closed
    return sorted(closed)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:a BilatGossipDataParallel was lost without close:ResourceWarning")
@pytest.mark.parametrize("is_kept", [pytest.param(True, marks=pytest.mark.soak), False])
def test_a_rank_that_ends_without_close_is_no_dead_one(is_kept: bool) -> None:
    outcomes = run_processes(2, end_without_close, is_kept)
    assert [outcome.result for outcome in outcomes] == [[], [0]]

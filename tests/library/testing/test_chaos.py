"""Chaos: faults at given steps of a training loop, on threads and in processes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from gossip_modules import GossipDataParallel, Membership
from gossip_modules.testing import (
    Chaos,
    Continue,
    Delay,
    Join,
    Kill,
    Loss,
    Partition,
    Stop,
    StoreKill,
    Worker,
)
from tests.harness.ranks import assert_no_gossip_threads

LAST = 60


def train(worker: Worker) -> dict[str, Any]:
    """Trains until three workers are there that have taken LAST steps."""
    membership = worker.membership(min_workers=3, timeout=60, min_deadline=20.0)
    model = GossipDataParallel(nn.Linear(4, 1), membership=membership)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    membership.track(optimizer=optimizer)
    first = membership.join()
    seen = []
    for step in membership.steps(LAST):
        seen.append(step)
        loss = model(torch.ones(2, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.002)
    deaths, joins = membership.num_deaths, membership.num_joins
    model.close()
    return {"first": first, "steps": seen, "deaths": deaths, "joins": joins}


def test_a_worker_is_killed_and_the_others_go_on() -> None:
    found = Chaos([Kill(step=10, rank=0)]).run(train, 3)
    assert_no_gossip_threads()
    assert sorted(found) == [1, 2]
    for result in found.values():
        assert result["steps"] == list(range(LAST))
        assert result["deaths"] >= 1


def test_events_happen_at_their_step() -> None:
    seen: list[int] = []

    def body(worker: Worker) -> None:
        membership = worker.membership(min_workers=1)
        model = GossipDataParallel(nn.Linear(4, 1), membership=membership)
        try:
            for step in membership.steps(LAST):
                seen.append(step)
                model(torch.ones(2, 4)).sum().backward()
        except Exception as error:
            raise AssertionError from error

    assert Chaos([Kill(step=10, rank=0)]).run(body, 1) == {}
    assert seen == list(range(10)), "the tenth step is not begun"


def test_a_worker_that_joins_gets_the_state() -> None:
    """The others wait for it: the last of them ends when it is killed."""

    def body(worker: Worker) -> int:
        membership = worker.membership(min_workers=2, timeout=60, min_deadline=20.0)
        model = GossipDataParallel(nn.Linear(4, 1), membership=membership)
        first = membership.join()
        for _ in membership.steps(1 << 30):
            model(torch.ones(2, 4)).sum().backward()
            time.sleep(0.002)
            if membership.world_size == 3:
                break
        model.close()
        return first

    found = Chaos([Join(step=5)]).run(body, 2)
    assert_no_gossip_threads()
    assert sorted(found) == [0, 1, 2]
    assert found[0] == found[1] == 0 < 5 <= found[2]


def test_a_worker_stands_still_until_it_is_told_to_go_on() -> None:
    """Alone, so that it is nobody else's silence that makes the others wait."""
    times: list[float] = []

    def body(worker: Worker) -> None:
        membership = worker.membership(min_workers=1)
        model = GossipDataParallel(nn.Linear(4, 1), membership=membership)
        for _ in membership.steps(6):
            times.append(time.monotonic())
            model(torch.ones(2, 4)).sum().backward()
        model.close()

    Chaos([Stop(step=3, rank=0, seconds=0.3)]).run(body, 1)
    assert times[3] - times[2] >= 0.3
    assert len(times) == 6


def test_a_worker_that_stands_still_for_ever_ends_with_the_last() -> None:
    def body(worker: Worker) -> int:
        membership = worker.membership(min_workers=2, timeout=20, min_deadline=2.0)
        model = GossipDataParallel(nn.Linear(4, 1), membership=membership)
        for _ in membership.steps(LAST):
            model(torch.ones(2, 4)).sum().backward()
        model.close()
        return worker.rank

    assert Chaos([Stop(step=10, rank=1)]).run(body, 2) == {0: 0}
    assert_no_gossip_threads()


def test_the_store_is_killed_and_training_goes_on() -> None:
    def body(worker: Worker) -> bool:
        membership = worker.membership(min_workers=1, timeout=60)
        model = GossipDataParallel(nn.Linear(4, 1), membership=membership)
        was_away = False
        for _ in membership.steps(1 << 30):
            model(torch.ones(2, 4)).sum().backward()
            time.sleep(0.002)
            was_away = was_away or not membership.job.store.is_connected
            if was_away and membership.job.store.is_connected:
                break
        model.close()
        return was_away

    assert Chaos([StoreKill(step=3, seconds=0.1)]).run(body, 1) == {0: True}


def test_an_error_of_a_worker_is_raised() -> None:
    def body(worker: Worker) -> None:
        worker.membership(min_workers=1)
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        Chaos().run(body, 2)


def test_a_run_that_hangs_ends_by_an_error() -> None:
    is_over = threading.Event()

    def body(worker: Worker) -> None:
        if worker.rank == 1:
            is_over.wait(30.0)

    try:
        with pytest.raises(TimeoutError, match=r"got workers \[(0, )?1\] still at work after 0.2 s"):
            Chaos(seconds=0.2).run(body, 2)
    finally:
        is_over.set()


def test_an_event_that_did_not_happen_is_an_error() -> None:
    def body(worker: Worker) -> None:
        membership = worker.membership(min_workers=1)
        model = GossipDataParallel(nn.Linear(4, 1), membership=membership)
        for _ in membership.steps(3):
            model(torch.ones(2, 4)).sum().backward()
        model.close()

    with pytest.raises(RuntimeError, match=r"end of the run before \[Join\(step=7\)\], expected all events"):
        Chaos([Join(7)]).run(body, 1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Kill(-1, 0), "got step=-1, expected the number of a training step"),
        (lambda: Kill(1, -2), "got rank=-2, expected the number of a worker"),
        (lambda: Stop(1, 0, seconds=-1.0), r"got seconds=-1.0, expected a number of at least 0"),
        (lambda: Stop(1, 0, seconds="a"), "got seconds='a', expected a number of at least 0, or None for ever"),  # type: ignore[arg-type]
        (lambda: StoreKill(1, seconds=None), "got seconds=None, expected a number of at least 0$"),  # type: ignore[arg-type]
        (lambda: Delay(1, 0, delay="x"), "got delay='x', expected seconds above 0"),  # type: ignore[arg-type]
        (lambda: Loss(1, 0, fraction="x"), "got fraction='x', expected one above 0 and at most 1"),  # type: ignore[arg-type]
        (lambda: Partition(1, ranks=3), "got ranks=3, expected numbers of workers"),  # type: ignore[arg-type]
        (lambda: Chaos(Kill(1, 0)), r"got events=Kill\(step=1, rank=0\), expected a list: \[Kill"),  # type: ignore[arg-type]
        (lambda: Chaos(seconds="60"), "got seconds='60', expected a number above 0"),  # type: ignore[arg-type]
        *(
            (lambda count=count: Chaos().run(train, count), f"got num_workers={count}, expected a whole number")
            for count in (1.5, 0, -1, True)
        ),
        (lambda: Chaos([3]), "got 3, expected an event of gossip_modules.testing: .*Kill"),  # type: ignore[list-item]
        (lambda: Chaos(backend="mpi"), "got backend='mpi', expected one of 'threads', 'processes'"),  # type: ignore[arg-type]
        (lambda: Chaos([Kill(1, 3), Join(1)]).run(train, 2), r"got Kill\(step=1, rank=3\) in a run of 2 workers and 1"),
    ],
)
def test_bad_input_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_one_membership_per_worker() -> None:
    def body(worker: Worker) -> None:
        assert isinstance(worker.membership(min_workers=1), Membership)
        worker.membership(min_workers=1)

    with pytest.raises(RuntimeError, match=r"got a second membership\(\) of worker 0, expected one"):
        Chaos().run(body, 1)


@pytest.mark.soak
def test_processes_get_real_signals() -> None:
    """The store ends, too; the worker that is stopped is continued by an event."""
    events = [Stop(5, 1), Continue(8, 1), Kill(20, 0), StoreKill(30, seconds=0.2), Join(35)]
    found = Chaos(events, backend="processes", seconds=55).run(train_long, 3)
    assert 0 not in found
    assert 1 in found
    assert found[3]["first"] >= 35


def train_long(worker: Worker) -> dict[str, Any]:
    """Until the worker that joins has come."""
    membership = worker.membership(min_workers=3, timeout=60, min_deadline=1.0)
    model = GossipDataParallel(nn.Linear(4, 1), membership=membership)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    membership.track(optimizer=optimizer)
    first = membership.join()
    for step in membership.steps(1 << 30):
        if step >= 40 and membership.world_size == 3:
            break
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.01)
    model.close()
    return {"first": first}

"""How far an elastic run is whose workers take steps at their own pace: a number that needs no store to grow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gossip_modules.membership.serve import serve, write_address
from train.training.elastic import pace as pace_module
from train.training.elastic import shared_count
from train.training.elastic.history import History
from train.training.elastic.pace import CommonSteps, OwnSteps
from train.training.elastic.shared_count import SharedCount
from train.training.elastic.validation import validate

SECONDS = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a store that may move."""
    monkeypatch.setattr(shared_count, "_PERIOD_SECONDS", 0.005)
    monkeypatch.setattr(shared_count, "_RETRY_SECONDS", 0.01)
    return f"file:{tmp_path / 'store'}"


@contextmanager
def served(address: str) -> Iterator[None]:
    store = serve(0)
    write_address(Path(address.removeprefix("file:")), f"127.0.0.1:{store.port}")
    yield
    del store


def test_the_total_is_that_of_all_also_after_the_store_was_lost(address: str) -> None:
    with served(address):
        first = SharedCount(address, "run", start=100)  # of a checkpoint
        first.add(3)
        until(lambda: first.total == 103 and first._client is not None)
        second = SharedCount(address, "run", start=100)
        second.add(2)
        until(lambda: first.total == second.total == 105)
        other = SharedCount(address, "another run", start=0)
        other.add(1)
        until(lambda: other._client is not None)
        assert other.total == 1
        other.close()
    until(lambda: first._client is None and second._client is None)
    first.add(10)  # the store has gone: what each knows grows by its own steps
    second.add(20)
    assert (first.total, second.total) == (115, 125)
    with served(address):
        until(lambda: first.total == second.total == 135)
        first.add(1)
        first.close()  # adds what is left
        first.close()
        until(lambda: second.total == 136)
        second.close()


def test_workers_at_their_own_pace_go_on_from_the_position_of_their_donor(address: str) -> None:
    members = SimpleNamespace(generation=1)
    history = History()
    history.first_turn = 7
    with served(address):
        paces = [OwnSteps(members, history, store=address, name="run") for _ in range(2)]  # type: ignore[arg-type]
        founder, newcomer = paces
        assert founder.position(0) == 7
        history.changes.append({"generation": 1})
        founder.count_step()
        assert founder.position(1) == founder.position(99) == 8
        newcomer.load_state_dict(founder.state_dict())
        assert newcomer.position(0) == 8
        newcomer.count_step()
        assert newcomer.position(0) >= 9

        def all_count() -> bool:
            for one in paces:
                one.count_step()
            return founder.position(0) > 50 and newcomer.position(0) > 50

        until(all_count)
        newcomer.load_state_dict({"position": 1000})  # it was left out, and joins again
        assert newcomer.position(0) == 1000
        newcomer.count_step()
        assert newcomer.position(0) >= 1001
        for one in paces:
            one.close()


def test_a_worker_without_the_others_at_the_end_tries_again_in_the_next_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = SimpleNamespace(generation=3)
    own = OwnSteps(members, History(), store="127.0.0.1:1", name="run")  # type: ignore[arg-type]
    assert own.may_meet
    assert not own.gives_up()
    assert not own.may_meet
    members.generation = 4
    assert own.may_meet
    monkeypatch.setattr(pace_module, "_PATIENCE", -1.0)
    late = OwnSteps(members, History(), store="127.0.0.1:1", name="run")
    assert late.gives_up()
    common = CommonSteps(members, History())
    assert common.gives_up()
    assert common.may_meet


def test_shares_of_the_stream_have_nothing_in_common_though_each_knows_another_position() -> None:
    shares = []
    for rank, position in enumerate((101, 103, 96)):
        members = SimpleNamespace(rank=rank, world_size=3)
        own = OwnSteps(members, History(), store="127.0.0.1:1", name="run")  # type: ignore[arg-type]
        shares.append(set(range(own.first_batch(position), 400, 3)))
    assert sum(map(len, shares)) == len(set.union(*shares))
    assert set(range(103, 400)) <= set.union(*shares)
    common = CommonSteps(SimpleNamespace(rank=2, world_size=3), History())  # type: ignore[arg-type]
    assert common.first_batch(101) == 103  # all know the same one


def test_without_the_others_a_worker_validates_its_own_model() -> None:
    class Wrapper(torch.nn.Module):
        module = None

        def comm_stats(self) -> dict[str, float]:
            return {"bytes_sent": 5.0}

    precision = SimpleNamespace(autocast=torch.no_grad)
    task = SimpleNamespace(precision=precision, evaluate=lambda model: {"nll": 1.0})
    validation = validate(Wrapper(), task, SimpleNamespace(rank=0), with_average=False)  # type: ignore[arg-type]
    assert validation is not None
    assert (validation.own, validation.averaged, validation.bytes_sent) == ({"nll": 1.0}, {}, 0.0)
    assert math.isnan(validation.consensus_distance)

"""State, beginning and end of a worker of dpwa."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules.dpwa.averager import PairwiseAverager
from gossip_modules.dpwa.config import PairwiseConfig
from gossip_modules.dpwa.interpolation import ClockInterpolation, ConstantInterpolation
from gossip_modules.dpwa.wrapper import PairwiseDataParallel
from tests.harness.problems import batch, mlp
from tests.harness.progress import engine_of, state_of
from tests.harness.ranks import assert_no_gossip_threads, gossip_threads
from tests.library.dpwa.workers import (
    ANY_PORT,
    REFUSED,
    ask_first,
    averager,
    distance,
    filled,
    has_fetched,
    introduce,
    num_descriptors,
    silent_peer,
    value_of,
    wait_for,
    wrap,
)

# State, beginning and end.


def test_a_checkpoint_continues_clock_scores_and_choices(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", mlp(1), fetch_probability=0.5, peers={"a": ANY_PORT, "b": REFUSED, "c": REFUSED})
    for _ in range(9):
        worker(torch.ones(2, 3))
        wait_for(partial(has_fetched, worker))
    worker.report_loss(0.5)
    file = io.BytesIO()
    torch.save(worker.state_dict(), file)
    file.seek(0)
    other = wrap(workers, "a", mlp(2), fetch_probability=0.5, peers={"a": ANY_PORT, "b": REFUSED, "c": REFUSED})
    other.load_state_dict(torch.load(file, weights_only=True))
    assert distance(worker, other) == 0
    ours, theirs = state_of(worker), state_of(other)
    assert ours == theirs
    assert (theirs["clock"], theirs["loss"], theirs["step"]) == (9.0, 0.5, 9)
    assert theirs["peers"]["records"]["b"]["score"] < 1000
    with pytest.warns(UserWarning, match="the state dict holds no gossip state"):
        other.load_state_dict({f"module.{key}": value for key, value in mlp(3).state_dict().items()})
    assert other.comm_stats()["clock"] == 0


@pytest.mark.parametrize("make", [averager, wrap])
def test_a_loaded_worker_serves_nothing_until_it_publishes(
    workers: contextlib.ExitStack, make: Callable[..., PairwiseAverager | PairwiseDataParallel]
) -> None:
    a, b = filled(0.0), filled(8.0)
    asker, worker = averager(workers, "a", a), make(workers, "b", b)
    asker.add_peer("b", worker.address)
    worker.load_state_dict(worker.state_dict())
    asker.update_send()
    assert not asker.update_wait()
    assert value_of(a) == 0.0
    assert asker.comm_stats()["num_failed_fetches"] == 0
    if isinstance(worker, PairwiseAverager):
        worker.update_send()
    else:
        worker(torch.ones(1, 50))
    asker.update_send()
    assert asker.update_wait()
    assert value_of(a) == 4.0


def test_a_state_without_gossip_withdraws_too(workers: contextlib.ExitStack) -> None:
    asker, worker = averager(workers, "a", filled(0.0)), wrap(workers, "b", filled(8.0))
    asker.add_peer("b", worker.address)
    with pytest.warns(UserWarning, match="the state dict holds no gossip state"):
        worker.load_state_dict({"module.weight": torch.ones(1, 50)})
    asker.update_send()
    assert not asker.update_wait()


def test_a_fetch_under_way_is_not_merged_into_a_loaded_model(workers: contextlib.ExitStack) -> None:
    a = filled(0.0)
    worker = averager(workers, "a", a)
    introduce(("a", worker), ("b", averager(workers, "b", filled(8.0))))
    state = worker.state_dict()
    worker.update_send()
    a.load_state_dict({"weight": torch.full((1, 50), 100.0)})
    worker.load_state_dict(state)
    assert not worker.update_wait()
    assert value_of(a) == 100.0


def test_the_last_update_is_served_in_eval_mode(workers: contextlib.ExitStack) -> None:
    a, b = filled(0.0), filled(1.0)
    worker, asker = wrap(workers, "a", a), averager(workers, "b", b, interpolation=ConstantInterpolation(1.0))
    asker.add_peer("a", worker.address)
    worker(torch.ones(1, 50))
    nn.init.constant_(next(a.parameters()), 5.0)
    worker.eval()
    nn.init.constant_(next(a.parameters()), 7.0)
    worker.eval()  # it was in eval mode, so there is nothing new
    asker.update_send()
    assert asker.update_wait()
    assert value_of(b) == 5.0
    worker.load_state_dict(worker.state_dict())
    worker.train()
    worker.eval()
    asker.update_send()
    assert not asker.update_wait()


def test_the_state_of_the_loop_level_form(workers: contextlib.ExitStack) -> None:
    worker = averager(workers, "a", mlp(1))
    worker.update_send(2.0)
    state = worker.state_dict()
    other = averager(workers, "a", mlp(1))
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert state["clock"] == 1.0


def test_closing_a_wrapper_ends_a_fetch(workers: contextlib.ExitStack) -> None:
    with silent_peer() as address:
        peers = {"a": ANY_PORT, "b": address}
        worker = wrap(workers, "a", filled(1.0), peers=peers, timeout=timedelta(hours=1))
        worker(torch.ones(1, 50))
        worker.close()
        assert_no_gossip_threads()


def test_a_timeout_may_be_very_long(workers: contextlib.ExitStack) -> None:
    worker = averager(workers, "a", filled(1.0), peers={"b": REFUSED}, timeout=timedelta(days=200))
    worker.update_send()
    assert not worker.update_wait()
    assert worker.comm_stats()["num_failed_fetches"] == 1


def test_close_is_idempotent_and_ends_a_fetch(workers: contextlib.ExitStack) -> None:
    with silent_peer() as address:
        worker = averager(workers, "a", filled(1.0), peers={"b": address}, timeout=timedelta(hours=1))
        worker.update_send()
        assert {"gossip-serve-a", "gossip-fetch-a"} <= {thread.name for thread in gossip_threads()}
        worker.close()
        worker.close()
        assert_no_gossip_threads()
    with pytest.raises(RuntimeError, match="worker 'a' is closed, expected no more rounds"):
        worker.update_send()


@pytest.mark.filterwarnings("ignore:got a training forward")
def test_a_closed_wrapper_computes(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", filled(2.0))
    worker(torch.ones(1, 50))
    worker.close()
    worker.close()
    assert worker(torch.ones(1, 50)).item() == 100.0


@pytest.mark.filterwarnings("ignore:got a training forward")
def test_a_copy_stays_local(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", filled(2.0))
    worker(torch.ones(1, 50))
    for other in (copy.deepcopy(worker), copy.deepcopy(copy.deepcopy(worker))):
        other(torch.ones(1, 50))
        other.report_loss(1.0)
        other.eval()
        assert len(gossip_threads()) == 2
        assert other.comm_stats().keys() == worker.comm_stats().keys()
        assert other.comm_stats()["clock"] == 1.0
        address = partial(getattr, other, "address")
        for call in (address, partial(other.add_peer, "b", REFUSED), partial(other.remove_peer, "b")):
            with pytest.raises(RuntimeError, match=r"of a copy, expected it of the worker itself.*make a new worker"):
                call()
        with torch.no_grad():
            next(other.parameters()).fill_(3.0)
        worker.load_state_dict(other.state_dict())  # the best model so far, or a moving average
        assert value_of(worker) == 3.0
        assert worker.comm_stats()["clock"] == 1.0
        other.load_state_dict(worker.state_dict())
        other.close()


def test_the_loop_level_form_is_not_copied(workers: contextlib.ExitStack) -> None:
    worker = averager(workers, "a", filled(2.0))
    with pytest.raises(TypeError, match=r"got worker 'a' to copy or pickle, expected its `module`"):
        copy.deepcopy(worker)
    assert value_of(copy.deepcopy(worker.module)) == 2.0


def test_an_address_that_is_taken_is_an_error(workers: contextlib.ExitStack) -> None:
    worker = averager(workers, "a", filled(0.0))
    with pytest.raises(ConnectionError, match="worker 'b': cannot bind"):
        averager(workers, "b", filled(0.0), address=worker.address)


@pytest.mark.parametrize("side", ["server", "client"])
def test_an_error_of_a_thread_is_raised_in_training(
    workers: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    first = averager(workers, "a", filled(0.0))
    introduce(("a", first), ("b", averager(workers, "b", filled(0.0))))

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    if side == "client":
        monkeypatch.setattr(engine_of(first).fetcher, "_try", fail)
        first.update_send()
        with pytest.raises(RuntimeError, match="worker 'a': fetching from 'b' failed: ZeroDivisionError"):
            first.update_wait()
    else:
        monkeypatch.setattr(engine_of(first).server, "_reply", fail)
        second = averager(workers, "c", filled(0.0), peers={"a": first.address}, timeout=timedelta(seconds=1))
        second.update_send()
        assert not second.update_wait()
        wait_for(lambda: engine_of(first).background._error is not None)
        with pytest.raises(RuntimeError, match="worker 'a': serving peers failed: ZeroDivisionError"):
            first.update_send()


def test_a_model_that_changes_its_dtype_is_an_error(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", filled(0.0))
    worker.half()
    with pytest.raises(
        ValueError, match=r"worker 'a': got a model of .* changed since it was wrapped.*before wrapping"
    ):
        worker(torch.ones(1, 50, dtype=torch.float16))


def test_tensors_put_in_place_of_ours_are_taken_in(workers: contextlib.ExitStack) -> None:
    a = filled(0.0)
    first = averager(workers, "a", a)
    introduce(("a", first), ("b", averager(workers, "b", filled(8.0))))
    a.load_state_dict(filled(4.0).state_dict(), assign=True)
    first.update_send()
    assert first.update_wait()
    assert value_of(a) == 6.0


def test_workers_that_are_closed_leave_nothing_open(workers: contextlib.ExitStack) -> None:
    def live(num_workers: int) -> None:
        for _ in range(num_workers):
            with silent_peer() as address:
                worker = averager(workers, "a", filled(1.0), peers={"b": address, "c": REFUSED})
                worker.update_send()
                worker.close()

    live(1)
    before = num_descriptors(), threading.active_count()
    live(20)
    deadline = time.monotonic() + 10.0  # a thread that has been told to end may still be there

    def num_more() -> tuple[int, int]:
        return max(num_descriptors() - before[0], 0), max(threading.active_count() - before[1], 0)

    while num_more() != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_more() == (0, 0)


def test_the_average_needs_a_process_group(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", filled(0.0))
    worker.settle()
    for collective in (worker.average_, worker.consensus_distance):
        with pytest.raises(RuntimeError, match=r"torch.distributed is not initialised.*torchrun"):
            collective()


def test_with_a_process_group_the_average_is_exact(workers: contextlib.ExitStack) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        a = filled(3.0)
        for worker in (wrap(workers, "a", a), averager(workers, "a", filled(3.0))):
            assert worker.consensus_distance() == 0.0
            worker.average_()
            with worker.averaged():
                assert value_of(a) == 3.0
    finally:
        dist.destroy_process_group()


def test_from_the_configuration_of_dpwa(workers: contextlib.ExitStack, tmp_path: Path) -> None:
    path = tmp_path / "dpwa.yaml"
    node = "{name: a, host: 127.0.0.1, port: 0}"
    path.write_text(f"- nodes: [{node}]\n- interpolation: clock\n- timeout_ms: 100\n", encoding="utf-8")
    wrapped = PairwiseDataParallel.from_config(filled(0.0), "a", path, seed=3)
    driven = PairwiseAverager(filled(0.0), PairwiseConfig.from_yaml("a", path, seed=3))
    for worker in (wrapped, driven):
        workers.callback(worker.close)
        config = engine_of(worker).config
        assert (config.interpolation, config.timeout, config.seed) == (ClockInterpolation(), timedelta(seconds=0.1), 3)


def test_add_peer_refuses_mistakes(workers: contextlib.ExitStack) -> None:
    worker = averager(workers, "a", filled(0.0))
    with pytest.raises(ValueError, match="got the own name 'a'"):
        worker.add_peer("a", REFUSED)
    with pytest.raises(ValueError, match="got address 'here' of 'b'"):
        worker.add_peer("b", "here")
    for address in (ANY_PORT, "tcp://*:45000", "tcp://127.0.0.1:0"):
        with pytest.raises(ValueError, match=r"got address .* of 'b', expected the host and port where that worker is"):
            worker.add_peer("b", address)
    with pytest.raises(ValueError, match="got address 'tcp://bad host:1' of 'b', expected 'tcp://host:port'"):
        worker.add_peer("b", "tcp://bad host:1")


@pytest.mark.parametrize("address", ["tcp://a;b:1", "tcp://[::1:1"])
def test_an_address_that_leads_nowhere_is_a_peer_that_fails(workers: contextlib.ExitStack, address: str) -> None:
    a = filled(0.0)
    seconds = timedelta(seconds=6)  # a quarter of it is waited for the bad one
    worker, good = averager(workers, "a", a, timeout=seconds), averager(workers, "b", filled(8.0))
    introduce(("a", worker), ("b", good))
    worker.add_peer("bad", address)
    ask_first(worker, "bad")
    worker.update_send()
    assert worker.update_wait()
    assert value_of(a) == 4.0
    assert worker.comm_stats()["num_failed_fetches"] == 1


def test_gradients_are_those_of_the_plain_module(workers: contextlib.ExitStack) -> None:
    plain, wrapped = mlp(1), mlp(1)
    worker = wrap(workers, "a", wrapped)
    x, y = batch(0, 0)
    gradients: list[list[Tensor | None]] = []
    for model in (plain, worker):
        nn.functional.mse_loss(model(x), y).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)

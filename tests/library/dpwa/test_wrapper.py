"""Pairwise averaging: workers approach each other, peers die and come back, and strangers do no harm."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq
from torch import Tensor, nn

from gossip_modules.dpwa.averager import PairwiseAverager
from gossip_modules.dpwa.config import PairwiseConfig
from gossip_modules.dpwa.interpolation import ClockInterpolation, ConstantInterpolation, LossInterpolation, Standing
from gossip_modules.dpwa.wire.curve_keys import CurveKeys
from gossip_modules.dpwa.wire.message import Kind, Message
from gossip_modules.dpwa.wrapper import PairwiseDataParallel
from tests.harness.problems import batch, mlp, net
from tests.harness.ranks import gossip_threads
from tests.harness.strangers import PING, ask_and_never_read, connect

ANY_PORT = "tcp://127.0.0.1:*"
TIMEOUT = timedelta(seconds=20)  # of rounds that do not wait for it
REFUSED = "tcp://127.0.0.1:1"  # where nobody listens


@pytest.fixture
def workers() -> Iterator[contextlib.ExitStack]:
    """Closes what is entered, and checks that no thread is left."""
    with contextlib.ExitStack() as stack:
        yield stack
    assert gossip_threads() == []


def averager(
    workers: contextlib.ExitStack,
    name: str,
    module: nn.Module,
    *,
    address: str = ANY_PORT,
    peers: Mapping[str, str] | None = None,
    init_from_peers: bool = False,
    **options: Any,
) -> PairwiseAverager:
    """A worker at a free port that knows nobody else yet."""
    config = PairwiseConfig(name, {name: address, **(peers or {})}, **{"timeout": TIMEOUT, **options})
    worker = PairwiseAverager(module, config, init_from_peers=init_from_peers)
    workers.callback(worker.close)
    return worker


def wrap(workers: contextlib.ExitStack, name: str, module: nn.Module, **options: Any) -> PairwiseDataParallel:
    """The same as a wrapper."""
    options = {"peers": {name: ANY_PORT}, "timeout": TIMEOUT, "init_from_peers": False, **options}
    worker = PairwiseDataParallel(module, name=name, **options)
    workers.callback(worker.close)
    return worker


def introduce(*group: tuple[str, PairwiseAverager | PairwiseDataParallel]) -> None:
    """Everybody knows everybody from now on."""
    for name, worker in group:
        for other_name, other in group:
            if other_name != name:
                worker.add_peer(other_name, other.address)


def filled(value: float, numel: int = 50, dtype: torch.dtype = torch.float32) -> nn.Module:
    """One parameter with this value in every element."""
    module = nn.Linear(numel, 1, bias=False, dtype=dtype)
    nn.init.constant_(module.weight, value)
    return module


def value_of(module: nn.Module) -> float:
    """The value that all elements have."""
    parameter = next(module.parameters()).detach()
    assert torch.equal(parameter, torch.full_like(parameter, parameter.flatten()[0].item()))
    return parameter.flatten()[0].item()


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max((x.double() - y.double()).abs().max().item() for x, y in pairs if x.is_floating_point())


def wait_for(condition: Callable[[], bool]) -> None:
    """Until something that a thread does has happened."""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.001)


# What is merged.


def test_one_exchange_is_the_interpolation(workers: contextlib.ExitStack) -> None:
    a, b = filled(0.0), filled(8.0)
    first, second = averager(workers, "a", a, interpolation=ConstantInterpolation(0.25)), averager(workers, "b", b)
    introduce(("a", first), ("b", second))
    first.update_send(1.0)
    assert first.update_wait(1.0)
    assert value_of(a) == 2.0
    assert value_of(b) == 8.0  # a pull changes nobody else
    assert first.comm_stats()["clock"] == 0.75  # 1 of its own, 0 of the other
    second.update_send()
    assert second.update_wait()
    assert value_of(b) == 4.0  # the average with what a published before its batch, which is 0


def test_by_clock_a_newcomer_takes_the_whole_model(workers: contextlib.ExitStack) -> None:
    a, b = filled(0.0), filled(8.0)
    first, second = (averager(workers, n, m, interpolation=ClockInterpolation()) for n, m in (("a", a), ("b", b)))
    introduce(("a", first), ("b", second))
    second._engine.clock = 2.0
    second.update_send()
    first.update_send()
    assert first.update_wait()
    assert value_of(a) == 8.0 * 3 / 4
    assert first.comm_stats()["clock"] == pytest.approx(3 * 3 / 4 + 1 * 1 / 4)


def test_by_loss_the_worse_takes_more(workers: contextlib.ExitStack) -> None:
    a, b = filled(0.0), filled(8.0)
    first, second = (averager(workers, n, m, interpolation=LossInterpolation()) for n, m in (("a", a), ("b", b)))
    introduce(("a", first), ("b", second))
    first.update_send(1.0)
    assert not first.update_wait(3.0)  # the other has told no loss yet: nothing to go by
    second.update_send(1.0)
    first.update_send()
    assert first.update_wait(3.0)
    assert value_of(a) == 8.0 * 3 / 4


def test_below_the_divergence_threshold_merges_are_smaller(workers: contextlib.ExitStack) -> None:
    a = filled(0.0)
    first = averager(workers, "a", a, divergence_threshold=0.5)
    introduce(("a", first), ("b", averager(workers, "b", filled(8.0))))
    first.update_send()
    assert first.update_wait(0.125)
    assert value_of(a) == 8.0 * 0.5 * 0.125 / 0.5


def test_a_worker_that_diverged_takes_the_model_of_the_other_and_is_not_copied(workers: contextlib.ExitStack) -> None:
    a, b = filled(float("nan")), filled(8.0)
    first = averager(workers, "a", a, interpolation=LossInterpolation(), on_nonfinite="skip")
    second = averager(workers, "b", b, interpolation=LossInterpolation())
    introduce(("a", first), ("b", second))
    second.update_send(1.0)
    second.update_wait(1.0)
    first.update_send(float("nan"))
    assert first.update_wait()
    assert value_of(a) == 8.0
    assert first.comm_stats()["num_refused_losses"] == 1
    assert first.comm_stats()["num_skipped"] == 0
    with pytest.warns(
        UserWarning, match="worker 'b' refused the model of 'a': got a model with infinite or NaN values"
    ):
        second.update_send(1.0)  # the model that a had published when it began was refused
    assert value_of(b) == 8.0
    assert second.comm_stats()["num_refused_models"] in (1, 2)  # the fetch that has just begun may have ended too


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(workers: contextlib.ExitStack, dtype: torch.dtype) -> None:
    a, b = filled(1.0, dtype=dtype), filled(2.0, dtype=dtype)
    first, second = averager(workers, "a", a), averager(workers, "b", b)
    introduce(("a", first), ("b", second))
    first.update_send()
    assert first.update_wait()
    assert value_of(a) == 1.5


def test_mixed_dtypes_and_buffers_travel(workers: contextlib.ExitStack) -> None:
    def module(seed: int) -> nn.Module:
        made = nn.ModuleList([net(seed), mlp(seed).double()])
        made.register_parameter("phase", nn.Parameter(torch.full((3, 2), 1j * seed)))
        for buffer in made.buffers():
            buffer.add_(seed)
        return made

    a, b = module(1), module(2)
    expected = [(x + y) / 2 for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)]
    first, second = averager(workers, "a", a), averager(workers, "b", b)
    introduce(("a", first), ("b", second))
    first.update_send()
    assert first.update_wait()
    for x, y in zip(a.state_dict().values(), expected, strict=True):
        if x.is_floating_point() or x.is_complex():
            torch.testing.assert_close(x, y)


def test_gradient_steps_under_the_fetch_are_kept(workers: contextlib.ExitStack) -> None:
    a = filled(0.0)
    first = averager(workers, "a", a)
    introduce(("a", first), ("b", averager(workers, "b", filled(8.0))))
    first.update_send()
    with torch.no_grad():
        next(a.parameters()).add_(2.0)  # the batch
    assert first.update_wait()
    assert value_of(a) == 2.0 + 0.5 * (8.0 - 2.0)


# Training.


def test_wrappers_converge_to_each_other_while_they_train(workers: contextlib.ExitStack) -> None:
    modules = [net(seed) for seed in (1, 2)]
    group = [(name, wrap(workers, name, module)) for name, module in zip("ab", modules, strict=True)]
    introduce(*group)
    before = distance(*modules)
    for step in range(60):
        for rank, (_, worker) in enumerate(group):
            x, y = batch(rank, step)
            loss = nn.functional.mse_loss(worker(x), y)
            loss.backward()
            with torch.no_grad():
                for parameter in worker.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(1e-3 * parameter.grad)
                    parameter.grad = None
            worker.report_loss(loss.item())
            wait_for(partial(getattr, worker._engine._fetcher, "is_done"))
    assert distance(*modules) < before / 10
    stats = group[0][1].comm_stats()
    assert stats["num_rounds"] >= 55
    assert stats["max_staleness"] == 0
    assert stats["bytes_received"] > stats["num_rounds"] * group[0][1]._buffer.vector.layout.num_bytes


def test_a_forward_does_not_wait_for_a_fetch(workers: contextlib.ExitStack) -> None:
    with silent_peer() as address:
        worker = wrap(workers, "a", filled(1.0), peers={"a": ANY_PORT, "b": address}, timeout=timedelta(seconds=1))
        for _ in range(5):
            worker(torch.ones(1, 50))
        stats = worker.comm_stats()
        assert stats["wait_seconds"] == 0
        assert stats["num_rounds"] == 0
        assert worker._engine.t == 1  # the first fetch is under way all the time
        worker.eval()  # waits for it, as long as it may take, and finds nothing
        assert not worker._engine.is_in_flight
        assert worker.comm_stats()["num_failed_fetches"] == 1


def test_eval_merges_what_is_under_way(workers: contextlib.ExitStack) -> None:
    a = filled(0.0)
    worker = wrap(workers, "a", a)
    introduce(("a", worker), ("b", wrap(workers, "b", filled(8.0))))
    worker(torch.ones(1, 50))
    assert worker.last_peer is None
    worker.eval()
    assert value_of(a) == 4.0
    assert worker.last_peer == "b"
    worker(torch.ones(1, 50))
    assert not worker._engine.is_in_flight


def test_a_merge_invalidates_older_graphs(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", mlp(1))
    introduce(("a", worker), ("b", wrap(workers, "b", mlp(2))))
    x, y = batch(0, 0)
    loss = nn.functional.mse_loss(worker(x), y)
    worker.flush()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_loss_that_is_needed_must_be_reported(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", filled(0.0), interpolation=LossInterpolation())
    worker(torch.ones(1, 50))
    with pytest.raises(
        RuntimeError, match=r"worker 'a': got no loss before the second .*LossInterpolation.*report_loss"
    ):
        worker(torch.ones(1, 50))
    worker.report_loss(1.0)
    worker(torch.ones(1, 50))


def test_fetch_probability(workers: contextlib.ExitStack) -> None:
    def fetches(name: str, probability: float) -> list[bool]:
        worker = averager(workers, name, filled(0.0), fetch_probability=probability)
        taken = []
        for _ in range(200):
            worker.update_send()
            taken.append(worker._engine.is_in_flight)
            worker.update_wait()
        return taken

    assert not any(fetches("a", 0.0))
    assert all(fetches("a", 1.0))
    assert 60 < sum(fetches("a", 0.5)) < 140  # 100 expected, with a standard deviation of 7
    assert fetches("a", 0.5) != fetches("b", 0.5)  # each worker has a generator of its own


# Peers that are late, gone or back.


@contextlib.contextmanager
def silent_peer(answer: Callable[[Message], list[bytes]] | None = None) -> Iterator[str]:
    """The address of a peer that never answers, or answers a request with these messages."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, stop = context.socket(zmq.ROUTER), threading.Event()
    router.linger = 0
    router.bind(ANY_PORT)
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve() -> None:
        while not stop.is_set():
            if answer is not None and router.poll(5):
                client, request = router.recv_multipart()
                for frame in answer(Message.parse(request)):
                    router.send_multipart([client, frame])
            stop.wait(0.001)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address
    finally:
        stop.set()
        thread.join()
        router.close()
        context.term()


def test_a_refused_connection_tries_another_peer_in_the_same_round(workers: contextlib.ExitStack) -> None:
    a = filled(0.0)
    first, second = averager(workers, "a", a), averager(workers, "b", filled(8.0))
    for i in range(5):
        first.add_peer(f"dead{i}", REFUSED)
    first.add_peer("b", second.address)
    for _ in range(3):
        first.update_send()
        assert first.update_wait()  # every round merges
    assert first.comm_stats()["num_rounds"] == 3
    assert first.comm_stats()["num_failed_fetches"] > 0


def test_a_silent_peer_leaves_time_for_another_in_the_same_round(workers: contextlib.ExitStack) -> None:
    with silent_peer() as address:
        first = averager(workers, "a", filled(0.0), timeout=timedelta(seconds=1.0))
        introduce(("a", first), ("b", averager(workers, "b", filled(8.0))))
        first.add_peer("silent", address)
        first._engine.scores.answered("silent")  # it is asked first
        first.update_send()
        assert first.update_wait()
        assert first._engine.scores.scores == {"b": 1000, "silent": 900}


def test_nobody_there_is_no_error(workers: contextlib.ExitStack) -> None:
    a = filled(1.0)
    worker = averager(workers, "a", a, peers={f"dead{i}": REFUSED for i in range(3)}, init_from_peers=True)
    for _ in range(20):
        worker.update_send()
        assert not worker.update_wait()
    assert value_of(a) == 1.0
    # Everybody once in a round, not the same one again and again.
    assert worker.comm_stats()["num_fetches"] == worker.comm_stats()["num_failed_fetches"] == 3 * 21


def rounds_until(worker: PairwiseAverager, is_done: Callable[[], bool]) -> int:
    """How many rounds it takes until then."""
    for count in range(1, 100):
        worker.update_send()
        worker.update_wait()
        if is_done():
            return count
        threading.Event().wait(0.01)  # the batch, under which probes are answered
    raise AssertionError("it did not happen in 100 rounds")


def test_a_peer_that_starts_late_is_found_and_begins_with_a_live_model(workers: contextlib.ExitStack) -> None:
    late = averager(workers, "late", filled(0.0))
    address = late.address
    late.close()
    first = averager(workers, "a", filled(3.0), peers={"late": address})
    introduce(("a", first), ("b", averager(workers, "b", filled(3.0))))
    for _ in range(15):
        first.update_send()
        first.update_wait()
    assert first._engine.scores.scores["late"] < 1000
    module = filled(0.0)
    late = averager(workers, "late", module, address=address, peers={"a": first.address}, init_from_peers=True)
    assert value_of(module) == 3.0
    assert late.comm_stats()["clock"] > 0
    assert rounds_until(first, lambda: late.comm_stats()["num_models_sent"] > 0) <= 10
    assert first._engine.scores.scores["late"] == 1000


def test_killed_and_restarted_peers_are_fetched_from_again_within_ten_rounds(workers: contextlib.ExitStack) -> None:
    group = [averager(workers, name, filled(i)) for i, name in enumerate("abcd")]
    introduce(*zip("abcd", group, strict=True))
    alive = group[:2]

    def train(num_rounds: int) -> None:
        for _ in range(num_rounds):
            for worker in alive:
                worker.update_send()
            for worker in alive:
                assert worker.update_wait()

    train(5)
    addresses = [worker.address for worker in group[2:]]
    for worker in group[2:]:
        worker.close()
    train(30)
    back = [averager(workers, name, filled(9.0), address=at) for name, at in zip("cd", addresses, strict=True)]
    for worker in alive:
        for other in back:
            before = other.comm_stats()["num_models_sent"]
            fetched = partial(lambda other, before: other.comm_stats()["num_models_sent"] > before, other, before)
            assert rounds_until(worker, fetched) <= 10


def test_peers_can_be_added_and_removed_while_rounds_run(workers: contextlib.ExitStack) -> None:
    first, second = averager(workers, "a", filled(0.0)), averager(workers, "b", filled(8.0))
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            first.add_peer("b", second.address)
            first.add_peer("dead", REFUSED)
            first.remove_peer("b")
            first.remove_peer("dead")

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(100):
            first.update_send()
            first.update_wait()
    finally:
        stop.set()
        thread.join()
    first.add_peer("b", second.address)
    first.update_send()
    assert first.update_wait()
    first.remove_peer("b")
    first.update_send()
    assert not first.update_wait()


# Peers that are wrong or hostile.


def test_another_model_is_refused_with_its_reason(workers: contextlib.ExitStack) -> None:
    a = filled(1.0)
    first = averager(workers, "a", a)
    introduce(("a", first), ("b", averager(workers, "b", filled(2.0, numel=7))))
    first.update_send()
    assert not first.update_wait()
    with pytest.warns(
        UserWarning, match="worker 'a' refused the model of 'b': got a model of 1 tensors.*same model on"
    ):
        first.update_send()
    first.update_wait()
    first.update_send()  # said once
    assert first.comm_stats()["num_refused_models"] >= 2
    assert value_of(a) == 1.0


def test_a_peer_whose_model_is_not_finite_is_refused_and_another_one_asked(workers: contextlib.ExitStack) -> None:
    a = filled(0.0)
    first, good = averager(workers, "a", a), averager(workers, "b", filled(8.0))
    introduce(("a", first), ("b", good), ("bad", averager(workers, "bad", filled(float("inf")))))
    first._engine.scores.answered("bad")  # it is asked first
    first.update_send()
    assert first.update_wait()
    assert value_of(a) == 4.0
    with pytest.warns(UserWarning, match="refused the model of 'bad'"):
        first.update_send()


LIES: dict[str, Callable[[Message], list[bytes]]] = {
    "no header": lambda request: [b"x"],
    "another kind": lambda request: [request.pack()],
    "too short": lambda request: [request._replace(kind=Kind.MODEL).pack(), b"12"],
    "infinite loss": lambda request: [
        request._replace(kind=Kind.MODEL, standing=Standing(1.0, float("inf"))).pack(),
        bytes(request.shape.num_bytes),
    ],
    "negative clock": lambda request: [
        request._replace(kind=Kind.MODEL, standing=Standing(-1.0)).pack(),
        bytes(request.shape.num_bytes),
    ],
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(workers: contextlib.ExitStack, lie: str) -> None:
    with silent_peer(LIES[lie]) as address:
        a = filled(1.0)
        worker = averager(workers, "a", a, peers={"liar": address})
        worker.update_send()
        assert not worker.update_wait()
        with pytest.warns(UserWarning, match="refused the model of 'liar': got .*, expected"):
            worker.update_send()
        assert value_of(a) == 1.0
        assert worker.comm_stats()["num_refused_models"] >= 1


def test_a_model_longer_than_ours_is_refused_before_it_is_read(workers: contextlib.ExitStack) -> None:
    def lie(request: Message) -> list[bytes]:
        return [request._replace(kind=Kind.MODEL).pack(), bytes(50_000_000)]

    with silent_peer(lie) as address:
        worker = averager(workers, "a", filled(1.0), peers={"liar": address})
        worker.update_send()
        assert not worker.update_wait()
        stats = worker.comm_stats()
        assert stats["num_failed_fetches"] == 1  # ZeroMQ hung up on it
        assert stats["bytes_received"] <= 64


def test_answers_to_an_older_request_are_not_taken(workers: contextlib.ExitStack) -> None:
    def late(request: Message) -> list[bytes]:
        old = request._replace(kind=Kind.EMPTY, request=request.request + 1000)
        return [old.pack(), request._replace(kind=Kind.MODEL).pack(), bytes(request.shape.num_bytes)]

    with silent_peer(late) as address:
        a = filled(1.0)
        worker = averager(workers, "a", a, peers={"b": address})
        worker.update_send()
        assert worker.update_wait()
        assert value_of(a) == 0.5


def test_with_keys_workers_train_and_strangers_get_nothing(workers: contextlib.ExitStack) -> None:
    pairs = {name: make_keys() for name in "abx"}
    a, b = filled(0.0), filled(8.0)
    first = averager(workers, "a", a, curve=CurveKeys(*pairs["a"], {"b": pairs["b"][0]}))
    second = averager(workers, "b", b, curve=CurveKeys(*pairs["b"]))
    first.add_peer("b", second.address, public_key=pairs["b"][0])
    second.add_peer("a", first.address, public_key=pairs["a"][0])
    first.update_send()
    assert first.update_wait()
    assert value_of(a) == 4.0
    x = filled(1.0)
    unknown = CurveKeys(*pairs["x"], {"a": pairs["a"][0]})
    for curve in (None, unknown):
        stranger = averager(workers, "x", x, curve=curve, peers={"a": first.address}, timeout=timedelta(seconds=2))
        stranger.update_send()
        assert not stranger.update_wait()
        assert stranger.comm_stats()["bytes_received"] == 0
    assert value_of(x) == 1.0
    first.remove_peer("b")
    averager(workers, "b2", b, curve=CurveKeys(*pairs["b"], {"a": pairs["a"][0]}), peers={"a": first.address})
    with pytest.raises(ValueError, match=r"got public_key=None of 'c', expected one exactly where `curve` is given"):
        first.add_peer("c", REFUSED)


# Models that are not finite, or far away.


def pair(workers: contextlib.ExitStack, own: float, peer: float, **options: Any) -> tuple[nn.Module, PairwiseAverager]:
    """A worker and its module, both with these values, and a peer of it."""
    a = filled(own)
    first = averager(workers, "a", a, **options)
    first.add_peer("b", averager(workers, "b", filled(peer)).address)
    return a, first


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_worker_notices_that_its_own_model_is_not_finite(workers: contextlib.ExitStack, bad: float) -> None:
    a, worker = pair(workers, bad, 8.0)
    worker.update_send()
    with pytest.raises(
        FloatingPointError,
        match=r"worker 'a': the own model held infinities or NaN in round 1 when it met that of 'b', expected.*on_nonf",
    ):
        worker.update_wait()
    assert worker.comm_stats()["num_rounds"] == 0
    with torch.no_grad():
        next(a.parameters()).fill_(4.0)  # a checkpoint, say
    worker.update_send()
    assert worker.update_wait()
    assert value_of(a) == 6.0


def test_a_wrapper_notices_it_too_where_no_peer_answers(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", filled(float("nan")), peers={"a": ANY_PORT, "b": REFUSED})
    worker(torch.ones(1, 50))
    with pytest.raises(FloatingPointError, match="worker 'a': the own model held infinities or NaN in round 1, expect"):
        worker.eval()


def test_merges_into_a_model_that_is_not_finite_can_be_left_out(workers: contextlib.ExitStack) -> None:
    a, worker = pair(workers, float("inf"), 8.0, on_nonfinite="skip")
    worker.update_send()
    with pytest.warns(UserWarning, match="worker 'a': the own model held infinities.*merges are left out from now on"):
        assert not worker.update_wait()
    worker.update_send()
    assert not worker.update_wait()  # said once
    assert worker.comm_stats()["num_skipped"] == 2
    assert worker.comm_stats()["num_rounds"] == 0
    assert torch.isinf(next(a.parameters())).all()


def test_merges_into_a_model_that_is_not_finite_can_be_made(workers: contextlib.ExitStack) -> None:
    a, worker = pair(workers, float("inf"), 8.0, on_nonfinite="spread")
    worker.update_send()
    assert worker.update_wait()
    assert torch.isinf(next(a.parameters())).all()
    assert worker.comm_stats()["num_skipped"] == 0


@pytest.mark.parametrize("far", [1e38, -1e7])
def test_a_model_far_from_ours_is_refused(workers: contextlib.ExitStack, far: float) -> None:
    a, worker = pair(workers, 3.0, far)
    worker.update_send()
    assert not worker.update_wait()
    with pytest.warns(
        UserWarning, match=r"worker 'a' refused the model of 'b': got a model at a root mean square distance of 1e\+"
    ):
        worker.update_send()
    assert value_of(a) == 3.0
    assert worker.comm_stats()["num_refused_models"] >= 1


def test_a_model_far_from_ours_is_not_started_from(workers: contextlib.ExitStack) -> None:
    a = filled(3.0)
    bad = averager(workers, "b", filled(1e38))
    worker = averager(workers, "a", a, peers={"b": bad.address}, init_from_peers=True, max_distance=0.1)
    assert value_of(a) == 3.0
    with pytest.warns(UserWarning, match="refused the model of 'b'"):
        worker.update_send()
    near = averager(workers, "c", filled(100.0))
    b = filled(3.0)
    averager(workers, "a", b, peers={"c": near.address}, init_from_peers=True, max_distance=0.1)
    assert value_of(b) == 100.0  # which a beginner may be far from


@pytest.mark.parametrize(("max_distance", "is_merged"), [(2.1, True), (1.9, False)])
def test_the_distance_is_in_units_of_the_own_model(
    workers: contextlib.ExitStack, max_distance: float, is_merged: bool
) -> None:
    _, worker = pair(workers, 100.0, 300.0, max_distance=max_distance)
    worker.update_send()
    assert worker.update_wait() == is_merged
    if not is_merged:
        with pytest.warns(UserWarning, match=r"distance of 200 from ours, expected 1.9 \* 100 at most"):
            worker.update_send()


# What strangers do.


def test_clients_that_read_nothing_but_ping_leave_merges_as_they_are(workers: contextlib.ExitStack) -> None:
    numel = 3_000_000  # 12 MB, more than the buffers of a connection take
    a = filled(0.0, numel)
    worker, asker = averager(workers, "a", a), averager(workers, "b", filled(8.0, numel))
    asker.add_peer("a", worker.address)
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(4):
            worker.update_send()
            address, shape = worker.address, worker._engine._server.shape
            strangers.append(stack.enter_context(ask_and_never_read(address, shape)))
        for _ in range(10):
            for stranger in strangers:
                stranger.sendall(PING)
            asker.update_send()
            assert asker.update_wait()
        assert asker.comm_stats()["num_rounds"] == 10
    wait_for(lambda: worker.comm_stats()["num_unread_replies"] == 4)


def test_connections_of_strangers_leave_a_worker_its_descriptors(workers: contextlib.ExitStack) -> None:
    worker, asker = averager(workers, "a", filled(0.0)), averager(workers, "b", filled(8.0))
    asker.add_peer("a", worker.address)
    worker.update_send()
    before = num_descriptors()
    with contextlib.ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(connect(worker.address))
        asker.update_send()
        assert asker.update_wait()  # and connections are accepted in their order, so all others are by now
        assert num_descriptors() - before - 300 < 150  # the other ends are ours too
        assert worker.comm_stats()["num_refused_connections"] > 200


# State, beginning and end.


def test_a_checkpoint_continues_clock_scores_and_choices(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", mlp(1), fetch_probability=0.5, peers={"a": ANY_PORT, "b": REFUSED, "c": REFUSED})
    for _ in range(9):
        worker(torch.ones(2, 3))
        wait_for(lambda: worker._engine._fetcher.is_done)
    worker.report_loss(0.5)
    file = io.BytesIO()
    torch.save(worker.state_dict(), file)
    file.seek(0)
    other = wrap(workers, "a", mlp(2), fetch_probability=0.5, peers={"a": ANY_PORT, "b": REFUSED, "c": REFUSED})
    other.load_state_dict(torch.load(file, weights_only=True))
    assert distance(worker, other) == 0
    ours, theirs = worker._engine.state_dict(), other._engine.state_dict()
    assert ours == theirs
    assert (theirs["clock"], theirs["loss"], theirs["step"]) == (9.0, 0.5, 9)
    assert theirs["peers"]["records"]["b"]["score"] < 1000
    with pytest.warns(UserWarning, match="the state dict holds no gossip state"):
        other.load_state_dict({f"module.{key}": value for key, value in mlp(3).state_dict().items()})
    assert other._engine.clock == 0


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


def test_what_was_under_way_is_not_merged_into_what_is_loaded(workers: contextlib.ExitStack) -> None:
    a = filled(0.0)
    worker = averager(workers, "a", a)
    introduce(("a", worker), ("b", averager(workers, "b", filled(8.0))))
    state = worker.state_dict()
    worker.update_send()
    a.load_state_dict({"weight": torch.full((1, 50), 100.0)})
    worker.load_state_dict(state)
    assert value_of(a) == 100.0
    assert not worker._engine.is_in_flight


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
        assert gossip_threads() == []


def test_a_timeout_may_be_very_long(workers: contextlib.ExitStack) -> None:
    worker = averager(workers, "a", filled(1.0), peers={"b": REFUSED}, timeout=timedelta(days=200))
    worker.update_send()
    assert not worker.update_wait()
    assert worker.comm_stats()["num_failed_fetches"] == 1


def test_close_is_idempotent_and_ends_a_fetch(workers: contextlib.ExitStack) -> None:
    with silent_peer() as address:
        worker = averager(workers, "a", filled(1.0), peers={"b": address}, timeout=timedelta(hours=1))
        worker.update_send()
        assert {thread.name for thread in gossip_threads()} == {"gossip-serve-a", "gossip-fetch-a"}
        worker.close()
        worker.close()
        assert gossip_threads() == []
    with pytest.raises(RuntimeError, match="worker 'a' is closed, expected no more rounds"):
        worker.update_send()


def test_a_closed_wrapper_computes(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", filled(2.0))
    worker(torch.ones(1, 50))
    worker.close()
    worker.close()
    assert worker(torch.ones(1, 50)).item() == 100.0


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


@pytest.mark.parametrize("side", ["_server", "_client"])
def test_an_error_of_a_thread_is_raised_in_training(
    workers: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    first = averager(workers, "a", filled(0.0))
    introduce(("a", first), ("b", averager(workers, "b", filled(0.0))))

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    if side == "_client":
        monkeypatch.setattr(first._engine._client, "_try", fail)
        first.update_send()
        with pytest.raises(RuntimeError, match="worker 'a': fetching from 'b' failed: ZeroDivisionError"):
            first.update_wait()
    else:
        monkeypatch.setattr(first._engine._server, "_reply", fail)
        second = averager(workers, "c", filled(0.0), peers={"a": first.address}, timeout=timedelta(seconds=1))
        second.update_send()
        assert not second.update_wait()
        wait_for(lambda: first._engine._background._error is not None)
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


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


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
    assert (num_descriptors(), threading.active_count()) == before


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
        config = worker._engine.config
        assert (config.interpolation, config.timeout, config.seed) == (ClockInterpolation(), timedelta(seconds=0.1), 3)


def test_without_zeromq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"needs pyzmq; pip install 'gossip-modules\[pairwise\]'"):
        PairwiseDataParallel(filled(0.0), name="a", peers={"a": ANY_PORT})


def test_add_peer_refuses_mistakes(workers: contextlib.ExitStack) -> None:
    worker = averager(workers, "a", filled(0.0))
    with pytest.raises(ValueError, match="got the own name 'a'"):
        worker.add_peer("a", REFUSED)
    with pytest.raises(ValueError, match="got address 'here' of 'b'"):
        worker.add_peer("b", "here")
    with pytest.raises(ValueError, match=r"got public_key=.* of 'b', expected one exactly where"):
        worker.add_peer("b", REFUSED, public_key="k" * 40)
    for address in (ANY_PORT, "tcp://*:45000", "tcp://127.0.0.1:0"):
        with pytest.raises(ValueError, match=r"got address .* of 'b', expected the host and port where that worker is"):
            worker.add_peer("b", address)
    with pytest.raises(ValueError, match="got address 'tcp://bad host:1' of 'b', expected 'tcp://host:port'"):
        worker.add_peer("b", "tcp://bad host:1")


@pytest.mark.parametrize("address", ["tcp://a;b:1", "tcp://[::1:1"])
def test_an_address_that_zeromq_does_not_take_is_a_peer_that_fails(workers: contextlib.ExitStack, address: str) -> None:
    a = filled(0.0)
    worker, good = averager(workers, "a", a), averager(workers, "b", filled(8.0))
    introduce(("a", worker), ("b", good))
    worker.add_peer("bad", address)
    worker._engine.scores.answered("bad")  # it is asked first
    worker.update_send()
    assert worker.update_wait()
    assert value_of(a) == 4.0
    assert worker.comm_stats()["num_failed_fetches"] == 1


def make_keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def test_keys_that_are_no_pair_are_refused_and_leave_nothing_open() -> None:
    with pytest.raises(ValueError, match=r"with the secret key of another pair, expected one pair"):
        averager(contextlib.ExitStack(), "a", filled(0.0), curve=CurveKeys(make_keys()[0], make_keys()[1]))
    assert gossip_threads() == []


@pytest.mark.parametrize("part", ["model_client.ModelClient", "model_fetcher.ModelFetcher"])
def test_a_constructor_that_fails_closes_its_sockets(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(f"gossip_modules.{part}", fail)
    curve = CurveKeys(*make_keys())
    with pytest.raises(ZeroDivisionError):  # and no hang in the end of a context
        PairwiseAverager(filled(0.0), PairwiseConfig("a", {"a": ANY_PORT}, curve=curve))


def test_a_key_that_is_refused_is_not_kept(workers: contextlib.ExitStack) -> None:
    worker = averager(workers, "a", filled(0.0), curve=CurveKeys(*make_keys()))
    with pytest.raises(ValueError, match="got a key 'b' that is no Z85"):
        worker.add_peer("b", REFUSED, public_key="~" * 40)
    worker.add_peer("c", REFUSED, public_key=make_keys()[0])


def test_a_revoked_key_is_not_answered_and_a_replaced_one_not_believed(workers: contextlib.ExitStack) -> None:
    first_keys, second_keys = make_keys(), make_keys()
    a, b = filled(0.0), filled(8.0)
    first = averager(workers, "a", a, curve=CurveKeys(*first_keys))
    second = averager(workers, "b", b, curve=CurveKeys(*second_keys), timeout=timedelta(seconds=2))
    first.add_peer("b", second.address, public_key=second_keys[0])
    second.add_peer("a", first.address, public_key=first_keys[0])
    second.update_send()
    assert second.update_wait()
    first.remove_peer("b")
    second.update_send()
    assert not second.update_wait()  # on the connection that it had
    assert first.comm_stats()["num_refused_connections"] > 0
    first.add_peer("b", second.address, public_key=second_keys[0])
    second.update_send()
    assert second.update_wait()
    second.add_peer("a", first.address, public_key=make_keys()[0])
    second.update_send()
    assert not second.update_wait()


def test_a_peer_that_is_gone_fills_no_monitor(workers: contextlib.ExitStack) -> None:
    worker = averager(workers, "a", filled(0.0), peers={"b": REFUSED}, timeout=timedelta(seconds=2))
    worker._engine._client._probe("b")
    probe = worker._engine._client._probes["b"]
    assert probe.monitor.poll(2000)
    assert probe.failure() == "the connection was refused"
    assert not probe.monitor.poll(400)  # libzmq would try again every 100 ms
    (context,) = worker._engine._contexts  # nor could it hold up the server, which has none
    assert worker._engine._client._context is context


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

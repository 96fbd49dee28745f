"""Peers of dpwa that are late, gone, back, wrong or hostile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest

from gossip_modules.dpwa.averager import PairwiseAverager
from gossip_modules.dpwa.interpolation import Standing
from gossip_modules.dpwa.wire.curve_keys import CurveKeys
from gossip_modules.dpwa.wire.message import Message, MessageKind
from tests.library.dpwa.workers import REFUSED, averager, filled, introduce, make_keys, silent_peer, value_of


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
        first._engine.network.scores.answered("silent")  # it is asked first
        first.update_send()
        assert first.update_wait()
        assert first._engine.network.scores.scores == {"b": 1000, "silent": 900}


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
    assert first._engine.network.scores.scores["late"] < 1000
    module = filled(0.0)
    late = averager(workers, "late", module, address=address, peers={"a": first.address}, init_from_peers=True)
    assert value_of(module) == 3.0
    assert late.comm_stats()["clock"] > 0
    assert rounds_until(first, lambda: late.comm_stats()["num_models_sent"] > 0) <= 10
    assert first._engine.network.scores.scores["late"] == 1000


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
    assert all(worker.comm_stats()["deaths"] >= 2 for worker in alive)
    back = [averager(workers, name, filled(9.0), address=at) for name, at in zip("cd", addresses, strict=True)]
    for worker in alive:
        for other in back:
            before = other.comm_stats()["num_models_sent"]
            fetched = partial(lambda other, before: other.comm_stats()["num_models_sent"] > before, other, before)
            assert rounds_until(worker, fetched) <= 10
        rounds_until(worker, partial(lambda worker: worker.comm_stats()["live"] == 4, worker))
        assert worker.comm_stats()["joins"] >= 3 + 2  # introduced, and back


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
    first._engine.network.scores.answered("bad")  # it is asked first
    first.update_send()
    assert first.update_wait()
    assert value_of(a) == 4.0
    with pytest.warns(UserWarning, match="refused the model of 'bad'"):
        first.update_send()


LIES: dict[str, Callable[[Message], list[bytes]]] = {
    "no header": lambda request: [b"x"],
    "another kind": lambda request: [request.pack()],
    "too short": lambda request: [request._replace(kind=MessageKind.MODEL).pack(), b"12"],
    "infinite loss": lambda request: [
        request._replace(kind=MessageKind.MODEL, standing=Standing(1.0, float("inf"))).pack(),
        bytes(request.shape.num_bytes),
    ],
    "negative clock": lambda request: [
        request._replace(kind=MessageKind.MODEL, standing=Standing(-1.0)).pack(),
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
        return [request._replace(kind=MessageKind.MODEL).pack(), bytes(50_000_000)]

    with silent_peer(lie) as address:
        worker = averager(workers, "a", filled(1.0), peers={"liar": address})
        worker.update_send()
        assert not worker.update_wait()
        stats = worker.comm_stats()
        assert stats["num_failed_fetches"] == 1  # ZeroMQ hung up on it
        assert stats["bytes_received"] <= 64


def test_answers_to_an_older_request_are_not_taken(workers: contextlib.ExitStack) -> None:
    def late(request: Message) -> list[bytes]:
        old = request._replace(kind=MessageKind.EMPTY, request=request.request + 1000)
        return [old.pack(), request._replace(kind=MessageKind.MODEL).pack(), bytes(request.shape.num_bytes)]

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
        stranger.close()
    assert value_of(x) == 1.0
    first.remove_peer("b")
    averager(workers, "b2", filled(8.0), curve=CurveKeys(*pairs["b"], {"a": pairs["a"][0]}), peers={"a": first.address})
    with pytest.raises(ValueError, match=r"got public_key=None of 'c', expected one exactly where `curve` is given"):
        first.add_peer("c", REFUSED)

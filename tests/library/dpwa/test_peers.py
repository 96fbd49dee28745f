"""Peers of dpwa that are late, gone, back, wrong or hostile."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gossip_modules.dpwa.averager import PairwiseAverager
from gossip_modules.dpwa.interpolation import Standing
from gossip_modules.dpwa.protocol import HEADER_BYTES, MessageHeader, MessageKind
from tests.harness.certificates import Authority
from tests.harness.strangers import LENGTH_BYTES, answer, framed
from tests.library.dpwa.workers import (
    REFUSED,
    ask_first,
    averager,
    filled,
    introduce,
    scores_of,
    silent_peer,
    value_of,
    wait_for,
    wrap,
)


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
        ask_first(first, "silent")
        first.update_send()
        assert first.update_wait()
        assert scores_of(first) == {"b": 1000, "silent": 900}


def test_peers_that_are_gone_are_no_error(workers: contextlib.ExitStack) -> None:
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
    assert scores_of(first)["late"] < 1000
    module = filled(0.0)
    late = averager(workers, "late", module, address=address, peers={"a": first.address}, init_from_peers=True)
    assert value_of(module) == 3.0
    assert late.comm_stats()["clock"] > 0
    assert rounds_until(first, lambda: late.comm_stats()["num_models_sent"] > 0) <= 10
    assert scores_of(first)["late"] == 1000


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
    ask_first(first, "bad")
    first.update_send()
    assert first.update_wait()
    assert value_of(a) == 4.0
    with pytest.warns(UserWarning, match="refused the model of 'bad'"):
        first.update_send()


def model(
    request: MessageHeader, *, clock: float = 0.0, loss: float | None = None, num_bytes: int | None = None
) -> bytes:
    """The answer with a model of zeros."""
    header = MessageHeader(MessageKind.MODEL, request.shape, Standing(clock, loss)).pack()
    return framed(header) + framed(bytes(request.shape.num_bytes if num_bytes is None else num_bytes))


LIES: dict[str, Callable[[MessageHeader], bytes]] = {
    "no header": lambda request: framed(b"x"),
    "another header": lambda request: framed(b"x" * HEADER_BYTES),
    "a frame of 2^63 bytes": lambda request: struct.pack("<Q", 1 << 63),
    "another kind": lambda request: framed(request.pack()),
    "too short": lambda request: model(request, num_bytes=2),
    "too long": lambda request: model(request, num_bytes=50_000),
    "infinite loss": lambda request: model(request, loss=float("inf")),
    "negative clock": lambda request: model(request, clock=-1.0),
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


def test_a_model_that_is_longer_is_refused_before_it_is_read(workers: contextlib.ExitStack) -> None:
    with silent_peer(LIES["too long"]) as address:
        worker = averager(workers, "a", filled(1.0), peers={"liar": address})
        worker.update_send()
        assert not worker.update_wait()
        assert worker.comm_stats()["bytes_received"] == HEADER_BYTES + 2 * LENGTH_BYTES


def test_a_connection_that_closes_within_a_model_is_a_failed_fetch(workers: contextlib.ExitStack) -> None:
    with silent_peer(lambda request: model(request)[:-1]) as address:
        a = filled(1.0)
        worker = averager(workers, "a", a, peers={"b": address})
        worker.update_send()
        assert not worker.update_wait()
        assert worker.comm_stats()["num_failed_fetches"] == 1
        assert value_of(a) == 1.0


def test_a_peer_that_sends_byte_by_byte_has_the_time_of_a_round(workers: contextlib.ExitStack) -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                for byte in model(answer(client)):
                    client.send(bytes([byte]))
                    stop.wait(0.02)

        thread = threading.Thread(target=drip)
        thread.start()
        peers = {"b": f"tcp://127.0.0.1:{listener.getsockname()[1]}"}
        worker = averager(workers, "a", filled(1.0), peers=peers, timeout=timedelta(seconds=1.0))
        start = time.monotonic()
        worker.update_send()
        assert not worker.update_wait()
        assert time.monotonic() - start < 5.0
        assert worker.comm_stats()["num_failed_fetches"] == 1
        stop.set()
        thread.join()


def test_under_tls_workers_train_and_strangers_get_nothing(workers: contextlib.ExitStack, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    a, b, x = filled(0.0), filled(8.0), filled(1.0)
    first = averager(workers, "a", a, **authority.contexts("a"))
    second = averager(workers, "b", b, **authority.contexts("b"))
    introduce(("a", first), ("b", second))
    first.update_send()
    assert first.update_wait()
    assert value_of(a) == 4.0
    for options in ({}, other.contexts("x")):
        stranger = averager(workers, "x", x, peers={"a": first.address}, timeout=timedelta(seconds=2), **options)
        stranger.update_send()
        assert not stranger.update_wait()
        stranger.close()
    assert value_of(x) == 1.0
    wait_for(lambda: first.comm_stats()["num_refused_connections"] == 2)
    assert first.comm_stats()["num_models_sent"] == 0


@pytest.mark.parametrize("wrong", ["another authority", "another host"])
def test_the_error_of_a_certificate_names_the_peer_and_the_contexts(
    workers: contextlib.ExitStack, tmp_path: Path, wrong: str
) -> None:
    authority = Authority(tmp_path / "ours")
    signer = Authority(tmp_path / "other") if wrong == "another authority" else authority
    host = "IP:127.0.0.2" if wrong == "another host" else "IP:127.0.0.1"
    impostor = averager(workers, "b", filled(8.0), **signer.contexts("b", host=host))
    a = filled(0.0)
    worker = averager(workers, "a", a, peers={"b": impostor.address}, **authority.contexts("a"))
    worker.update_send()
    assert not worker.update_wait()
    with pytest.warns(UserWarning, match=r"'a' refused the model of 'b': got .*CERTIFICATE_VERIFY_FAILED.*_ssl="):
        worker.update_send()
    assert value_of(a) == 0.0


@pytest.mark.parametrize("secure", ["a", "b"])
def test_tls_on_one_end_only_is_named(workers: contextlib.ExitStack, tmp_path: Path, secure: str) -> None:
    contexts = Authority(tmp_path / "ours").contexts()
    options: dict[str, dict[str, Any]] = {name: contexts if name == secure else {} for name in ("a", "b")}
    other = averager(workers, "b", filled(8.0), **options["b"])
    worker = averager(workers, "a", filled(0.0), peers={"b": other.address}, **options["a"])
    worker.update_send()
    assert not worker.update_wait()
    with pytest.warns(UserWarning, match=r"'a' refused the model of 'b': got .*, expected TLS on both ends or on none"):
        worker.update_send()
    assert worker.comm_stats()["num_refused_models"] == 1


def test_without_verification_of_clients_tls_encrypts_alone(workers: contextlib.ExitStack, tmp_path: Path) -> None:
    contexts = Authority(tmp_path / "ours").contexts()
    contexts["server_ssl"].verify_mode = ssl.CERT_NONE
    reader = ssl.create_default_context(cafile=str(tmp_path / "ours" / "ca.pem"))  # without a certificate
    served = averager(workers, "b", filled(8.0), **contexts)
    a = filled(0.0)
    options = {"server_ssl": contexts["server_ssl"], "client_ssl": reader}
    worker = averager(workers, "a", a, peers={"b": served.address}, **options)
    worker.update_send()
    assert worker.update_wait()
    assert value_of(a) == 4.0


@pytest.mark.parametrize("name", ["public_key", "curve"])
def test_keys_of_curve_name_the_contexts(workers: contextlib.ExitStack, name: str) -> None:
    options: dict[str, Any] = {name: "k" * 40}
    match = rf"got {name}=.*, expected none: .*pass server_ssl= and client_ssl=, two ssl.SSLContext"
    with pytest.raises(ValueError, match=match):
        averager(workers, "a", filled(0.0)).add_peer("b", REFUSED, **options)
    with pytest.raises(ValueError, match=match):
        averager(workers, "a", filled(0.0), **options)
    with pytest.raises(ValueError, match=match):
        wrap(workers, "a", filled(0.0), **options)

"""Datagrams between ranks: their address, their threads, and messages that do not fit."""

from __future__ import annotations

import socket
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import RingGraph, RunningSums, connect
from gossip_modules.extend import FlatVector
from gossip_modules.mixing_manager import UniformMixing
from gossip_modules.transport.datagrams import MAX_BYTES, Datagram, Datagrams, own_host
from gossip_modules.transport.job_key import CODE_BYTES, VARIABLE
from gossip_modules.transport.own_address import check_reachable, checked_host
from tests.harness.ranks import CPU, TIMEOUT, assert_no_gossip_threads, run_ranks

KEY = b"a key of sixteen bytes or more"


def opened(group: dist.ProcessGroup, **options: Any) -> Datagrams:
    return Datagrams(connect(group, module_device=CPU, timeout=TIMEOUT), **{"key": None, **options})


@pytest.mark.parametrize("key", [None, KEY])
def test_a_message_comes_with_its_sender_and_its_numbers(key: bytes | None) -> None:
    datagram = Datagram(1, 3 << 40, 7, -5, b"body")

    def body(group: dist.ProcessGroup) -> tuple[int, Datagram, int]:
        came, found = threading.Event(), list[tuple[int, Datagram]]()
        datagrams = opened(group, key=key)

        def handle(sender: int, message: Datagram) -> None:
            found.append((sender, message._replace(body=bytes(message.body))))
            came.set()

        datagrams.listen(handle)
        num_bytes = datagrams.send(1 - group.rank(), datagram)
        assert came.wait(20)
        counts = datagrams.counts
        assert counts.bytes_sent == counts.bytes_received == num_bytes == Datagrams.overhead(key) + 4
        datagrams.close()
        datagrams.close()
        return *found[0], num_bytes

    results = run_ranks(2, body)
    assert [(sender, message) for sender, message, _ in results] == [(1, datagram), (0, datagram)]
    assert_no_gossip_threads()


def test_a_code_has_the_bytes_that_the_overhead_says() -> None:
    assert Datagrams.overhead(KEY) == Datagrams.overhead(None) + CODE_BYTES


def test_a_message_that_is_too_long_is_an_error_and_one_to_a_dead_peer_is_not() -> None:
    def body(group: dist.ProcessGroup) -> None:
        datagrams = opened(group)
        if group.rank() == 0:
            with pytest.raises(ValueError, match=rf"got a datagram of \d+ bytes, expected at most {MAX_BYTES}"):
                datagrams.send(1, Datagram(0, body=bytes(MAX_BYTES)))
            for _ in range(3):  # nobody listens there
                datagrams.send(1, Datagram(0))
        datagrams.close()

    run_ranks(2, body)


def test_an_error_in_the_thread_is_raised_in_training() -> None:
    def body(group: dist.ProcessGroup) -> None:
        mixer = RunningSums()
        mixer.bind(UniformMixing(RingGraph(2)), connect(group, module_device=CPU, timeout=TIMEOUT))
        s = FlatVector.over(torch.ones(4))
        assert mixer._inbox is not None
        assert mixer._datagrams is not None
        failed = threading.Event()

        def fail(peer: int, datagram: Datagram) -> None:
            failed.set()
            raise ZeroDivisionError

        mixer._inbox.handle = fail  # type: ignore[method-assign]
        mixer.start(s, 0)
        assert failed.wait(20)
        assert mixer._datagrams._thread is not None
        mixer._datagrams._thread.join(20)
        with pytest.raises(RuntimeError, match=r"rank \d: the thread of datagrams has ended by an error") as found:
            mixer.start(s, 1)
        assert isinstance(found.value.__cause__, ZeroDivisionError)
        mixer.close()

    run_ranks(2, body)


def test_a_mixer_that_is_collected_leaves_no_thread() -> None:
    def body(group: dist.ProcessGroup) -> None:
        mixer = RunningSums()
        mixer.bind(UniformMixing(RingGraph(2)), connect(group, module_device=CPU, timeout=TIMEOUT))
        mixer.mix(FlatVector.over(torch.ones(4)), 0)

    run_ranks(2, body)
    assert_no_gossip_threads()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the address of an interface")
def test_the_address_is_of_the_interface_of_gloo_or_of_the_way_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_host() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_host() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert own_host() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    with pytest.raises(ValueError, match=r"got GLOO_SOCKET_IFNAME='nonesuch0', an interface without an IPv4 address"):
        own_host()


def test_without_a_key_an_address_that_others_reach_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        host = probe.getsockname()[0]
    monkeypatch.delenv(VARIABLE, raising=False)

    def body(group: dist.ProcessGroup) -> None:
        mixer = RunningSums(host=host)
        mixer.bind(UniformMixing(RingGraph(2)), connect(group, module_device=CPU, timeout=TIMEOUT))
        mixer.close()

    with pytest.warns(UserWarning, match=rf"got datagrams at {host} and no key: .*set GOSSIP_JOB_KEY"):
        run_ranks(2, body)
    monkeypatch.setenv(VARIABLE, KEY.decode())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, body)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "224.0.0.1", "255.255.255.255", 5, "192.0.2.1"])
def test_an_address_that_is_not_of_one_machine_is_an_error(host: Any) -> None:
    with pytest.raises(ValueError, match=rf"got host={host!r}, .*expected"):
        checked_host(host, others="the other ranks")


def test_loopback_addresses_on_several_machines_are_an_error() -> None:
    check_reachable(["127.0.0.1"] * 2, ["a", "a"], [0, 1])
    check_reachable(["10.0.0.1", "10.0.0.2"], ["a", "b"], [0, 1])
    for addresses, machines in ((["127.0.1.1", "10.0.0.2"], ["a", "a"]), (["127.0.0.1"] * 2, ["a", "b"])):
        with pytest.raises(ValueError, match=r"for the address of ranks \[0.*\], which only .* rank 1 .*; pass host="):
            check_reachable(addresses, machines, [0, 1])


def test_loopback_addresses_on_several_machines_are_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)

    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"which only their own machine reaches"):
            opened(group, host="127.0.0.1")

    run_ranks(2, body)


def test_a_socket_is_closed_in_its_own_thread() -> None:
    def body(group: dist.ProcessGroup) -> None:
        datagrams, done = opened(group), threading.Event()

        def handle(*_: object) -> None:
            datagrams.close()
            done.set()

        if group.rank() == 0:
            datagrams.listen(handle)
            assert done.wait(20)
            assert datagrams.error is None
        else:
            datagrams.send(0, Datagram(0))
        dist.barrier(group)
        datagrams.close()

    run_ranks(2, body)
    assert_no_gossip_threads()

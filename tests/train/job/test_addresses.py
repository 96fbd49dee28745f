"""Addresses: under which host others reach this machine."""

from __future__ import annotations

import ipaddress

import pytest

from tests.train.training.test_checkpoint import Ranks
from train.job import addresses
from train.job.addresses import interface_address, own_host, source_address


@pytest.fixture(autouse=True)
def _no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def test_one_machine_is_reached_by_loopback() -> None:
    assert [ipaddress.ip_address(host).is_loopback for host in Ranks(3).run(own_host)] == [True] * 3


def test_the_interface_of_gloo_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    monkeypatch.setenv("MASTER_ADDR", "nonesuch.invalid")
    assert own_host(Ranks(1)[0]) == interface_address("lo") == "127.0.0.1"


def test_the_host_of_the_master_is_reached_as_it_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 0 finds the master on itself; rank 1 is on another machine, and reaches the master from 10.0.0.2.
    ways = {"master": iter(["127.0.1.1", "10.0.0.2"]), "10.0.0.2": iter(["10.0.0.1"])}
    monkeypatch.setenv("MASTER_ADDR", "master")
    monkeypatch.setattr(addresses, "source_address", lambda host: next(ways[host]))
    assert sorted(Ranks(2).run(own_host)) == ["10.0.0.1", "10.0.0.2"]


def test_unreachable_hosts_and_missing_interfaces_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"got no way to nonesuch.invalid .*check MASTER_ADDR, or name the network"):
        source_address("nonesuch.invalid")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    with pytest.raises(ValueError, match=r"rank 0: got GLOO_SOCKET_IFNAME=nonesuch0 .*choose one of .*lo"):
        own_host(Ranks(1)[0])

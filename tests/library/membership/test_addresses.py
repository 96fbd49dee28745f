"""The addresses of the groups of a worker: exchanged at once, or not at all."""

from __future__ import annotations

import json
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gossip_modules.membership.addresses import connect_groups
from gossip_modules.membership.shared_roster import SharedRoster
from tests.harness.ranks import TIMEOUT, run_ranks


@pytest.mark.parametrize("interfaces", ["", "lo,lo"])
def test_groups_are_made_with_one_exchange_for_each_interface(interfaces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if interfaces:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    shared = [SharedRoster(dist.HashStore(), name="job", timeout=TIMEOUT)] * 2
    names: list[str] = []

    def connect(group: dist.ProcessGroup) -> list[float]:
        rank = group.rank()

        def exchange(name: str, text: str) -> list[str]:
            names.append(name)
            return shared[rank].gather(name, rank, text, (0, 1), is_void=lambda: False)

        places = dict.fromkeys("abc", (rank, 2))
        host = None if interfaces else "127.0.0.1"
        sums = [torch.ones(2) for _ in places]
        for i, made in enumerate(connect_groups(places, exchange, patience=TIMEOUT, host=host)):
            made.allreduce([sums[i].mul_(i)]).wait()
        return [x.sum().item() for x in sums]

    assert run_ranks(2, connect) == [[0.0, 4.0, 8.0]] * 2
    assert sorted(names) == (["0", "0", "1", "1"] if interfaces else ["0", "0"])


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_wait_for_the_addresses_of_others_is_ended(is_closed: bool) -> None:
    """And those of this worker are taken back, so that nobody connects with them."""
    store, voided, late = dist.HashStore(), threading.Event(), list[int]()
    shared = SharedRoster(store, name="job", timeout=TIMEOUT)
    errors: list[str] = []

    def exchange(name: str, text: str) -> list[str]:
        return shared.gather(name, 0, text, (0, 1), is_void=voided.is_set, on_late=late.extend, patience=0.0)

    def make() -> None:
        try:
            connect_groups({"a": (0, 2), "b": (0, 2)}, exchange, patience=TIMEOUT, host="127.0.0.1")
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    while not late:
        time.sleep(0.01)
    assert store.check(["gossip/job/0/0"])
    (shared.ended if is_closed else voided).set()
    thread.join(TIMEOUT.total_seconds() / 2)
    assert not thread.is_alive()
    assert errors == ["the exchange 0 was ended before all had come"]
    assert late == [1]
    assert not store.check(["gossip/job/0/0"])


def test_a_rank_that_does_not_connect_is_waited_for_no_longer_than_the_patience() -> None:
    """Gloo itself waits five times as long."""
    patience = 1.0

    def exchange(name: str, text: str) -> list[str]:
        ((key, own),) = json.loads(text).items()
        port = own.index(socket.inet_aton("127.0.0.1").hex()) - 4
        # The rank with the higher port connects with the other one; this one never does.
        return [text, json.dumps({f"{key[:-1]}1": f"{own[:port]}ffff{own[port + 4 :]}"})]

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="Connect timeout"):
        connect_groups({"": (0, 2)}, exchange, patience=timedelta(seconds=patience), host="127.0.0.1")
    assert time.monotonic() - start < 4 * patience


def test_a_group_that_cannot_be_made_ends_the_others() -> None:
    def exchange(name: str, text: str) -> list[str]:
        raise AssertionError("there are no addresses")

    with pytest.raises(RuntimeError):
        connect_groups({"a": (0, 2), "b": (0, 2)}, exchange, patience=timedelta(seconds=1), host="192.0.2.1")

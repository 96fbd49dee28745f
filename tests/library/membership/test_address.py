"""The address of the store: in a file, which changes when the store is started anew elsewhere."""

from __future__ import annotations

import re
import socket
import time
from datetime import timedelta
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gossip_modules.membership import shared_roster
from gossip_modules.membership.address import connect_store, own_address, store_address
from gossip_modules.membership.serve import write_address
from gossip_modules.membership.shared_roster import SharedRoster
from tests.library.membership.test_roster import ids, job

TIMEOUT = timedelta(seconds=20)


def serve(path: Path) -> dist.TCPStore:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    write_address(path, f"127.0.0.1:{server.port}")
    return server


def test_a_store_that_has_moved_is_found_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_roster, "_RECONNECT_SECONDS", 0.0)
    path = tmp_path / "run" / "store"
    first = serve(path)
    shared = SharedRoster(f"file:{path}", name="job", timeout=TIMEOUT)
    assert shared.address == f"127.0.0.1:{first.port}"
    shared.roster = job(3)
    del first
    deadline = time.monotonic() + 20
    while shared.update([methodcaller("ask", 1)]):  # until the connection is seen to be closed
        assert time.monotonic() < deadline
    shared.roster = job(3)
    second = serve(path)  # at another port, and empty
    while not shared.update():
        assert time.monotonic() < deadline
    assert shared.address == f"127.0.0.1:{second.port}"
    other = SharedRoster(f"file:{path}", name="job", timeout=TIMEOUT)
    assert other.update()
    assert ids(other.roster) == (0, 1, 2)


def test_a_store_that_was_lost_is_asked_for_often_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connect, asked = socket.create_connection, []

    def refuse_at_first(address: tuple[str, int], **options: Any) -> socket.socket:
        asked.append(address)
        if len(asked) < 4:
            raise ConnectionRefusedError("nobody listens")
        return connect(address, **options)

    monkeypatch.setattr(socket, "create_connection", refuse_at_first)
    client = connect_store(f"127.0.0.1:{server.port}", TIMEOUT, was_lost=True)
    assert asked == [("127.0.0.1", server.port)] * 4
    client.set("key", "value")
    assert server.get("key") == b"value"


@pytest.mark.parametrize("text", [None, "", "node0", "node0:", "node0:x", ":29400"])
def test_a_file_without_an_address_is_an_error_after_the_timeout(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "store"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert store_address(f"file:{path}") == f"file:{path}"
    message = rf"at file:{path} did not answer within 0.1 s .*membership.serve --address-file {path}"
    with pytest.raises(ConnectionError, match=message):
        connect_store(f"file:{path}", timedelta(seconds=0.1))


@pytest.mark.parametrize("store", ["node0", "node0:", "node0:http", "file:"])
def test_another_form_is_refused(store: str) -> None:
    with pytest.raises(ValueError, match=rf"got store='{store}', expected 'host:port', like .*, or 'file:path'"):
        connect_store(store, TIMEOUT)


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_all_interfaces_are_no_address_at_which_others_reach_a_worker(host: str) -> None:
    with pytest.raises(ValueError, match=rf"got host='{host}', which is all interfaces of this machine, expected"):
        own_address("127.0.0.1:1", host)
    assert own_address("127.0.0.1:1", "127.0.0.2") == "127.0.0.2"


@pytest.mark.parametrize("store", ["[::1]:29400", "::1:29400"])
def test_a_store_that_is_reached_by_ipv6_only_is_refused(store: str) -> None:
    message = r"to which there is no way by IPv4 \(.*\), expected one, .*; give the store by an IPv4 address"
    with pytest.raises(ValueError, match=rf"got the store of the job at {re.escape(store)}, {message}"):
        own_address(store)
    assert own_address(store, "127.0.0.1") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"got host='::1', which is no IPv4 address .*, expected the IPv4 address"):
        own_address("127.0.0.1:1", "::1")
